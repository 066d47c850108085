"""Losses lie in [0, C], are as steep as they say and no steeper, and refuse what breaks them."""

from __future__ import annotations

import math

import pytest
import torch

from normscope.bounds.losses import Loss, l1, loss_of, margins, ramp, zero_one
from normscope.core.errors import InputError

SMOOTH = (l1(), ramp(), ramp(0.3))


def scores(samples: int, classes: int, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(classes, (samples,), generator=generator)


def test_values_by_hand():
    z, y = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 3.0], [0.0, 0.4, 0.0]]), torch.tensor([0, 1, 1])
    p = torch.softmax(z, 1)
    one_hot = torch.nn.functional.one_hot(y, 3)
    torch.testing.assert_close(l1()(z, y), (p - one_hot).abs().sum(1))
    assert margins(z, y).tolist() == pytest.approx([2.0, 0.0, 0.4])
    assert zero_one()(z, y).tolist() == [0, 1, 0]  # a tie is no right answer
    assert ramp()(z, y).tolist() == pytest.approx([0, 1, 0.6])
    assert ramp(0.2)(z, y).tolist() == [0, 1, 0]


@pytest.mark.parametrize("classes", [2, 3, 50])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_in_range_and_order(classes, scale):
    z, y = scores(500, classes, scale)
    for loss in (*SMOOTH, zero_one()):
        values = loss(z, y)
        assert bool((values >= 0).all()) and bool((values <= loss.bound).all())
    assert bool((zero_one()(z, y) <= ramp()(z, y)).all())


@pytest.mark.parametrize("loss", SMOOTH, ids=lambda loss: loss.name)
@pytest.mark.parametrize("classes", [2, 5])
def test_no_steeper_than_the_slope_and_almost_as_steep(loss, classes):
    z, y = scores(20_000, classes, 0.7)
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(z, y).sum(), z)
    steepest = float(gradient.norm(dim=1).max())
    assert steepest <= loss.slope * (1 + 1e-12)
    assert steepest >= 0.9 * loss.slope or classes > 2


def test_l1_slope_is_attained():
    z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(l1()(z, torch.tensor([0])).sum(), z)
    assert float(gradient.norm()) == pytest.approx(math.sqrt(0.5), rel=1e-14)
    assert l1().slope == pytest.approx(math.sqrt(0.5), rel=1e-14)


@pytest.mark.parametrize("loss", (*SMOOTH, zero_one()), ids=lambda loss: loss.name)
@pytest.mark.parametrize("distance", [0.0, 1e-3, 0.5, 10.0])
def test_slope_near_outputs_bounds_difference_quotients(loss, distance):
    z, y = scores(400, 4, 2.0)
    slope = loss.slope_near(z, y, distance)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        around = [
            z + distance * torch.nn.functional.normalize(torch.randn(z.shape, generator=generator).double()) for _ in range(2)
        ]
        change = (loss(around[0], y) - loss(around[1], y)).abs()
        assert bool((change <= slope * (around[0] - around[1]).norm(dim=1) + 1e-12).nan_to_num(0).logical_or(slope.isinf()).all())
    assert bool((slope <= loss.slope * (1 + 1e-9)).all())


def test_zero_one_is_flat_away_from_the_boundary():
    z, y = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).double(), torch.tensor([0, 0])
    assert zero_one().slope_near(z, y, 2.0).tolist() == [0, 0]
    assert zero_one().slope_near(z, y, 2.2).tolist() == [math.inf, math.inf]  # √2 · 2.2 > 3


@pytest.mark.parametrize(
    ("loss", "bound", "message"),
    [
        ("l2", None, "one of l1, zero-one, ramp"),
        ("l1", 3.0, "at most 2"),
        (lambda z, y: z[:, 0], None, "needs loss_bound"),
        (lambda z, y: z[:, 0], math.inf, "finite number above 0"),
        (3, 1.0, "got int"),
    ],
)
def test_what_is_no_loss(loss, bound, message):
    with pytest.raises(InputError, match=message):
        loss_of(loss, bound)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda z, y: z.sum(), "one value per sample"),
        (lambda z, y: z, "one value per sample"),
        (lambda z, y: z[:1, 0], "one value per sample"),
        (lambda z, y: z[:, 0] * 0 + 1.1, "state a loss_bound"),
        (lambda z, y: z[:, 0] * 0 - 0.1, "state a loss_bound"),
        (lambda z, y: z[:, 0] * math.nan, "look for nan"),
    ],
)
def test_violations_are_named(value, message):
    z, y = scores(4, 3, 1.0)
    with pytest.raises(InputError, match=message):
        loss_of(value, 1.0)(z, y)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(3, 2), torch.zeros(3)),
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2])),
        (torch.zeros(3, 2), torch.tensor([0, 1, -1])),
        ([1, 2], torch.tensor([0, 1])),
    ],
)
def test_named_losses_need_classes(outputs, targets):
    with pytest.raises(InputError):
        l1()(outputs, targets)


def test_a_loss_of_ones_own_with_a_slope():
    loss = Loss("squashed", 1.0, lambda z, y: torch.tanh(z[:, 0].abs()), slope=1.0)
    z, y = scores(5, 3, 1.0)
    assert loss_of(loss) is loss
    assert loss.slope_near(z, y, 0.1).tolist() == [1.0] * 5


@pytest.mark.parametrize("loss", [l1(), ramp(), zero_one()])
@pytest.mark.parametrize("row", [[math.nan, 0.0], [0.0, math.nan], [math.inf, math.inf], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_without_an_answer_the_loss_is_the_largest_and_has_no_slope(loss, row):
    z, y = torch.tensor([row, [1.0, 0.0]], dtype=torch.float64), torch.tensor([0, 0])
    assert float(loss(z, y)[0]) == loss.bound
    assert float(loss.slope_near(z, y, 0.1)[0]) == math.inf and float(margins(z, y)[0]) == -math.inf
