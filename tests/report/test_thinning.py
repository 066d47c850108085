"""Down-sampling keeps every extreme, invents nothing, and keeps the order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from normscope.report.thinning import bucket_numbers, sample_matrix, sample_series

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])


@st.composite
def recorded(draw, layers: int | None = None):
    """Ascending steps with gaps, values with NaN and infinities, a number of columns."""
    rows = draw(st.integers(0, 60))
    gaps = draw(arrays.arrays(np.int64, rows, elements=st.integers(1, 50)))
    shape = rows if layers is None else (rows, layers)
    return np.cumsum(gaps), draw(arrays.arrays(np.float64, shape, elements=VALUES)), draw(st.integers(1, 8))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(recorded())
def test_series_keeps_extremes_of_every_bucket(case):
    steps, values, columns = case
    kept_steps, kept = sample_series(steps, values, columns)
    assert len(kept) <= max(4 * columns, 1)
    assert (np.diff(kept_steps) > 0).all()
    assert same(kept, values[np.searchsorted(steps, kept_steps)])  # only what was recorded
    if len(steps):
        assert kept_steps[0] == steps[0] and kept_steps[-1] == steps[-1]
    numbers, kept_numbers = bucket_numbers(steps, columns), bucket_numbers(kept_steps, columns)
    assert set(numbers) == set(kept_numbers)
    for number in set(numbers):
        for extreme in (np.fmin.reduce, np.fmax.reduce):
            assert same(extreme(values[numbers == number]), extreme(kept[kept_numbers == number]))


@settings(max_examples=200, deadline=None)
@given(recorded(layers=3))
def test_matrix_keeps_extremes_of_every_bucket_and_layer(case):
    steps, values, columns = case
    sampled = sample_matrix(steps, values, columns)
    assert sampled.values.shape == sampled.steps.shape == (len(sampled.positions), 3)
    assert len(sampled.positions) <= 2 * columns
    assert (np.diff(sampled.positions) > 0).all()
    for layer in range(3):
        rows = np.searchsorted(steps, sampled.steps[:, layer])
        assert same(values[rows, layer], sampled.values[:, layer])
        numbers, kept = bucket_numbers(steps, columns), sampled.values[:, layer]
        for number in set(numbers):
            inside = numbers[rows] == number
            for extreme in (np.fmin.reduce, np.fmax.reduce):
                assert same(extreme(values[numbers == number, layer]), extreme(kept[inside]))


def test_a_single_spike_in_a_hundred_thousand_steps_is_seen():
    steps, values = np.arange(100_000), np.zeros(100_000)
    values[54_321] = 1.0
    kept_steps, kept = sample_series(steps, values)
    assert kept_steps[kept == 1.0].tolist() == [54_321]
    sampled = sample_matrix(steps, values[:, None])
    assert sampled.steps[sampled.values == 1.0].tolist() == [54_321]
