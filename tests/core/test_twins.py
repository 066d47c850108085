"""A model is copied as it is in the middle of training, with what its last pass has left in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.core.twins import twin_of
from tests.networks import randn


class Keeping(nn.Module):
    """Keeps what it computes, as for a loss on its features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.kept = nn.Linear(4, 8), nn.BatchNorm1d(8), {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["features"] = [self.norm(self.linear(x))]
        return self.kept["features"][0].relu()


MODELS = {
    "keeping": Keeping,
    "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8)),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8)),
}


def stepped(name: str) -> nn.Module:
    model = MODELS[name]()
    model(randn(5, 4)).sum().backward()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_twin_computes_the_same_and_shares_nothing(name):
    model = stepped(name).eval()
    twin = twin_of(model)
    x = randn(5, 4)
    assert torch.equal(twin(x), model(x))
    own, other = ({value.data_ptr() for value in each.state_dict().values()} for each in (model, twin))
    assert not own & other


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_training_is_examined_like_any_other(name):
    model, x = stepped(name), randn(5, 4)
    assert "defect" in str(ns.symmetries(model, x))
    ns.doctor(model, x).apply()
