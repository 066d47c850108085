"""Decisions that depend on values: constants on a region where they are certain, no bound where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from tests.cases import Function, randn


class Experts(nn.Module):
    """Each token goes to the `chosen` experts with the highest scores, weighted by them."""

    def __init__(self, chosen: int = 2, ordered: bool = True) -> None:
        super().__init__()
        self.gate, self.chosen, self.ordered = nn.Linear(4, 3, bias=False), chosen, ordered
        self.experts = nn.Parameter(randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores, places = self.gate(x).softmax(-1).topk(self.chosen, dim=-1, sorted=self.ordered)
        return torch.einsum("bk,bki->bi", scores, torch.einsum("bj,bkji->bki", x, self.experts[places]))


def clear(x: Tensor) -> Tensor:
    return torch.where(x > 0.5, 3 * x, x)


DECIDING = {
    "experts": (Experts(), randn(1, 4)),
    "one expert": (Experts(1), randn(1, 4)),
    "experts in any order": (Experts(ordered=False), randn(1, 4)),
    "a jump": (Function(clear), torch.tensor([[0.1, 0.9, -2.0]])),
    "the place of the largest": (
        Function(lambda x: x * torch.nn.functional.one_hot(x.argmax(-1), 3)),
        torch.tensor([[0.1, 0.9, -2.0]]),
    ),
    "sorted by": (Function(lambda x: 2 * x.gather(1, x.argsort(1))), torch.tensor([[0.1, 0.9, -2.0]])),
    "a sign as a mask": (Function(lambda x: x * (x > 0).to(x.dtype)), torch.tensor([[0.1, 0.9, -2.0]])),
}
CONTINUOUS = ("sorted by", "a sign as a mask")  # whose decisions change where both answers give the same: they have a constant


@pytest.mark.parametrize("name", DECIDING)
def test_certain_decisions_are_constants(name):
    """Near the sample the bound is finite, above the Jacobian's norm, and within a few percent of it on a tiny ball."""
    model, example = DECIDING[name]
    jacobian = torch.autograd.functional.jacobian(lambda x: model.double()(x[None])[0], example[0].double())
    model.float()
    found = ns.lipschitz(model, example, region=ns.Ball(example[0], 1e-4))
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert found.upper.finite and found.lower <= found.upper
    assert exact * (1 - 1e-3) <= float(found.upper) <= 1.5 * exact


@pytest.mark.parametrize("name", DECIDING)
def test_everywhere_there_is_no_bound_and_the_decision_is_named(name):
    model, example = DECIDING[name]
    found = ns.audit(model, example, effort=0.1, local=False).bracket
    assert found.upper is None or not found.upper.finite
    assert "region" in " ".join([found.reason, *found.certificate.causes])
    assert (found.upper is None) == (name in CONTINUOUS)


@pytest.mark.parametrize("radius", [0.3, 0.5, 1.0])
def test_no_bound_where_a_jump_is_within_reach(radius):
    """The nearest jump is at a distance of 0.4."""
    found = ns.lipschitz(Function(clear), torch.tensor([[0.1, 0.9, -2.0]]), region=ns.Ball(torch.tensor([0.1, 0.9, -2.0]), radius))
    assert found.upper.finite == (radius < 0.4)
    assert radius < 0.4 or any("take a smaller one" in note for note in found.notes)


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(12))
def test_no_pair_of_points_exceeds_the_bound_of_a_router(seed):
    """Radii around the point where routing stops being certain: finite bounds hold for random pairs, jumps included."""
    torch.manual_seed(seed)
    model, example = Experts(1 + seed % 2), torch.randn(1, 4)
    for radius in (1e-3, 1e-2, 1e-1, 1.0):
        try:
            found = ns.lipschitz(model, example, region=ns.Ball(example[0], radius), effort=0.1)
        except ns.Refusal:
            continue
        if not found.upper.finite:
            continue
        steps = torch.randn(256, 2, 4)
        ends = example + radius * steps / steps.norm(dim=-1, keepdim=True)
        with torch.no_grad():
            values = model.double()(ends.double().reshape(-1, 4)).reshape(256, 2, -1)
        model.float()
        changes = (values[:, 0] - values[:, 1]).norm(dim=1) / (ends[:, 0] - ends[:, 1]).double().norm(dim=1)
        assert float(changes.max()) <= float(found.upper) * (1 + 1e-5)
