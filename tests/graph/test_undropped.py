"""In train mode a graph is compared with the model too: dropout is off on both sides, also inside of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normscope as ns
from normscope.core.data import Call
from normscope.graph.parametric import trace_parameters
from tests.networks import randn


class Dropping(nn.Module):
    """A linear map before something that drops at random; exported: whether torch.export sees another function."""

    def __init__(self, drop, exported: bool = False):
        super().__init__()
        self.linear, self.drop, self.exported = nn.Linear(8, 8), drop, exported

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x), self.training)
        return 3 * y if self.exported and torch.compiler.is_exporting() else y


class Attending(Dropping):
    def __init__(self, exported: bool = False):
        super().__init__(lambda x, train: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3 * train), exported)


DROPS = {
    "functional": lambda x, train: functional.dropout(x, 0.3, train),
    "by name": lambda x, train: functional.dropout(input=x, p=0.3, training=train),
    "in place": lambda x, train: functional.dropout(x, 0.3, train, inplace=True) + x,
    "torch": lambda x, train: torch.dropout(x, 0.3, train),
    "torch, in place": lambda x, train: torch.dropout_(x, 0.3, train),
    "channels": lambda x, train: functional.dropout1d(x, 0.3, train),
    "alpha": lambda x, train: functional.alpha_dropout(x, 0.3, train),
    "attention": lambda x, train: functional.scaled_dot_product_attention(x, x, x, None, 0.3 * train),
}
MODELS = {
    **{name: (lambda drop=drop: Dropping(drop)) for name, drop in DROPS.items()},
    "attention by name": Attending,
    "an encoder's layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
}


def traced(model: nn.Module):
    return trace_parameters(model.train(), Call.of(randn(4, 5, 8)), "train")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_drops_is_compared_with_its_graph(name):
    assert not traced(MODELS[name]()).notes


@pytest.mark.parametrize("name", ["functional", "attention"])
def test_a_model_that_drops_and_is_not_its_graph_is_refused(name):
    with pytest.raises(ns.Refusal, match="not the model"):
        traced(Dropping(DROPS[name], exported=True))


@torch.jit.script
def scripted(x: Tensor, train: bool) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, train)


def test_what_drops_inside_a_script_is_said_to_be_random():
    """Nothing stops it there, so that the graph cannot be compared; the note says so."""
    assert any("random" in note for note in traced(Dropping(scripted)).notes)
