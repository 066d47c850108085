"""In train mode a graph is compared with the model too: dropout is off on both sides, or both draw the same numbers."""

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


@torch.jit.script
def scripted(x: Tensor, train: bool) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, train)


@torch.jit.script
def noisy(x: Tensor, train: bool) -> Tensor:
    return x + torch.rand(8) if train else x


def behind_a_write(x: Tensor, train: bool) -> Tensor:
    """torch then writes dropout as other operations."""
    y = x * 1
    y[..., :2] += 1
    return functional.dropout(y, 0.3, train)


def depth(x: Tensor, train: bool) -> Tensor:
    """Stochastic depth: samples are dropped as a whole."""
    return x + x.relu() * torch.empty(len(x), 1, 1).bernoulli_(0.6) if train else x


def shuffled(x: Tensor, train: bool) -> Tensor:
    return x + functional.dropout(x, 0.3, train)[torch.randperm(len(x))]


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
    "a script": scripted,
    "noise in a script": noisy,
    "behind a write": behind_a_write,
    "depth": depth,
    "shuffled samples": shuffled,
    "slopes": lambda x, train: functional.rrelu(x, training=train),
    "noise beside dropout": lambda x, train: functional.dropout(x, 0.3, train) + torch.randn(8) * torch.rand_like(x),
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
    assert not any("not compared" in note for note in traced(MODELS[name]()).notes)


@pytest.mark.parametrize("name", DROPS)
def test_a_model_that_drops_and_is_not_its_graph_is_refused(name):
    with pytest.raises(ns.Refusal, match="not the model"):
        traced(Dropping(DROPS[name], exported=True))


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_dropout_behind_a_norm_that_moves_its_buffers(norm):
    """Writes to buffers make torch write dropout as other operations, which draw when patterns are looked for too."""
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.Dropout(0.3), nn.Linear(8, 2))
    assert not ns.symmetries(model, randn(6, 8)).check()


def test_what_a_model_draws_as_an_index_is_drawn_as_one():
    model = nn.Sequential(Dropping(shuffled), nn.LayerNorm(8), nn.Linear(8, 2))
    report = ns.symmetries(model, randn(4, 5, 8))
    assert not report.check() and all(group.defect < 1e-2 for group in report)
