"""Homogeneous linear equations over very many unknowns, most of them equal to one another, solved exactly."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

from normscope.symmetry.indices import components, together

Terms = Sequence[tuple[float, np.ndarray]]  # Σ coefficient · unknown, entry by entry
Row = dict[int, Fraction]


class System:
    """Unknowns are numbers; unknown 0 is zero. Equalities and equations are gathered first and solved at the end."""

    ZERO = 0

    def __init__(self) -> None:
        self.count = 1
        self._equal: list[np.ndarray] = []
        self._equations: list[tuple[tuple[float, ...], np.ndarray]] = []

    def fresh(self, shape: Sequence[int]) -> np.ndarray:
        """New unknowns."""
        size = math.prod(shape)
        ids = np.arange(self.count, self.count + size).reshape(tuple(shape))
        self.count += size
        return ids

    def equate(self, one: np.ndarray | int, other: np.ndarray | int) -> None:
        pairs = np.stack([side.ravel() for side in np.broadcast_arrays(one, other)])
        self._equal.append(pairs[:, pairs[0] != pairs[1]])

    def vanish(self, terms: Terms) -> None:
        """Σ coefficient · unknown = 0, entry by entry."""
        ids = np.stack([side.ravel() for side in np.broadcast_arrays(*(ids for _, ids in terms))])
        self._equations.append((tuple(coefficient for coefficient, _ in terms), np.unique(ids, axis=1)))

    def solve(self) -> Solution:
        """All solutions, as a basis with small supports."""
        classes = self._classes()
        rows = self._rows(classes)
        return Solution(classes, [vector for part in together(rows, iter) for vector in _null_space(part)], _unbound(rows, classes))

    def _classes(self) -> np.ndarray:
        """The class of every unknown under the equalities; class 0 is zero."""
        labels = components(np.concatenate([np.zeros((2, 0), dtype=np.int64), *self._equal], 1), self.count)
        swap = labels[self.ZERO]
        return np.where(labels == swap, 0, np.where(labels == 0, swap, labels))

    def _rows(self, classes: np.ndarray) -> list[Row]:
        """The equations between classes, each once; an unknown that an equation proves zero is left out of the others."""
        distinct: set[tuple[tuple[int, float], ...]] = set()
        for coefficients, ids in self._equations:
            for column in np.unique(classes[ids], axis=1).T.tolist():
                row: dict[int, float] = defaultdict(float)
                for coefficient, unknown in zip(coefficients, column, strict=True):
                    row[unknown] += coefficient
                distinct.add(tuple(sorted((unknown, value) for unknown, value in row.items() if unknown and value)))
        return _without_zeros([{unknown: _exact(value) for unknown, value in row} for row in sorted(distinct) if row])


@cache
def _exact(coefficient: float) -> Fraction:
    """Few coefficients occur, in very many rows."""
    return Fraction(coefficient).limit_denominator(10**6)


class Solution:
    """Basis vectors over classes of unknowns."""

    def __init__(self, classes: np.ndarray, vectors: list[Row], unbound: Iterable[int]) -> None:
        self.classes = classes
        self.vectors = [*vectors, *({unknown: Fraction(1)} for unknown in unbound)]


def _without_zeros(rows: list[Row]) -> list[Row]:
    """Rows with one unknown say that it is zero; the others then lose it, and so on."""
    users: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        for unknown in row:
            users[unknown].append(row)
    zeros = [next(iter(row)) for row in rows if len(row) == 1]
    proved: set[int] = set()
    while zeros:
        unknown = zeros.pop()
        if unknown in proved:
            continue
        proved.add(unknown)
        for row in users[unknown]:
            if len(row) > 1:
                del row[unknown]
                if len(row) == 1:
                    zeros.append(next(iter(row)))
    return rows


def _null_space(rows: list[Row]) -> list[Row]:
    """A basis of the solutions; what occurs most often stays free, so that supports are small."""
    frequency = Counter(unknown for row in rows for unknown in row)
    pivots: dict[int, Row] = {}
    for row in sorted(rows, key=len):
        reduced = _substituted(row, pivots)
        if reduced:
            pivot = min(reduced, key=lambda unknown: (frequency[unknown], -unknown))
            scale = -1 / reduced.pop(pivot)
            pivots[pivot] = {unknown: value * scale for unknown, value in reduced.items()}
    vectors: dict[int, Row] = {unknown: {unknown: Fraction(1)} for unknown in frequency if unknown not in pivots}
    for pivot in pivots:
        for unknown, value in _substituted({pivot: Fraction(1)}, pivots).items():
            vectors[unknown][pivot] = value
    return list(vectors.values())


def _substituted(row: Row, pivots: dict[int, Row]) -> Row:
    """The row with every pivot replaced by what it equals."""
    row = dict(row)
    waiting = [unknown for unknown in row if unknown in pivots]
    while waiting:
        pivot = waiting.pop()
        weight = row.pop(pivot, None)
        if not weight:
            continue
        for unknown, value in pivots[pivot].items():
            row[unknown] = row.get(unknown, Fraction(0)) + weight * value
            if unknown in pivots:
                waiting.append(unknown)
    return {unknown: value for unknown, value in row.items() if value}


def _unbound(rows: list[Row], classes: np.ndarray) -> list[int]:
    """Classes that no equation mentions: each is free."""
    mentioned = {unknown for row in rows for unknown in row} | {0}
    return [unknown for unknown in np.unique(classes).tolist() if unknown not in mentioned]
