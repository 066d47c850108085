"""The smallest case of everything that was wrong once."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from normscope import Ball, Box
from normscope.certify.upper import forward_pass
from normscope.graph.trace import trace
from tests.cases import Function, randn


def shared_padding(x: Tensor) -> Tensor:
    padded = functional.pad(x[:, None], (4, 4), mode="replicate")
    kernel = torch.ones(1, 1, 1)
    return functional.conv1d(padded, kernel, padding=1) + functional.conv1d(padded, kernel, padding=1)


def attention_over(query: Tensor, keys: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, keys, keys, scale=1.0).reshape(1, -1)


HEADS = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1).expand(64, 1, 2, 1)
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
    "no entries": (lambda x: torch.cat([functional.relu(x[:, :0]), x], 1), (1, 4), 1),
    "one entry against many constants": (lambda x: torch.max(x, torch.full((5,), -100.0)), (1, 1), math.sqrt(5)),
    "a bias that takes the digits of a matrix": (lambda x: torch.addmm(torch.full((4,), 1e20), x, torch.eye(4)), (1, 4), 1),
    "a sum over an axis that is broadcast": (lambda x: torch.einsum("ij,jk->ik", 1 + torch.tanh(x[:, :1].T) / 10, 1 + torch.tanh(x.T) / 10).T, (1, 50), 5),
    "an average with a negative divisor": (lambda x: functional.avg_pool2d(x[..., None], (2, 1), stride=1, divisor_override=-1), (1, 1, 3), math.sqrt(3)),
    "powers of zero": (lambda x: torch.pow(0.0, x), (1, 4), math.inf),
    "softplus that turns down": (lambda x: 1 / (1 + functional.softplus(x, beta=-1.0)), (1, 1), math.inf),
    "the shape of another value": (lambda x: x[:, :1].expand_as(x).reshape(1, 4, 1).view_as(x), (1, 4), 2),
    "one query for many heads": (lambda x: attention_over(torch.tanh(x).reshape(1, 1, 1, 1), HEADS), (1, 1), 8),
    "one key for many heads": (lambda x: attention_over(HEADS[:, :, :1], torch.tanh(x).reshape(1, 1, 2, 1)), (1, 2), 8 / math.sqrt(2)),
    "a spread with hardly a count": (lambda x: torch.std(x, -1, correction=3.9), (1, 4), 1 / math.sqrt(0.1)),
    "a vector against several matrices": (lambda x: torch.matmul(x[0].clamp(0, 1), torch.ones(9, 4, 1))[None], (1, 4), 6),
    "a scale beside an activation": (lambda x: x * torch.sigmoid(x) * 1.0000009, (1, 4), 1.09983931 * 1.0000009),
}  # fmt: skip


# no bound is proved, and no inputs show that there is none: refused
UNPROVED = ("powers of zero", "softplus that turns down", "weights below zero", "exponentials to the left")


@pytest.mark.parametrize("name", REGRESSIONS)
def test_once_wrong(name):
    function, shape, reached = REGRESSIONS[name]
    model = copy.deepcopy(function) if isinstance(function, nn.Module) else Function(function)
    found = ns.audit(model, randn(*shape), local=False).bracket
    assert found.upper is None or (found.lower <= found.upper and float(found.upper) >= reached * (1 - 1e-9))
    assert found.upper is not None or name in UNPROVED


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


IN_A_BOX = {  # a function, the lower and upper ends of a box, a number that its constant reaches there
    "a form with a matrix": (lambda x: torch.einsum("bi,bj,ij->b", x, x, 1000 * torch.eye(2).double()), [-1.0, -1.0], [1.0, 1.0], 2000 * math.sqrt(2)),
    "weights below zero": (lambda x: 1 / (3000 + torch.einsum("bi,bi,i->b", x, torch.exp(x), torch.full((2,), -1000.0).double())), [1.0, 1.0], [1.1, 1.1], 5e-4),
    "exponentials to the left": (nn.CELU(-1.0), [-3.0], [-3.0], math.exp(3)),
    "softplus that jumps": (lambda x: functional.softplus(x, threshold=1.0), [0.9], [1.1], math.inf),
    "one logit above the rest, or not": (lambda x: 1 / x.softmax(-1)[:, :1], [-46.0] * 3, [0.0, -46.0, -46.0], math.sqrt(6)),
    "logits far below the largest": (lambda x: x.softmax(-1)[:, 0].square(), [-746.0, -744.0, -1400.0], [-746.0, -744.0, 0.0], 0.02),
    "a saturated sigmoid": (lambda x: 1e20 * torch.sigmoid(x), [40.0], [40.0], 1e20 * math.exp(-40)),
    "a saturated tanh": (lambda x: 1e20 * torch.tanh(x), [20.0], [20.0], 4e20 * math.exp(-40)),
    "a variance over more than there are": (lambda x: standardized(x, correction=-20), [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], 2 * math.sqrt(6)),
}  # fmt: skip


def standardized(x: Tensor, correction: int) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=correction, keepdim=True) + 1e-9).sqrt()


@pytest.mark.parametrize("name", IN_A_BOX)
def test_once_wrong_in_a_box(name):
    function, low, high, reached = IN_A_BOX[name]
    model, region = Function(function), Box(torch.tensor(low).double(), torch.tensor(high).double())
    found = ns.audit(model, region.middle[0][None], region=region).bracket
    assert found.upper is None or float(found.upper) >= reached * (1 - 1e-6)
    assert found.upper is not None or name in UNPROVED


@pytest.mark.parametrize("normalizer", [nn.InstanceNorm1d(2, affine=True), nn.GroupNorm(1, 2)], ids=["instance", "group"])
def test_rows_behind_a_normalizer_of_channels_are_as_long_as_they_can_be(normalizer):
    """γ and β belong to channels, not to the last axis, and one channel may hold what a whole group has."""
    nn.init.constant_(normalizer.bias, 3.0)
    graph = trace(normalizer, randn(1, 2, 16))
    x = torch.cat([50 * torch.ones(1, 1, 8), -50 * torch.ones(1, 1, 8)], 2) * torch.tensor([1.0, 0.0]).reshape(1, 2, 1)
    longest = torch.linalg.vector_norm(normalizer(x).detach(), dim=-1).max()
    assert forward_pass(graph).norm(graph.output) >= float(longest) * (1 - 1e-6)


def test_batch_norm_is_not_folded_into_a_convolution_without_a_batch():
    """Behind a convolution of (channels, length) BN takes the length for its channels."""
    model = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.BatchNorm1d(4), nn.Flatten(0)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(1.0, 5.0).reshape(4, 1, 1))
        model[1].running_var.copy_(torch.tensor([1.0, 1.0, 1.0, 1e-4]))
    found = ns.lipschitz(nn.Sequential(model, nn.Unflatten(0, (1, -1))), randn(1, 4))
    assert float(found.upper) >= math.sqrt(30) / math.sqrt(1.1e-4) * (1 - 1e-6)


def test_a_fold_that_cannot_be_compared_is_no_fold():
    """Values that overflow for one input say nothing about the map: they were "a bug of normscope"."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, eps=1e-300)).double().eval()
    nn.init.constant_(model[0].bias, 1e300)
    nn.init.zeros_(model[1].running_var)
    found = forward_pass(trace(model, randn(1, 3).double()))
    assert found.at(found.graph.output).log10 == pytest.approx(150, abs=1)


def test_a_query_that_sees_no_key_gets_zero():
    mask = torch.tensor([[True, True], [False, False]])
    model = Function(lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    graph = trace(model, torch.ones(1, 2, 2))
    bounds = forward_pass(graph, region=Ball(torch.ones(2, 2), 0.1)).interval(graph.output)
    assert (bounds.low[0, 1] <= 0).all() and (bounds.high[0, 0] >= 1).all()


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


def test_a_region_is_no_worse_than_everywhere_where_digits_are_lost():
    """Tokens of zeros with a tiny ε: the values at the middle are uncertain, but LN bounds its outputs whatever it reads."""

    def layers(x):
        for _ in range(3):
            tokens = functional.layer_norm(x, (4,), eps=1e-12)
            x = x + functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return x

    x = torch.zeros(1, 3, 4)
    x[0, 0] = torch.tensor([1.0, -1.0, 2.0, 0.0])
    everywhere, near = (ns.lipschitz(Function(layers), x, region=region, effort=0.1) for region in (None, Ball(x[0], 1e-3)))
    assert near.upper <= everywhere.upper


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
    found = ns.certify.operator_norm(kernel, 32, padding=8, padding_mode="circular")
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


def test_values_added_to_a_tensor_that_they_come_from_count_twice():
    indices = torch.tensor([0, 0, 0, 0, 4, 5])

    class Itself(torch.nn.Module):
        def forward(self, x):
            z = x.T
            return z.index_put((indices,), z, accumulate=True).T

    matrix = torch.eye(6, dtype=torch.float64).index_add(0, indices, torch.eye(6, dtype=torch.float64))
    assert float(ns.lipschitz(Itself(), torch.randn(1, 6)).upper) >= float(torch.linalg.matrix_norm(matrix, 2))


def test_a_quotient_that_is_rounded_is_no_pattern():
    class Rounded(torch.nn.Module):
        def forward(self, x):
            return torch.cat([100 * x, 1e-4 * torch.div(x, 1 + x.abs(), rounding_mode="floor")], 1)

    assert not ns.lipschitz(Rounded(), torch.randn(1, 3)).upper.finite


def test_products_of_products_are_traced_in_time():
    class Powers(torch.nn.Module):
        def forward(self, x):
            for _ in range(40):
                x = x * x
            return x

    with pytest.raises(ns.Refusal, match="product"):  # x^(2^40) overflows before it shows growth
        ns.lipschitz(Powers(), torch.zeros(1, 2))


def test_complex_weights_are_refused():
    with pytest.raises(ns.InputError, match="complex"):
        ns.certify.operator_norm(1j * torch.eye(2))


def test_weights_of_two_types_in_the_same_memory_share_no_norm():
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.eye(2).bfloat16() * 1e-3
            self.register_buffer("weight", weight)
            self.register_buffer("again", weight.view(torch.half))  # 0.814

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.float()) + functional.linear(x, self.again.float())

    model = Read()
    truth = float(model.weight[0, 0]) + float(model.again[0, 0])
    assert math.isclose(float(ns.lipschitz(model, randn(1, 2)).upper), truth, rel_tol=1e-6) and truth > 0.8


WITHOUT_AXES = {  # functions of a number without axes, and their constants
    "itself": (lambda s: s, 1),
    "ReLU": (torch.relu, 1),
    "softmax": (lambda s: s.softmax(0), 0),
    "softmin": (lambda s: functional.softmin(s, -1), 0),
    "log-softmax": (lambda s: s.log_softmax(-1), 0),
    "its least and largest": (lambda s: torch.stack(torch.aminmax(s, dim=0)), math.sqrt(2)),
    "its mean": (lambda s: s.mean(0), 1),
    "its distance from the mean": (lambda s: s - s.mean(0, keepdim=True), 0),
    "its norm": (lambda s: s / 2 + s.norm(dim=0, keepdim=True), 1.5),
    "a matrix times it": (lambda s: torch.inner(s, torch.eye(9)), 3),
    "two of it": (lambda s: torch.cat(torch.atleast_1d(s, s)), math.sqrt(2)),
    "a jump": (lambda s: torch.where(s > 0, s, s - 1), math.inf),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", WITHOUT_AXES)
def test_numbers_without_axes(name):
    """They are there where the whole batch is one input."""
    function, expected = WITHOUT_AXES[name]
    model, x = Function(lambda x: function(x.sum() / 2)), randn(1, 4)
    found = ns.lipschitz(model, x, mode="batch", effort=0.1)
    assert found.upper >= expected * (1 - 1e-6) and found.lower <= max(expected, 1e-3 * found.upper) * (1 + 1e-6)
    assert ns.lipschitz(model, x, mode="batch", region=Ball(x, 0.1), effort=0.1).upper <= max(found.upper, expected) * (1 + 1e-6)
    ns.symmetries(model, x)
