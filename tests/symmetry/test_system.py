"""The exact solver against dense linear algebra, and label arrays against what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope.symmetry.indices import compressed, extends, joined, partition, reshaped
from normscope.symmetry.system import System


def dense(system: System, count: int) -> np.ndarray:
    """Basis vectors over the unknowns 1 … count."""
    solution = system.solve()
    rows = [
        [float(vector.get(int(solution.classes[unknown]), 0)) for unknown in range(1, count + 1)] for vector in solution.vectors
    ]
    return np.array(rows).reshape(-1, count)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_solutions_are_the_null_space(seed):
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 9))
    system = System()
    ids = system.fresh((count,))
    rows = []
    for _ in range(int(generator.integers(0, 7))):
        chosen = generator.choice(count, size=min(count, int(generator.integers(1, 4))), replace=False)
        weights = generator.choice([-2.0, -1.0, 0.5, 1.0], size=len(chosen))
        system.vanish([(float(weight), ids[[place]]) for weight, place in zip(weights, chosen, strict=True)])
        rows.append(np.bincount(chosen, weights, count))
    for _ in range(int(generator.integers(0, 3))):
        one, other = generator.integers(0, count, 2)
        system.equate(ids[one], ids[other])
        rows.append(np.bincount([one], [1.0], count) - np.bincount([other], [1.0], count))
    matrix = np.array(rows).reshape(-1, count)
    found = dense(system, count)
    rank = np.linalg.matrix_rank(matrix) if len(matrix) else 0
    assert np.abs(matrix @ found.T).max(initial=0) <= 1e-12
    assert len(found) == count - rank == (np.linalg.matrix_rank(found) if len(found) else 0)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((2, 6), (2, 2, 3)), ((2, 2, 3), (2, 6)), ((2, 1, 6), (12,)), ((4, 3), (1, 4, 3, 1)), ((6,), (1, 2, 3)), ((1,), ())],
)
def test_reshaped_is_what_a_reshape_does(shape, target):
    for axes in range(2 ** len(shape)):
        small = [size if axes >> i & 1 else 1 for i, size in enumerate(shape)]
        array = np.random.default_rng(axes).integers(0, 4, small)
        whole = np.broadcast_to(array, shape).reshape(target)
        assert (np.broadcast_to(reshaped(array, shape, target), target) == whole).all()


def test_entries_that_share_a_label_belong_together_and_forbidden_ones_spread():
    labels = partition((5,), [(np.array([0, 1, 2, 3, 4]), np.array([7, 8, 7, 9, -1])), (np.array([3, 4]), np.array([1, 1]))])
    assert labels.tolist() == [0, 1, 0, -1, -1]


def test_a_fixed_entry_forbids_its_label():
    assert partition((2,), [(np.array([0, 1, -1]), np.array([4, 5, 5]))]).tolist() == [0, -1]


def test_the_join_is_the_coarsest():
    rows, columns = np.arange(3).reshape(3, 1), np.arange(2).reshape(1, 2)
    assert joined([rows, columns]).tolist() == [[0]]
    assert joined([rows, np.array([[0], [0], [-1]])]).tolist() == [[0], [0], [-1]]


def test_extent_of_classes():
    assert extends(np.array([[0, 1], [0, 2]]), 0, 2) and not extends(np.array([[0, 0], [1, 1]]), 0, 2)
    assert not extends(np.array([[-1, 1], [-1, 2]]), 0, 2)
    assert compressed(np.array([[3, 3], [4, 4]])).tolist() == [[3], [4]]
