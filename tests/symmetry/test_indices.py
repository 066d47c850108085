"""Classes of entries, against the plain definitions."""

from __future__ import annotations

import numpy as np
import pytest

from normscope.symmetry.indices import distinct, extends, renumbered


def labels_of(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 5, size=random.integers(1, 4)))
    return random.integers(-1, int(random.choice([1, 3, 20, 10**6])), size=shape)


@pytest.mark.parametrize("seed", range(100))
def test_classes_are_numbered_by_their_first_entry(seed):
    labels = labels_of(seed)
    numbers = {name: place for place, name in enumerate(dict.fromkeys(name for name in labels.ravel().tolist() if name >= 0))}
    assert renumbered(labels).ravel().tolist() == [numbers.get(name, -1) for name in labels.ravel().tolist()]
    names, places = distinct(labels.ravel())
    assert names.tolist() == sorted(set(labels.ravel().tolist()))
    assert np.array_equal(names[places], labels.ravel())


@pytest.mark.parametrize("seed", range(100))
def test_a_class_reaches_along_an_axis_where_two_indices_hold_it(seed):
    labels = labels_of(seed)
    for axis, size in enumerate(labels.shape):
        held = [set(part.ravel().tolist()) - {-1} for part in np.moveaxis(labels, axis, 0)]
        expected = any(one & other for i, one in enumerate(held) for other in held[:i])
        assert extends(labels, axis, size) == expected
    assert not extends(np.zeros((2, 0), dtype=int), 0, 2)
