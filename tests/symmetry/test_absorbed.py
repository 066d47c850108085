"""A bias takes back only what is the same for every input and every random number."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import normscope as ns
from tests.networks import randn


class Between(nn.Module):
    """Two linear layers with something between the first one's output, or at the second one's weight."""

    def __init__(self, outputs=lambda h, x: h, weights=lambda w, x: w):
        super().__init__()
        self.one, self.two, self.outputs, self.weights = nn.Linear(8, 8), nn.Linear(8, 3), outputs, weights

    def forward(self, x):
        return functional.linear(self.outputs(self.one(x), x), self.weights(self.two.weight, x), self.two.bias)


VARYING = {
    "a number of the input": Between(lambda h, x: h * x.mean()),
    "a row of the input": Between(lambda h, x: h * x.mean(0)),
    "weights times the input": Between(weights=lambda w, x: w * x.mean(0)),
    "weights times noise": Between(weights=lambda w, x: w * torch.rand(3, 8)),
    "weights that are dropped": Between(weights=lambda w, x: functional.dropout(w, 0.3)),
}
FIXED = {
    "nothing": Between(),
    "a number": Between(lambda h, x: 3 * h),
    "a buffer": Between(lambda h, x: h * torch.arange(1.0, 9.0)),
    "weights made of weights": Between(weights=lambda w, x: w.relu()),
    "an average of the input's choosing": Between(lambda h, x: x[:, :6] .softmax(0).T.softmax(-1) @ h),
}  # fmt: skip


def shifts(model: nn.Module) -> list[tuple[str, ...]]:
    return [group.parameters for group in ns.symmetries(model, randn(6, 8)).of_kind("shift")]


@pytest.mark.parametrize("name", VARYING)
def test_what_varies_is_not_taken_back(name):
    assert ("one.bias", "two.bias") not in shifts(VARYING[name])


@pytest.mark.parametrize("name", FIXED)
def test_what_does_not_vary_is(name):
    assert ("one.bias", "two.bias") in shifts(FIXED[name])


def test_a_row_that_the_input_chooses_is_not_taken_back_at_its_place():
    """One sequence of ids without a batch: what a row adds at some places is taken back elsewhere for other ids."""

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.places = nn.Parameter(randn(5, 4)), nn.Parameter(randn(3, 4))

        def forward(self, ids):
            return torch.tanh(functional.embedding(ids, self.table) + self.places)

    model, ids = Embedded(), torch.tensor([0, 1, 3])
    moved = [group for group in ns.symmetries(model, ids) if set(group.parameters) == {"table", "places"}]
    before = [model(other) for other in (ids, torch.tensor([2, 2, 4]))]
    for group in moved:
        after = {**dict(model.named_parameters()), **group.transform(dict(model.named_parameters()))}
        for other, expected in zip((ids, torch.tensor([2, 2, 4])), before, strict=True):
            found = torch.func.functional_call(model, after, (other,))
            assert torch.allclose(found.to(expected), expected, atol=1e-5)
