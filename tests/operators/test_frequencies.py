"""Norms of blocks at every frequency: those from interpolated Gram matrices against those of the blocks themselves."""

from __future__ import annotations

import math

import pytest
import torch

from normscope.operators import frequencies
from normscope.operators.frequencies import Polyphase, half_of_all, interpolation
from tests.cases import randn

# groups, out, in, taps, stride, dilation, waves
CASES = [
    (1, 4, 4, (3, 3), (1, 1), (1, 1), (8, 8)), (1, 5, 3, (3, 3), (2, 2), (1, 1), (6, 7)), (2, 3, 4, (3, 2), (1, 1), (1, 2), (9, 4)),
    (1, 6, 2, (5,), (1,), (1,), (33,)), (1, 2, 3, (4,), (3,), (2,), (16,)), (3, 2, 2, (3, 3), (1, 1), (1, 1), (3, 12)),
    (1, 3, 3, (2, 2, 2), (1, 1, 1), (1, 1, 1), (5, 4, 6)), (1, 100, 98, (3,), (1,), (1,), (12,)), (1, 98, 40, (2,), (2,), (1,), (3,)),
]  # fmt: skip


def polyphase(case, scale: float = 1.0) -> tuple[Polyphase, list[int], list[int]]:
    groups, out, inner, taps, stride, dilation, waves = case
    kernel = scale * randn(groups, out, inner, math.prod(taps)).double()
    found = Polyphase.of(kernel, taps, stride, dilation)
    nodes = [min(wave, 2 * int(reach) + 1) for wave, reach in zip(waves, found.shifts.amax(0), strict=True)]
    return found, list(waves), nodes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpolated_gram_matrices_give_the_norm_of_every_block(case):
    found, waves, nodes = polyphase(case)
    truth = float(torch.linalg.matrix_norm(found.blocks(half_of_all(waves), waves), 2).max())
    bound = float(found._interpolated_norm(waves, nodes))
    assert truth * (1 - 1e-13) <= bound <= truth * (1 + 1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpolation_reproduces_gram_matrices_within_its_own_error(case):
    found, waves, nodes = polyphase(case)
    at_nodes, at_all = (found.blocks(half_of_all(grid), grid) for grid in (nodes, waves))
    (here, truth), count = (blocks.mH @ blocks for blocks in (at_nodes, at_all)), math.prod(nodes)
    even, odd, total, off = interpolation(waves, nodes)
    here = here.unflatten(0, (-1, case[0])).flatten(1)
    made = torch.complex(even @ here.real, odd @ here.imag).reshape(truth.shape)
    squares = float(torch.linalg.matrix_norm(at_nodes).max()) ** 2
    assert float(torch.linalg.matrix_norm(made - truth).max()) <= (count * off + 1e-14 * total) * squares
    assert (count * off + 1e-14 * total) < 1e-11


def test_the_least_number_of_nodes_is_needed():
    """With two nodes fewer along an axis the polynomial is not determined, and what is made is no Gram matrix of the kernel."""
    found, waves, nodes = polyphase(CASES[0])
    truth = float(torch.linalg.matrix_norm(found.blocks(half_of_all(waves), waves), 2).max())
    assert nodes == [5, 5]
    assert abs(float(found._interpolated_norm(waves, [3, 5])) / truth - 1) > 1e-3


def test_what_is_computed_with_does_not_depend_on_the_way(monkeypatch):
    found, waves, nodes = polyphase(CASES[7])
    assert found._interpolation_pays(len(half_of_all(nodes)), math.prod(nodes), len(half_of_all(waves)))
    one = found.norm(waves)
    monkeypatch.setattr(frequencies, "NODE_ENTRIES", 0)
    assert float(found.norm(waves) / one) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-200, 1e150, math.inf])
def test_odd_scales_are_bounded(scale):
    found, waves, _ = polyphase(CASES[0], scale)
    unit, *_ = polyphase(CASES[0])
    bound = found.norm(waves)
    if math.isfinite(scale):
        assert bound >= unit.norm(waves) * scale * (1 - 1e-4)
        assert bound.finite
    else:
        assert not bound.finite
