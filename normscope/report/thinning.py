"""Fewer points for the same picture: of every pixel's worth of steps, what is least and what is greatest is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

COLUMNS = 250  # buckets across a figure


def bucket_numbers(steps: np.ndarray, columns: int = COLUMNS) -> np.ndarray:
    """Which of `columns` equal intervals between the first step and the last each step lies in.

    >>> bucket_numbers(np.array([0, 1, 2, 50, 99, 100]), columns=2)
    array([0, 0, 0, 1, 1, 1])
    """
    extent = float(steps[-1]) - float(steps[0]) if len(steps) else 0.0
    if extent == 0:
        return np.zeros(len(steps), np.int64)
    return np.minimum((steps - float(steps[0])) * (columns / extent), columns - 1).astype(np.int64)


def sample_series(steps: np.ndarray, values: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """The first, least, greatest and last entry of every bucket, in order: at most 4 · columns points, each one recorded.

    steps ascend. NaN is neither least nor greatest; a bucket of nothing else keeps one, so that a line shows its gap.
    """
    if len(steps) <= 4 * columns:
        return steps, values
    kept = [bucket.start + np.unique([0, *bucket.extremes(), bucket.size - 1]) for bucket in _buckets(steps, values, columns)]
    chosen = np.concatenate(kept)
    return steps[chosen], values[chosen]


@dataclass(frozen=True)
class SampledMatrix:
    """values[c, l]: what layer l had at step steps[c, l], drawn at x = positions[c]."""

    positions: np.ndarray  # (columns,)
    steps: np.ndarray  # (columns, layers)
    values: np.ndarray  # (columns, layers)


def sample_matrix(steps: np.ndarray, values: np.ndarray, columns: int = COLUMNS) -> SampledMatrix:
    """Two columns a bucket: every layer's least and greatest entry in it, the earlier one first.

    steps: (rows,), ascending. values: (rows, layers). With at most 2 · columns rows, all of them.
    """
    if len(steps) <= 2 * columns:
        return SampledMatrix(steps, np.repeat(steps[:, None], values.shape[1], axis=1), values)
    buckets = list(_buckets(steps, values, columns))
    where = np.concatenate([bucket.start + np.sort(bucket.extremes(), axis=0) for bucket in buckets])
    quarters = np.array([[bucket.number + 0.25, bucket.number + 0.75] for bucket in buckets]).ravel()
    positions = float(steps[0]) + quarters * (float(steps[-1]) - float(steps[0])) / columns
    return SampledMatrix(positions, steps[where], values[where, np.arange(values.shape[1])])


@dataclass(frozen=True)
class _Bucket:
    number: int
    start: int  # its first row
    values: np.ndarray

    @property
    def size(self) -> int:
        return len(self.values)

    def extremes(self) -> np.ndarray:
        """Rows of the least and of the greatest value, counted from `start`; 0 where all are NaN."""
        bounds = np.fmin.reduce(self.values), np.fmax.reduce(self.values)
        return np.stack([np.argmax(self.values == bound, axis=0) for bound in bounds])


def _buckets(steps: np.ndarray, values: np.ndarray, columns: int) -> Iterator[_Bucket]:
    numbers = bucket_numbers(steps, columns)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        yield _Bucket(int(numbers[start]), int(start), values[start:end])
