"""Linear rules against the matrix of the operation that runs, read off entry by entry; no derivative of torch's is asked."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify import relaxation
from normscope.certify.upper import forward_pass, upper
from normscope.graph.trace import trace
from tests.networks import Function

D = torch.float64
ONES, PLACES = torch.eye(3, dtype=D) + 1, torch.zeros(4, 4, dtype=torch.long)
PLACES[3] = torch.arange(4)


def matrix(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """The linear part of a model, by its forward on a basis."""
    size = math.prod(shape)
    with torch.no_grad():
        at_zero = model(torch.zeros(1, *shape, dtype=D)).reshape(-1)
        return torch.stack([model(unit.reshape(1, *shape)).reshape(-1) - at_zero for unit in torch.eye(size, dtype=D)], 1)


# operation, shape of a sample
EXACT = {
    "nearest, odd scale": (lambda x: functional.interpolate(x, scale_factor=1.03, mode="nearest"), (1, 2)),
    "nearest, shrinking": (lambda x: functional.interpolate(x, scale_factor=0.7, mode="nearest"), (2, 7)),
    "nearest, two axes": (lambda x: functional.interpolate(x, scale_factor=(1.3, 2.6), mode="nearest"), (1, 3, 4)),
    "nearest, scale kept": (
        lambda x: functional.interpolate(x, scale_factor=1.9, mode="nearest", recompute_scale_factor=False), (1, 5)),
    "nearest exact": (lambda x: functional.interpolate(x, scale_factor=1.7, mode="nearest-exact"), (1, 4)),
    "linear": (lambda x: functional.interpolate(x, scale_factor=1.4, mode="linear"), (1, 5)),
    "bilinear, corners": (lambda x: functional.interpolate(x, (5, 3), mode="bilinear", align_corners=True), (1, 3, 4)),
    "bicubic": (lambda x: functional.interpolate(x, (5, 7), mode="bicubic"), (1, 3, 4)),
    "bicubic, corners": (lambda x: functional.interpolate(x, (2, 7), mode="bicubic", align_corners=True), (1, 3, 4)),
    "bilinear, antialias": (lambda x: functional.interpolate(x, (2, 3), mode="bilinear", antialias=True), (1, 5, 4)),
    "average": (lambda x: functional.avg_pool2d(x, 3, 1), (1, 4, 5)),
    "average, negative divisor": (lambda x: functional.avg_pool2d(x, 2, divisor_override=-1), (1, 4, 4)),
    "average, padding": (lambda x: functional.avg_pool2d(x, 3, 2, 1), (1, 4, 5)),
    "average, padding not counted": (lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (2, 4, 5)),
    "average, ceil": (lambda x: functional.avg_pool2d(x, 2, 2, ceil_mode=True), (1, 3, 5)),
    "average, ceil and padding": (lambda x: functional.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 6)),
    "average, three axes": (lambda x: functional.avg_pool3d(x, 2, 1, divisor_override=3), (1, 3, 2, 3)),
    "adaptive": (lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), (1, 5, 4)),
    "sum": (lambda x: x.sum((1, 2)), (3, 2)),
    "mean": (lambda x: x.mean(-1), (3, 2)),
    "running sum": (lambda x: x.cumsum(1), (5,)),
    "trace": (lambda x: torch.trace(x[0])[None], (3, 2)),
    "fold": (lambda x: functional.fold(x, (3, 4), 2), (4, 6)),
    "second difference": (lambda x: x.diff(dim=1), (6,)),
    "gathered twice": (lambda x: x.gather(1, torch.tensor([[0, 0, 2, 0]])), (3,)),
    "rows taken twice": (lambda x: x[:, [0, 0, 1]], (3, 2)),
    "repeated": (lambda x: x.repeat_interleave(3, 1), (2, 2)),
    "padded with a huge constant": (lambda x: functional.pad(x, (1, 1), value=1e300), (3,)),
    "padded by reflection": (lambda x: functional.pad(x, (3, 2), mode="reflect"), (1, 4)),
    "product from the left": (lambda x: torch.arange(6.0, dtype=D).reshape(2, 3) @ x[0][None], (3, 2)),
    "sum with a product of constants": (lambda x: torch.addmm(x, ONES[:1], ONES.T.repeat(1, 2)[:, :4], beta=-3), (4,)),
    "two constants": (lambda x: torch.einsum("bi,ij,jk->bk", x, ONES + 1, ONES - 0.5), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_gain_is_the_norm_of_the_matrix_that_runs(name):
    function, shape = EXACT[name]
    model = Function(function).double()
    exact = float(torch.linalg.matrix_norm(matrix(model, shape), 2))
    found = float(upper(trace(model, torch.zeros(1, *shape, dtype=D))).bound)
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6)


@pytest.mark.quick(16)
@pytest.mark.parametrize("name", EXACT)
def test_the_interval_holds_all_corners(name):
    function, shape = EXACT[name]
    model = Function(function).double()
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(shape, generator=generator, dtype=D)
    high = low + torch.rand(shape, generator=generator, dtype=D)
    graph = trace(model, low[None])
    bounds = forward_pass(graph, region=ns.Box(low, high)).interval(graph.output)
    for _ in range(20):
        value = model(torch.where(torch.rand(shape, generator=generator) < 0.5, low, high)[None])
        assert (bounds.low <= value).all() and (value <= bounds.high).all()


def test_a_long_axis_is_bounded_without_its_matrix():
    model = nn.AvgPool1d(3, 1, 1)
    found = float(upper(trace(model, torch.zeros(1, 1, 5000))).bound)
    assert 1 - 1e-6 <= found <= 1 + 1e-6


# operations that write values to places, some of them twice: torch does not say which value stays
WRITES = {
    "index_put": lambda x: torch.zeros(4, dtype=x.dtype).index_put((PLACES,), x[0][:, None])[None],
    "index_copy": lambda x: torch.zeros(2, 4, dtype=x.dtype).index_copy(0, torch.tensor([1, 1]), x[:, None].expand(-1, 2, -1)[0])[
        None
    ],
    "scatter": lambda x: torch.zeros(1, 4, dtype=x.dtype).scatter(1, torch.tensor([[0, 0, 0, 1]]), x),
    "one value": lambda x: torch.zeros(4, dtype=x.dtype).index_put((torch.arange(4),), x[0, :1])[None],
    "added": lambda x: torch.zeros(4, dtype=x.dtype).index_put((PLACES,), x[0][:, None], accumulate=True)[None],
    "scattered sum": lambda x: torch.zeros(1, 4, dtype=x.dtype).scatter_add(1, torch.tensor([[0, 0, 3, 0]]), x),
    "indexed sum": lambda x: torch.ones(1, 4, dtype=x.dtype).index_add(1, torch.tensor([2, 2, 2, 1]), x, alpha=-3),
    "scatter over itself": lambda x: x.scatter(1, torch.tensor([[0, 0]]).expand(len(x), 2), x[:, 2:]),
    "where of one twice": lambda x: torch.where(torch.tensor([True, False, True, False]), x, x),
}


@pytest.mark.parametrize("name", WRITES)
def test_values_that_are_written_to_several_places_count_for_each(name):
    model = Function(WRITES[name])
    exact = float(torch.linalg.matrix_norm(matrix(model, (4,)), 2))
    found = float(upper(trace(model, torch.zeros(1, 4, dtype=D))).bound)
    assert exact * (1 - 1e-12) <= found <= 3 * exact


def test_a_backward_that_is_not_the_adjoint_is_noticed():
    """On a region the Jacobian comes from torch's backward, which is wrong for nearest upsampling by an odd scale."""
    model = Function(lambda x: functional.interpolate(x[:, None], scale_factor=1.03, mode="nearest")[:, 0])
    found = ns.lipschitz(model, torch.zeros(1, 2), region=ns.Ball(torch.zeros(2), 1.0))
    assert float(found.upper) >= math.sqrt(2) * (1 - 1e-12)
    whole = nn.Sequential(nn.Upsample(scale_factor=1.03), nn.Conv1d(1, 1, 1, bias=False)).double()
    nn.init.ones_(whole[1].weight)
    assert float(ns.certify.operator_norm(whole, (1, 2)).upper) >= math.sqrt(2) * (1 - 1e-12)
    rows, zeros = torch.eye(3, dtype=D), [torch.zeros(3, dtype=D)]
    assert relaxation.is_adjoint(lambda x: x.clone(), [rows], zeros)
    assert not relaxation.is_adjoint(lambda x: x[[0, 0, 2]], [rows], zeros)
    assert not relaxation.is_adjoint(lambda x: x, [rows * (1 + 1e-6)], zeros)
