"""Weights far from 1: squares overflow or underflow, results do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.core.errors import InputError
from normscope.geometry.balance import preferred_scales
from normscope.geometry.dynamics import effective_learning_rate
from normscope.geometry.quotient import canonical, horizontal
from normscope.geometry.sphere import norm
from tests.geometry.test_quotient import BETWEEN, REPORT, Group, Report, point

SIZES = [(torch.float64, 1e160), (torch.float64, 1e-160), (torch.float64, 1e-170), (torch.float32, 1e30), (torch.float32, 1e-30)]
CHAIN = Report((
    Group("rescale", ("0.weight", "0.bias", "2.weight"), ((0,), (0,), (1,)), 6, degrees=(1.0, 1.0, -1.0)),
    Group("rescale", ("2.weight", "2.bias", "5.weight"), ((0,), (0,), (1,)), 5, degrees=(1.0, 1.0, -1.0)),
))  # fmt: skip


def scaled(parameters, size):
    return {name: tensor * size for name, tensor in parameters.items()}


def assert_alike(found, expected):
    for name, tensor in expected.items():
        tolerance = 1e-9 if tensor.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_a_chain_of_rescalings_keeps_the_size_of_its_weights(dtype, size):
    found = canonical(CHAIN, scaled(point(dtype), size))
    assert_alike(scaled(found, 1 / size), canonical(CHAIN, point(dtype)))


@pytest.mark.parametrize(("dtype", "size"), SIZES)
@pytest.mark.parametrize("kind", ["linear", "normalized"])
def test_canonical_of_a_model(kind, dtype, size):
    """Without normalizers the representative has the size of the weights, with them scale-free weights have unit norm."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(5, affine=False)] if kind == "normalized" else []
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=False), *norms, nn.ReLU(), nn.Linear(5, 3, bias=False))
    symmetries = ns.symmetries(model, torch.randn(8, 4))
    start = {name: value.detach().to(dtype) for name, value in model.named_parameters()}
    expected, found = canonical(symmetries, start), canonical(symmetries, scaled(start, size))
    assert all(bool(value.isfinite().all()) for value in found.values())
    for name, value in expected.items():
        ratio = float(norm(found[name].double().flatten()) / norm(value.double().flatten()))
        assert_alike({name: found[name].double() / ratio}, {name: value.double()}) if dtype == torch.float64 else None
        assert any(math.isclose(ratio, one, rel_tol=1e-5) for one in (1.0, size)), (name, ratio)


@pytest.mark.parametrize("size", [1e160, 1e-170])
def test_groups_with_charges(size):
    assert_alike(canonical(REPORT, {**point(), "5.weight": size * point()["5.weight"]}), canonical(REPORT, point()))
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 4), "b": (3,), "v": (2, 3), "g": (4,)}
    start = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    found = canonical(BETWEEN, {**start, "g": size * start["g"]})
    torch.testing.assert_close(norm(torch.cat([found["g"], found["b"]])), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("size", [0.0, 1.0, 5e-324, 1e308])
def test_canonical_at_the_ends_of_float64(size):
    start = {"w": torch.full((2, 3), size, dtype=torch.float64)}
    found = canonical(Report((Group("scale", ("w",), ((0,),), 2),)), start)["w"]
    torch.testing.assert_close(found, torch.full_like(found, 3**-0.5 if size else 0.0))


@pytest.mark.parametrize("size", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(size):
    with pytest.raises(InputError, match=r"5\.weight has entries that are NaN or infinite"):
        canonical(REPORT, {**point(), "5.weight": torch.full((8, 5), size).double()})


@pytest.mark.parametrize("size", [0.0, 1.0, 5e-324, math.inf, math.nan])
def test_the_search_for_scales_ends(size):
    start = {**point(), "2.weight": torch.full((5, 6), size).double()}
    try:
        assert len(preferred_scales(CHAIN.groups, start, 1e-13)) == 2
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("size", [1e160, 1e-170])
def test_horizontal(size):
    start, generator = point(), torch.Generator().manual_seed(0)
    vector = {name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in start.items()}
    report = Report(tuple(group for group in REPORT.groups if "shift" not in group.kind))
    expected = horizontal(report, start, vector)
    assert_alike(horizontal(report, scaled(start, size), vector), expected)
    assert_alike(scaled(horizontal(report, start, scaled(vector, size)), 1 / size), expected)


def test_norms_and_learning_rates():
    rows = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for size in (1e160, 1e-170, 1e-320):
        torch.testing.assert_close(norm(size * rows) / size, norm(rows), rtol=1e-3 if size < 1e-300 else 1e-12, atol=0)
    assert float(norm(torch.tensor([math.inf, 1.0]))) == math.inf and float(norm(torch.zeros(2))) == 0
    assert float(effective_learning_rate(torch.tensor(1e160).double(), 1e10)) == pytest.approx(1e-310, rel=1e-3)
    assert float(effective_learning_rate(torch.tensor(1e-25), 1e-30)) == pytest.approx(1e20)
