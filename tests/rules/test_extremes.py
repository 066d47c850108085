"""Rules at odd arguments and at scales from 1e-320 to 1e300: the bound is true, or it is infinite with a reason."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normscope as ns
from normscope.certify.upper import forward_pass, upper
from normscope.core.errors import Refusal
from normscope.graph.graph import Graph
from normscope.graph.trace import trace
from normscope.operators.conv import Convolution
from tests.networks import Function

D = torch.float64
SCALES = (5e-324, 1e-320, 1e-310, 1e-200, 1e-162, 1e-100, 1.0, 1e100, 1e160, 1e200, 1e300)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def log10_of(model, shape: tuple[int, ...], region: ns.Region | None = None) -> float:
    made = model if isinstance(model, nn.Module) else Function(model)
    return upper(trace(made, torch.zeros(1, *shape, dtype=D)), region=region).bound.log10


WEIGHT = tensor([[1.0, 2.0], [-2.0, 0.5]])
HALVES = tensor([0.6, 0.8]).repeat(2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def running(scale: float) -> nn.Module:
    model = nn.BatchNorm1d(3, eps=0.0).double().eval()
    model.weight.data.fill_(scale)
    return model


# a model whose constant is `scale` times that at scale 1
LINEAR = {
    "product": (lambda s: lambda x: x * s, (3,)),
    "product with a tensor": (lambda s: lambda x: x[:, None] * (tensor([[1.0], [0.5]]) * s), (3,)),
    "sum with a factor": (lambda s: lambda x: torch.add(torch.ones(3, dtype=D), x, alpha=s), (3,)),
    "difference": (lambda s: lambda x: torch.rsub(x, 1.0, alpha=s), (3,)),
    "lerp": (lambda s: lambda x: torch.lerp(torch.zeros(3, dtype=D), x, s), (3,)),
    "addcmul": (lambda s: lambda x: torch.addcmul(torch.ones(3, dtype=D), x, torch.ones(3, dtype=D), value=s), (3,)),
    "linear": (lambda s: lambda x: functional.linear(x, WEIGHT * s), (2,)),
    "matmul": (lambda s: lambda x: x @ (WEIGHT * s), (2,)),
    "einsum": (lambda s: lambda x: torch.einsum("bi,oi,o->bo", x, WEIGHT, tensor([s, s])), (2,)),
    "convolution": (lambda s: lambda x: functional.conv1d(x, WEIGHT[None] * s), (2, 5)),
    "long convolution": (lambda s: lambda x: functional.conv1d(x, WEIGHT[None] * s, padding=1), (2, 2500)),
    "transposed": (lambda s: lambda x: functional.conv_transpose1d(x, WEIGHT[:, None] * s), (2, 5)),
    "rotary": (lambda s: lambda x: rotated(x, HALVES * s, HALVES * s), (3, 4)),
    "running statistics": (lambda s: running(s), (3,)),
    "attention": (lambda s: lambda x: functional.scaled_dot_product_attention(
        HALVES.reshape(1, 1, 4), HALVES.reshape(1, 1, 4) * s, x[:, :1] * s), (2, 4)),
}  # fmt: skip


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", LINEAR)
def test_gains_scale_with_their_weights(name):
    """No square, product or norm of weights is lost to underflow, or wrong where it overflows."""
    make, shape = LINEAR[name]
    at_one = log10_of(make(1.0), shape)
    for scale in SCALES:
        exact = at_one + math.log10(scale)
        found = log10_of(make(scale), shape)
        assert found >= exact - 1e-9
        assert found <= exact + 0.31 + (1 if scale < 1e-307 else 0) or found == math.inf


@pytest.mark.parametrize("scale", SCALES)
def test_the_identity_in_small_and_large_steps(scale):
    whole = log10_of(lambda x: x * math.sqrt(scale) * (1 / math.sqrt(scale)), (4,))
    assert -1e-12 <= whole <= 1e-6


@pytest.mark.quick(3)
@pytest.mark.parametrize("scale", [1e-200, 1e-100, 1.0, 1e100, 1e150, 1e200])
def test_products_and_quotients_of_values_on_a_box(scale):
    """x y on [s, 2s]² has the constant 2√2 s; x/y has at least 1/s; both hold or are infinite."""
    box = ns.Box(torch.full((2,), scale, dtype=D), torch.full((2,), 2 * scale, dtype=D))
    at = math.log10(scale)
    assert log10_of(lambda x: x[:, :1] * x[:, 1:], (2,), box) >= at + math.log10(2 * math.sqrt(2)) - 1e-9
    assert log10_of(lambda x: torch.einsum("bi,bj->bij", x, x), (2,), box) >= at + math.log10(2 * 2 * math.sqrt(2)) - 1e-9
    assert log10_of(lambda x: x[:, :1] / x[:, 1:], (2,), box) >= -at - 1e-9
    assert log10_of(lambda x: torch.square(x), (2,), box) >= at + math.log10(4) - 1e-9
    assert log10_of(lambda x: x.var(1), (2,), box) > -math.inf


def test_a_layer_norm_whose_squares_overflow_is_not_flat():
    center = tensor([1e200, -1e200, 3e199])
    assert log10_of(nn.LayerNorm(3, eps=1e-5).double(), (3,), ns.Ball(center, 1.0)) >= -200.5


# values against exact arithmetic -----------------------------------------------------------------------------------------

sizes = st.builds(lambda x, e: x * 10.0**e, st.floats(-1, 1), st.integers(-300, 300))
narrow = st.builds(lambda x, e: x * 10.0**e, st.floats(-1, 1), st.sampled_from([-300, -16, 0, 1, 16, 300]))


def running_layer(mean: list[float], variance: float) -> nn.Module:
    layer = nn.BatchNorm1d(4, eps=0.0).double().eval()
    layer.running_mean.copy_(tensor(mean))
    layer.running_var.fill_(variance)
    return layer


FAR = [1e16, 1.0, -1e300, 0.0]
MIXED = tensor([[1.0, -1.0, 1.0, -1.0], [3.0, 1e-8, -3.0, 7.0]])
VALUES = {
    "sum": (lambda x: x.sum(1), lambda x: [sum(x)]),
    "mean": (lambda x: x.mean(1), lambda x: [sum(x) / 4]),
    "running sum": (lambda x: x.cumsum(1), lambda x: [sum(x[: i + 1]) for i in range(4)]),
    "centered": (lambda x: x - x.mean(1, keepdim=True), lambda x: [a - sum(x) / 4 for a in x]),
    "average": (
        lambda x: functional.avg_pool1d(x[:, None], 2, 1)[:, 0], lambda x: [(x[i] + x[i + 1]) / 2 for i in range(3)]),
    "linear": (
        lambda x: functional.linear(x, MIXED), lambda x: [sum(Fraction(w) * a for w, a in zip(row, x, strict=True)) for row in MIXED.tolist()]),
    "convolution": (
        lambda x: functional.conv1d(x[:, None], MIXED[1, None, None, :2])[:, 0],
        lambda x: [Fraction(3) * x[i] + Fraction(1e-8) * x[i + 1] for i in range(3)]),
    "running statistics": (
        running_layer(FAR, 4.0), lambda x: [(a - Fraction(m)) / 2 for a, m in zip(x, FAR, strict=True)]),
    "squares": (lambda x: x * x, lambda x: [a * a for a in x]),
    "powers": (lambda x: x**3, lambda x: [a**3 for a in x]),
    "products": (lambda x: x[:, :2] * x[:, 2:], lambda x: [x[0] * x[2], x[1] * x[3]]),
    "inner product": (lambda x: (x[:, None, :2] @ x[:, 2:, None])[:, 0, 0], lambda x: [x[0] * x[2] + x[1] * x[3]]),
}  # fmt: skip


@cache
def graph_of(name: str) -> Graph:
    model = VALUES[name][0]
    return trace(model if isinstance(model, nn.Module) else Function(model), torch.zeros(1, 4, dtype=D))


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(narrow | sizes, narrow | sizes).map(sorted), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_intervals_hold_exact_values(name, pairs, corner):
    """At any corner of any box, in rational arithmetic: cancellation, underflow and overflow are covered."""
    box = ns.Box(tensor([low for low, _ in pairs]), tensor([high for _, high in pairs]))
    graph = graph_of(name)
    bounds = forward_pass(graph, region=box).interval(graph.output)
    exact = VALUES[name][1]([Fraction(pair[which]) for pair, which in zip(pairs, corner, strict=True)])
    for value, low, high in zip(exact, bounds.low.flatten().tolist(), bounds.high.flatten().tolist(), strict=True):
        assert not math.isnan(low) and not math.isnan(high)
        assert low == -math.inf or Fraction(low) <= value
        assert high == math.inf or value <= Fraction(high)


CANCELLING = {
    "sum": (lambda x: functional.relu(x.sum(1, keepdim=True) - 0.5), 1.0),
    "centered": (lambda x: (x - x.mean(1, keepdim=True))[:, 3:] ** 2, 0.125),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_what_cancels_is_not_lost(name):
    box = ns.Box(tensor([1e16, 0.0, -1e16, 0.0]), tensor([1e16, 1.0, -1e16, 0.0]))
    function, truth = CANCELLING[name]
    assert log10_of(function, (4,), box) >= math.log10(truth)


CANCELLED = 0.5009668409582052


@pytest.mark.parametrize(
    ("size", "count", "q"),
    [(1.0, 2, CANCELLED), (1e300, 2, CANCELLED), (1.7e308, 2, CANCELLED), (1e-310, 2, CANCELLED), (1.0, 5001, 0.500500005011)],
)
def test_quantiles_where_neighbours_cancel(size, count, q):
    """Nothing but rounding is left of a + w (b − a), with w the rank, which is rounded too."""
    least = int(Fraction(q) * (count - 1)) + 1
    x = torch.where(torch.arange(count) < least, -0.9999980851892533, 0.9998978736840063).to(D) * size
    graph = trace(Function(lambda x: torch.quantile(x, q, dim=1)), torch.zeros(1, count, dtype=D))
    bounds = forward_pass(graph, region=ns.Box(x, x)).interval(graph.output)
    entries, rank = sorted(map(Fraction, x.tolist())), Fraction(q) * (count - 1)
    below = entries[int(rank)]
    exact = below + (rank - int(rank)) * (entries[int(rank) + 1] - below)
    assert not math.isnan(float(bounds.low)) and not math.isnan(float(bounds.high))
    assert float(bounds.low) == -math.inf or Fraction(float(bounds.low)) <= exact
    assert float(bounds.high) == math.inf or exact <= Fraction(float(bounds.high))


@pytest.mark.parametrize(("order", "size"), [(2, 1e-163), (3, 1e-109), (10, 1e-33), (20, 1e-17), (100, 1e-4)])
def test_roots_of_powers_that_vanish(order, size):
    """‖x‖_p² grows by at least 2 ‖x‖_p along x, but torch's powers of its entries are 0."""
    ball = ns.Ball(tensor([size, 0.0]), 1e-3 * size)
    model = Function(lambda x: (torch.linalg.vector_norm(x, order, dim=1, keepdim=True) / size) ** 2)
    assert log10_of(model, (2,), ball) >= math.log10(2 / size)
    other = Function(lambda x: (functional.pairwise_distance(x, torch.zeros(2, dtype=D), order, eps=0.0)[:, None] / size) ** 2)
    assert log10_of(other, (2,), ball) >= math.log10(2 / size)


@pytest.mark.parametrize("size", [1e-165, 1e-161, 1e-155])
@pytest.mark.parametrize("name", ["layer norm", "root mean square", "standard deviation", "cosine"])
def test_what_is_divided_by_vanishing_squares(name, size):
    x = tensor([1.0, 2.0, 4.0, -3.0]) * size
    model, degree = {
        "layer norm": (lambda x: functional.layer_norm(x, (4,), eps=0.0), 0),
        "root mean square": (lambda x: functional.rms_norm(x, (4,), eps=0.0), 0),
        "standard deviation": (lambda x: x.std(1), 1),
        "cosine": (lambda x: functional.cosine_similarity(x, x.flip(1), dim=1, eps=0.0), 0),
    }[name]
    graph = trace(Function(model), torch.ones(1, 4, dtype=D) * torch.arange(4))
    bounds = forward_pass(graph, region=ns.Box(x, x)).interval(graph.output)
    exact = model(x[None] * 2.0**500) * 2.0 ** (-500 * degree)  # it only changes with the scale as a power
    assert bool((bounds.low <= exact + exact.abs() * 1e-12).all()) and bool((exact - exact.abs() * 1e-12 <= bounds.high).all())


BROADCAST = {
    "cosine": lambda x: functional.cosine_similarity(x, torch.ones(4, dtype=D), dim=1, eps=0.0),
    "cosine of a row": lambda x: functional.cosine_similarity(x[0], torch.ones(4, dtype=D), dim=0, eps=0.0)[None],
    "pairs": lambda x: functional.pairwise_distance(x, torch.ones(4, dtype=D), 3.0, 1.0),
    "one pair": lambda x: functional.pairwise_distance(x[0], torch.ones(4, dtype=D), 3.0, 1.0)[None],
    "all pairs": lambda x: torch.cdist(x.reshape(1, 2, 2), torch.ones(30, 2, dtype=D)).flatten(1),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_distances_of_other_shapes(name):
    x = tensor([1.0, 2.0, 4.0, -3.0])
    graph = trace(Function(BROADCAST[name]), x[None])
    bounds = forward_pass(graph, region=ns.Box(x, x)).interval(graph.output)
    exact = BROADCAST[name](x[None])
    assert (
        bool((bounds.low <= exact).all()) and bool((exact <= bounds.high).all()) and bool((bounds.high - bounds.low < 1e-4).all())
    )


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_distances_between_near_rows_far_from_zero(mode, rows):
    others = 1 + 1e-9 * torch.randn(rows, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    graph = trace(Function(lambda x: torch.cdist(x, others, compute_mode=mode)), torch.ones(1, 3, dtype=D))
    x = others[0] + 1e-9
    bounds = forward_pass(graph, region=ns.Box(x, x)).interval(graph.output)
    exact = (x - others).square().sum(1).sqrt()[None]  # differences of numbers as near are exact
    assert bool((bounds.low <= exact * (1 + 1e-12)).all()) and bool((exact * (1 - 1e-12) <= bounds.high).all())


def test_running_statistics_far_from_zero():
    model = Function(lambda x: functional.batch_norm(x, torch.full((4,), 1e16, dtype=D), torch.ones(4, dtype=D)) ** 2)
    box = ns.Box(torch.full((4,), 1e16, dtype=D), torch.full((4,), 1e16 + 2, dtype=D))
    assert log10_of(model, (4,), box) >= math.log10(4 / math.sqrt(1 + 1e-5)) - 1e-4


# odd arguments ---------------------------------------------------------------------------------------------------------------

# dtype of the model, threshold, β, whether the bound is finite
SOFTPLUS = [
    (torch.float32, 20, 1.0, True), (torch.float32, 20, 1e-3, True), (torch.float32, 10, 1.0, False), (torch.float32, 0, 1.0, False),
    (torch.float32, -3, 1.0, False), (torch.float64, 15, 1e-3, False), (torch.float64, 20, 1.0, False), (torch.float64, 40, 1.0, True),
    (torch.float64, 40, -2.0, True), (torch.float64, 34, 1e6, True),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "threshold", "beta", "finite"), SOFTPLUS)
def test_softplus_is_smooth_where_its_shortcut_is_rounding(dtype, threshold, beta, finite):
    model, x = nn.Softplus(beta, threshold), torch.zeros(1, 2, dtype=dtype)
    found = upper(trace(model, x))
    assert found.bound.finite == finite
    if finite:
        assert float(found.bound) <= 1 + 1e-9
    else:
        assert "jump" in found.certificate.reason
        away = ns.Ball(torch.full((2,), threshold / beta + 10 / abs(beta), dtype=D), 1 / abs(beta))
        assert float(upper(trace(model, x), region=away).bound) <= 1 + 1e-9


NORMS = {
    0.0: math.inf,
    0.5: math.inf,
    1.0: 2.0,
    1.5: 4 ** (1 / 1.5 - 0.5),
    2.0: 1.0,
    3.0: 1.0,
    math.inf: 1.0,
    -1.0: math.inf,
    -math.inf: 1.0,
}


@pytest.mark.parametrize("order", NORMS)
def test_norms_of_every_order(order):
    model = Function(lambda x: torch.linalg.vector_norm(x, order, dim=1))
    found = upper(trace(model, torch.ones(1, 4, dtype=D))).bound
    assert found == math.inf if math.isinf(NORMS[order]) else math.isclose(float(found), NORMS[order], rel_tol=1e-9)


POOLS = [
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, {"kernel_size": 2, "stride": 1, "dilation": 2},
    {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 1, "ceil_mode": True}, {"kernel_size": 3, "stride": 5},
]  # fmt: skip


@pytest.mark.parametrize("settings", POOLS, ids=str)
def test_max_pools_count_every_window(settings):
    model = Function(lambda x: functional.max_pool1d(x, **settings))
    x = torch.zeros(1, 1, 7, dtype=D)
    most = max(int((model(x + 9 * unit.reshape(1, 1, 7)) > 0).sum()) for unit in torch.eye(7, dtype=D))
    assert math.sqrt(most) <= float(upper(trace(model, x)).bound) * (1 + 1e-12)


ODD = {
    "clamp with its limits swapped": (lambda x: x.clamp(2.0, -1.0), 0.0),
    "softmax of one entry": (lambda x: x[:, :1].softmax(1), 0.0),
    "log-softmax of one entry": (lambda x: x[:, :1].log_softmax(1), 0.0),
    "ε = 0": (lambda x: functional.layer_norm(x, (4,), eps=0.0), math.inf),
    "power of infinity": (lambda x: x ** float("inf"), math.inf),
    "the larger of two": (lambda x: torch.maximum(x, x.flip(1)), math.sqrt(2)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments(name):
    function, expected = ODD[name]
    found = float(upper(trace(Function(function), torch.ones(1, 4, dtype=D))).bound)
    assert found == expected or math.isclose(found, expected, rel_tol=1e-9)


@pytest.mark.parametrize("function", [lambda x: x[:, :0].sum(1), lambda x: x[:, :1].std(1)])
def test_what_depends_on_nothing_or_is_no_number_is_refused(function):
    with pytest.raises(ns.NormscopeError, match=r"constant is 0|no point was found"):
        ns.lipschitz(Function(function), torch.ones(1, 4, dtype=D))


def test_a_negative_epsilon_is_refused():
    model = nn.Sequential(nn.LayerNorm(4, eps=-1.0))
    with pytest.raises(Refusal, match="ε is negative or NaN: layer_norm at 0"):
        upper(trace(model, torch.randn(1, 4)))


def test_the_norm_of_a_kernel_does_not_depend_on_its_exponent():
    kernel = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    for size in (8, 2500):
        plain = Convolution(kernel, (size,), (1,), ((1, 1),), (1,)).norm()[0]
        for exponent in (-1050, -700, 700, 1000):
            scaled = Convolution(
                torch.ldexp(kernel, torch.tensor(exponent // 2)) * 2.0 ** (exponent - exponent // 2), (size,), (1,), ((1, 1),), (1,)
            )
            assert math.isclose(scaled.norm()[0].log10 - exponent * math.log10(2), plain.log10, abs_tol=1e-6)
