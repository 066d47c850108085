"""Arrays of numbers that say which entries of a tensor belong together, one axis kept only where it matters.

Such an array has the rank of its tensor, and size 1 along every axis on which nothing depends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

T = TypeVar("T")

Shape = tuple[int, ...]
FORBIDDEN = -1


def compressed(array: np.ndarray) -> np.ndarray:
    """The array with size 1 along every axis on which it is constant."""
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            first = array[(slice(None),) * axis + (slice(0, 1),)]
            if (array == first).all():
                array = first
    return array


def padded(array: np.ndarray, rank: int) -> np.ndarray:
    """The array with axes of size 1 put in front, as broadcasting does."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def reshaped(array: np.ndarray, shape: Shape, target: Shape) -> np.ndarray:
    """What a reshape from `shape` to `target` makes of a (compressed) array, expanding only the axes that it touches."""
    if shape == target:
        return array
    if math.prod(shape) == 0:
        return np.zeros((1,) * len(target), dtype=array.dtype)
    blocks = list(_aligned(shape, target))
    broadcast: list[int] = []
    sizes: list[int] = []
    for before, after in blocks:
        if all(array.shape[axis] == 1 for axis in before):
            broadcast += [1] * len(before)
            sizes += [1] * len(after)
        else:
            broadcast += [shape[axis] for axis in before]
            sizes += [target[axis] for axis in after]
    return compressed(np.broadcast_to(array, broadcast).reshape(sizes))


def _aligned(shape: Shape, target: Shape) -> Iterable[tuple[list[int], list[int]]]:
    """Runs of axes of both shapes that hold the same entries, as short as can be."""
    left = right = 0
    while left < len(shape) or right < len(target):
        before, after = [], []
        sizes = [1, 1]
        if left < len(shape):
            before.append(left)
            sizes[0], left = shape[left], left + 1
        while sizes[0] != sizes[1] or (left == len(shape) and right < len(target)):
            if right < len(target) and (sizes[1] < sizes[0] or left == len(shape)):
                after.append(right)
                sizes[1], right = sizes[1] * target[right], right + 1
            else:
                before.append(left)
                sizes[0], left = sizes[0] * shape[left], left + 1
        yield before, after


def extends(labels: np.ndarray, axis: int, size: int) -> bool:
    """Whether some class of entries reaches along an axis of the given size."""
    if size <= 1 or not labels.size:
        return False
    if labels.shape[axis] == 1:
        return bool((labels >= 0).any())
    rows = np.moveaxis(labels, axis, 0).reshape(size, -1)
    first = np.full(int(labels.max()) + 1, -1)  # an index at which each class is seen
    index = np.broadcast_to(np.arange(size)[:, None], rows.shape)
    allowed = rows >= 0
    first[rows[allowed]] = index[allowed]
    return bool((first[rows[allowed]] != index[allowed]).any())


def partition(shape: Shape, relations: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Number the classes of the entries of an array of `shape` that relations (entries, labels) make.

    Entries that meet the same label belong together. A label that meets the entry −1, and the label −1 itself, is
    forbidden: so are all entries that belong with it.
    """
    count = math.prod(shape)
    lines: list[np.ndarray] = []
    offset = count + 1  # node `count` is the forbidden one
    for entries, labels in relations:
        entries, labels = (side.ravel() for side in np.broadcast_arrays(entries, labels))
        names, numbered = distinct(labels)
        nodes = np.where(names < 0, count, np.arange(len(names)) + offset)[numbered]
        lines.append(np.stack([np.where(entries < 0, count, entries), nodes]))
        offset += len(names)
    if not lines:
        return np.arange(count).reshape(shape)
    classes = components(np.concatenate(lines, 1), offset)
    own = np.where(classes[:count] == classes[count], FORBIDDEN, classes[:count])
    return renumbered(own).reshape(shape)


def components(edges: np.ndarray, count: int) -> np.ndarray:
    """Which component of a graph each of its `count` vertices belongs to; edges: (2, …)."""
    edges = edges.astype(np.int32)  # as older scipy wants them
    labels: np.ndarray
    _, labels = connected_components(coo_array((np.ones(edges.shape[1]), tuple(edges)), shape=(count, count)), directed=False)
    return labels


def together(items: Sequence[T], keys: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """Items that share a key, directly or through others, in their order.

    >>> together(["ab", "c", "bd"], iter)
    [['ab', 'bd'], ['c']]
    """
    numbers: dict[Hashable, int] = {}
    edges = [(place, numbers.setdefault(key, len(items) + len(numbers))) for place, item in enumerate(items) for key in keys(item)]
    labels = components(np.array(edges, dtype=np.int64).reshape(-1, 2).T, len(items) + len(numbers))
    found: dict[int, list[T]] = {}
    for item, label in zip(items, labels.tolist(), strict=False):
        found.setdefault(label, []).append(item)
    return list(found.values())


def renumbered(labels: np.ndarray) -> np.ndarray:
    """The same classes, numbered from 0 in the order of their first entry; −1 stays."""
    names, places = distinct(labels.ravel())
    first = np.empty(len(names), dtype=np.int64)
    first[places[::-1]] = np.arange(len(places) - 1, -1, -1)  # of several entries the last one written stays: the first of all
    rank = np.empty(len(names), dtype=np.int64)
    allowed = names >= 0
    rank[allowed] = np.argsort(np.argsort(first[allowed]))
    rank[~allowed] = FORBIDDEN
    return rank[places].reshape(labels.shape)


def distinct(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct numbers ≥ −1 of a row, in order, and where among them each entry's is; in linear time if none is large."""
    if not labels.size or int(labels.max()) > 4 * labels.size + 1000:
        names, places = np.unique(labels, return_inverse=True)
        return names, places.ravel()
    there = np.zeros(int(labels.max()) + 2, dtype=bool)
    there[labels + 1] = True
    return np.flatnonzero(there) - 1, (np.cumsum(there) - 1)[labels + 1]


def joined(all_labels: Sequence[np.ndarray]) -> np.ndarray:
    """The coarsest of several partitions of one tensor: what belongs together in any of them does."""
    if len(all_labels) == 1:
        return all_labels[0]
    shape = tuple(min(sizes) for sizes in zip(*(labels.shape for labels in all_labels), strict=True))
    entries = np.arange(math.prod(shape)).reshape(shape)
    return compressed(partition(shape, [(entries, labels) for labels in all_labels]))


def forbidden(rank: int) -> np.ndarray:
    """Labels of a tensor none of whose entries may move."""
    return np.full((1,) * rank, FORBIDDEN)
