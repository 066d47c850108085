"""Numbers far from 1: no difference is lost where squares underflow, and every search ends."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import normscope as ns
from normscope._checkpoint.aligning import FACTOR, aligned, shrinking
from normscope._checkpoint.causes import _explained
from normscope._checkpoint.folding import _means
from normscope._checkpoint.running import outputs_apart
from normscope.core.data import Call
from normscope.symmetry.detect import symmetries
from tests.checkpoint.files import write

SIZES = [(torch.float64, 1e160), (torch.float64, 1e-170), (torch.float32, 1e30), (torch.float32, 1e-30)]


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_outputs_apart(dtype, size):
    one, other = torch.tensor([3.0, 4.0], dtype=dtype) * size, torch.tensor([3.0, 4.5], dtype=dtype) * size
    assert outputs_apart([[one]], [[other]]) == pytest.approx(0.1, rel=1e-5) and outputs_apart([[one]], [[one]]) == 0
    assert outputs_apart([[0 * one]], [[other]]) == math.inf and outputs_apart([[0 * one]], [[0 * one]]) == 0


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_the_change_of_a_tensor(tmp_path, dtype, size):
    start = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=dtype)
    moved = start + torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=dtype)
    paths = [write(tmp_path / str(i), "safetensors", {"a.weight": value * size}) for i, value in enumerate((start, moved))]
    (row,) = (row for row in ns.diff(*paths).rows if row.name == "a.weight")
    assert row.change == pytest.approx(0.2, rel=1e-5) and row.rank == pytest.approx(1, rel=1e-5)
    angle = math.degrees(math.acos((9 + 20) / 5 / math.sqrt(34)))
    assert row.rotation == pytest.approx(angle, rel=1e-4) and row.spectral_change / size == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(("moved", "change", "angle"), [(1 - 1e-3, 1e-3, 0.0), (-1.0, 2.0, 180.0), (0.0, 1.0, 0.0)])
def test_the_change_of_a_tensor_whose_norm_is_beyond_float64(tmp_path, moved, change, angle):
    start = torch.full((3, 4), 1.7e308, dtype=torch.float64)
    paths = [write(tmp_path / str(i), "safetensors", {"a.weight": start * size}) for i, size in enumerate((1.0, moved))]
    (row,) = (row for row in ns.diff(*paths).rows if row.name == "a.weight")
    assert row.change == pytest.approx(change, rel=1e-9) and row.rotation == pytest.approx(angle, abs=1e-5)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_a_merged_update(tmp_path, dtype, size):
    torch.manual_seed(0)
    weight, down, up = (torch.randn(shape, dtype=dtype) for shape in ((6, 6), (2, 6), (6, 2)))
    down, weight = down * size, weight * size
    factors = {"q.lora_A.weight": down, "q.lora_B.weight": up}
    one = write(tmp_path / "one", "safetensors", {"q.weight": weight, **factors})
    found = ns.diff(one, write(tmp_path / "other", "safetensors", {"q.weight": weight + 0.5 * (up @ down)}))
    assert any("merged with scale 0.5" in line for line in str(found).splitlines()), str(found)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_a_step_that_explains_a_difference(size):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight *= size
    inputs = torch.randn(4, 3)
    residual, step = _explained(model, [Call((inputs,), {})], "weight", (inputs @ (0.01 * model.weight).T).flatten().detach())
    assert residual < 0.1 and step == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("size", [1e30, 1.0, 1e-30])
def test_the_share_of_the_mean(size):
    norm = nn.LayerNorm(2)
    assert _means(norm, {"": norm}, [Call((torch.tensor([[3.0, 4.0]]) * size,), {})])[""] == pytest.approx(3.5 / math.sqrt(12.5))


@pytest.mark.parametrize("start", [0.0, 5e-324, 1e-11, 1.0, 1e308, math.inf, math.nan])
def test_steps_that_shrink_end(start):
    found = shrinking(start, 1e-11)
    assert len(found) < 1000
    if not found:
        assert not 1e-11 < start < math.inf
    else:
        assert found[0] == pytest.approx(start * FACTOR) and found[-1] <= 1e-11 * (1 + 1e-9)
        assert all(after < before for before, after in pairwise(found))


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-170, 1.0, 1e99, 1e160, math.inf, math.nan])
def test_a_walk_along_an_orbit_ends(size):
    """One entry of that size; what is not brought together is said to differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    groups = symmetries(model, torch.randn(5, 3).double(), mode="eval").groups
    one = {name: value.detach() for name, value in model.named_parameters()}
    other = {**one, "0.weight": one["0.weight"].clone()}
    other["0.weight"][0, 0] = size
    assert "0.weight" in aligned(groups, one, other).left
