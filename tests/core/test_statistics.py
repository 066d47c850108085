"""A variance that is merged batch by batch is the variance of the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.core.statistics import RunningVariance
from tests.networks import randn


def streamed(values: torch.Tensor, cuts: list[int], channel_axis: int = 1) -> RunningVariance:
    found = RunningVariance()
    for part in torch.tensor_split(values, sorted(cuts)):
        found.update(part, channel_axis)
    return found


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 40), max_size=6),
    st.sampled_from([0.0, 1.0, 1e3, -1e6]),
    st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_any_split_gives_the_variance_of_the_whole(seed, cuts, offset, scale):
    values = scale * randn(40, 3, 2, seed=seed).double() + offset
    found = streamed(values, cuts)
    assert found.count == 80
    assert torch.allclose(found.mean, values.mean((0, 2)), rtol=1e-12, atol=1e-12 * scale)
    tolerance = 1e-12 + abs(offset / scale) * 2**-50  # what the rounding of the values themselves leaves
    for whole in (values, values - offset):
        assert torch.allclose(found.variance, whole.var((0, 2), correction=0), rtol=tolerance, atol=0)


@given(st.integers(-3, 2), st.integers(0, 100))
def test_any_axis_may_hold_the_channels(axis, seed):
    values = randn(4, 5, 6, seed=seed)
    others = [other for other in range(3) if other != axis % 3]
    found = streamed(values, [1, 3] if axis % 3 else [], axis)
    assert torch.allclose(found.variance, values.double().var(others, correction=0), rtol=1e-12)


def test_a_large_offset_does_not_cancel():
    """E[x²] − E[x]² would be lost at 1e8: 1e16 has no digit left for a variance of 1."""
    values = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None] + 1e8
    assert torch.allclose(streamed(values, [1, 2]).variance, torch.tensor([1.25], dtype=torch.float64), rtol=1e-7)


def test_float32_batches_are_summed_in_float64():
    values = 1000 + randn(5000, 2)
    assert torch.allclose(streamed(values, [1234, 4000]).variance, values.double().var(0, correction=0), rtol=1e-11)


def test_constants_and_single_samples_have_no_variance():
    assert streamed(torch.full((9, 2), 3.0), [4]).variance.tolist() == [0.0, 0.0]
    assert streamed(randn(1, 2), []).variance.tolist() == [0.0, 0.0]


def test_nothing_seen_has_no_count():
    found = streamed(torch.zeros(0, 2), [])
    assert found.count == 0 and float(found.variance) == 0.0


def test_what_is_seen_is_not_kept_in_the_graph():
    found = RunningVariance()
    found.update(randn(3, 2).requires_grad_(), 1)
    assert not found.variance.requires_grad
