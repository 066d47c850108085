"""The smallest case of everything that was wrong once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from normscope import Ball
from tests.cases import Function, randn


def shared_padding(x: Tensor) -> Tensor:
    padded = functional.pad(x[:, None], (4, 4), mode="replicate")
    kernel = torch.ones(1, 1, 1)
    return functional.conv1d(padded, kernel, padding=1) + functional.conv1d(padded, kernel, padding=1)


DIAGONAL = torch.diag(torch.linspace(0.1, 2, 2100))
UNEVEN = torch.tensor([[0.0, 0, 0.01, 0], [0, 9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
TAPS = torch.tensor([[[[0.0, 1.0], [0.0, 2.0]]]])
REGRESSIONS = {  # a function, the shape of its input, a number that its constant reaches
    "padding shared by convolutions": (shared_padding, (1, 4), math.sqrt(20)),
    "accumulated entries": (lambda x: torch.zeros(3).index_put((torch.zeros(4, dtype=torch.long),), x[0], accumulate=True)[None], (1, 4), 2),
    "a sum over one factor": (lambda x: torch.einsum("ij,ik->ik", 1 + torch.tanh(x) / 10, 1 + torch.tanh(x) / 10), (1, 50), 5),
    "a negative multiple of many inputs": (lambda x: torch.addmm(torch.zeros(2100), x, DIAGONAL, alpha=-1.0), (1, 2100), 2),
    "a weight and a view of it": (lambda x: torch.cat([functional.linear(x, UNEVEN[:1].expand(4, 4)), functional.linear(x, UNEVEN)], 1), (1, 4), 9),
    "a kernel and its transpose": (lambda x: functional.conv2d(x, TAPS) + functional.conv2d(x, TAPS.transpose(2, 3)), (1, 1, 2, 30), 3),
    "exponentials to the left": (nn.CELU(-1.0), (1, 4), 20),
    "a power with the base fixed": (lambda x: 2.0 ** torch.sigmoid(x), (1, 4), 0.2),
    "limits of their own": (lambda x: torch.clamp(x, -torch.ones(4), torch.ones(4)), (1, 4), 1),
    "padding with minus infinity": (lambda x: functional.max_pool1d(functional.pad(x[:, None], (1, 1), value=-math.inf), 3, 2), (1, 4), 1),
    "one output": (nn.Linear(2, 1, bias=False), (1, 2), 0),
    "random slopes in eval mode": (nn.RReLU(2.0, 4.0), (1, 4), 3),
    "hard sigmoid": (nn.Hardsigmoid(), (1, 4), 1 / 6),
    "a copy": (lambda x: torch.zeros(len(x), 4).copy_(x), (1, 4), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REGRESSIONS)
def test_once_wrong(name):
    function, shape, reached = REGRESSIONS[name]
    model = copy.deepcopy(function) if isinstance(function, nn.Module) else Function(function)
    for seed in range(3 if shape[-1] < 100 else 1):
        found = ns.lipschitz(model, randn(*shape, seed=seed))
        assert found.lower <= found.upper and float(found.upper) >= reached * (1 - 1e-9)


def test_a_number_beside_the_input_is_held_fixed():
    found = ns.lipschitz(Function(lambda x, c: x * c), (randn(1, 4), torch.tensor(2.0)))
    assert float(found.upper) == pytest.approx(2) and float(found.lower) == pytest.approx(2)


def test_slopes_of_waves_on_a_ball():
    """sin is as steep downwards as upwards, wherever the ball is."""
    model = nn.Sequential(nn.Linear(1, 2), Function(torch.sin), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(torch.tensor([3.0, 5.0]))
        model[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
    found = ns.lipschitz(model, torch.zeros(1, 1).double(), region=Ball(torch.zeros(1).double(), 0.5))
    assert 1.6 <= float(found.lower) <= float(found.upper)


@pytest.mark.parametrize("large", [0.0, 1e8, 1e14, 1e16])
def test_digits_that_cancel_are_not_trusted(large):
    """(x + c) − c is x, but float64 loses x to c: what it computes at the middle says little about the variance there."""
    x = 1 + 0.1 * randn(1, 8).double()
    model = Function(lambda x: functional.layer_norm((x + large) - large, (8,), eps=1e-12))
    found = ns.lipschitz(model, x, region=Ball(x[0], 1e-3))
    assert float(found.upper) >= 1 / float(x.std(correction=0))


def test_running_statistics_that_cancel_are_not_trusted():
    """BN's mean and bias cancel to nothing; LN behind it must not believe the digits that are left."""
    x = 1 + 0.1 * randn(1, 8).double()
    norm = nn.BatchNorm1d(8).double()
    norm.running_mean.fill_(1e15)
    norm.running_var.fill_(1 - norm.eps)
    with torch.no_grad():
        norm.bias.fill_(1e15)
    found = ns.lipschitz(nn.Sequential(norm, nn.LayerNorm(8, eps=1e-12)).double().eval(), x, region=Ball(x[0], 1e-3))
    assert float(found.upper) >= 1 / float(x.std(correction=0))


def test_masked_logits_keep_a_finite_error():
    """A mask of −∞ or of the dtype's least number leaves the softmax behind it as certain as without."""
    mask = torch.full((4, 4), -math.inf).triu(1)
    for masked in (
        lambda s: s + mask,
        lambda s: s + mask.clamp(min=torch.finfo(torch.float32).min),
        lambda s: s.masked_fill(mask < 0, -math.inf),
    ):
        attention = lambda x, masked=masked: functional.layer_norm(torch.softmax(masked(torch.atan(x @ x.mT)), -1) @ x, (3,))  # noqa: E731
        x = randn(1, 4, 3)
        found = ns.lipschitz(Function(attention), x, region=Ball(x[0], 1e-3))
        assert found.lower <= found.upper and float(found.upper) < 300 * float(found.lower)


def test_a_weight_that_is_not_a_number_is_named_behind_a_pattern_too():
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: x * torch.sigmoid(x)))
    with torch.no_grad():
        model[0].bias[0] = math.nan
    with pytest.raises(ns.InputError, match=r"0\.bias"):
        ns.lipschitz(model, randn(1, 4))


def test_circular_padding_beyond_the_same_size_repeats_outputs():
    kernel = torch.eye(64)[:, :, None].repeat(1, 1, 3)
    found = ns.operator_norm(kernel, 32, padding=8, padding_mode="circular")
    assert 4 < float(found.lower) <= float(found.upper) < 4.5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.clamp(x, torch.sin(x) - 1, torch.cos(x) + 1),
        lambda x: torch.clamp(x, -torch.ones(4), torch.tensor([1.0, 0.1, 2.0, 0.5])),
        lambda x: torch.clamp_min(x, torch.zeros(4)),
    ],
    ids=["limits of the input", "limits of their own", "one limit"],
)
@pytest.mark.parametrize("radius", [1e-3, 2.0])
def test_clamps_of_every_kind_on_a_ball(function, radius):
    x = randn(1, 4)
    found = ns.lipschitz(Function(function), x, region=Ball(x[0], radius))
    assert 0 < float(found.lower) <= float(found.upper) <= 3


def test_an_exponent_that_depends_on_the_input_is_refused():
    with pytest.raises(ns.Refusal, match="exponent"):
        ns.lipschitz(Function(lambda x: (x.abs() + 1) ** torch.sigmoid(x)), randn(1, 4))
