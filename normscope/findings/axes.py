"""Along which axes the features of a value lie, as far as linear layers and what moves entries tell."""

from __future__ import annotations

import math
from functools import reduce

import torch

from normscope.graph.graph import Graph, Node
from normscope.rules.readings import (
    Activation,
    Attention,
    Joining,
    LinearMap,
    Normalizer,
    Permuting,
    Random,
    Reshaping,
    Scaling,
    Sum,
    learned,
)
from normscope.rules.registry import registry

Axes = frozenset[int]
UNKNOWN: Axes = frozenset()
SAME = (Activation, Scaling, Normalizer, Random)  # every entry stays where it is


def feature_axes(graph: Graph) -> dict[Node, Axes]:
    """For every node the axes of its features, none where they are not known.

    A linear layer writes features along its output axis, an embedding along the last; reshaping may split them over several axes.
    A sum has those that all its terms have, so that a mixer, which adds features to positions, is not judged.
    """
    found: dict[Node, Axes] = {}
    for node in graph:
        found[node] = _axes(node, found)
    return found


def _axes(node: Node, found: dict[Node, Axes]) -> Axes:
    read, rank = registry.reading(node), len(node.shape)
    if isinstance(read, LinearMap):
        known = learned(read.weight) and read.output_axis is not None
        return frozenset({rank + read.output_axis}) if known and read.output_axis is not None else UNKNOWN
    if not node.inputs:
        return UNKNOWN
    first = node.inputs[0]
    if isinstance(read, (Reshaping, Permuting)):
        return _moved(node, found[first])
    if isinstance(read, Sum):
        return _agreed(read.terms, rank, found)
    if isinstance(read, Joining):
        axes = _agreed(node.inputs, rank, found)
        return axes if read.axis not in axes else UNKNOWN
    if isinstance(read, Attention):
        return found[read.value] if isinstance(read.value, Node) and len(read.value.shape) == rank else UNKNOWN
    if isinstance(read, SAME):
        return found[first] if first.shape == node.shape else UNKNOWN
    looked_up = first.dtype is not None and not first.dtype.is_floating_point and any(map(learned, node.constants))
    return frozenset({rank - 1}) if looked_up and rank > 1 else UNKNOWN


def _agreed(nodes: tuple[Node, ...], rank: int, found: dict[Node, Axes]) -> Axes:
    """What all of some nodes have, if they have as many axes."""
    same = all(len(node.shape) == rank for node in nodes)
    return reduce(lambda a, b: a if a == b else UNKNOWN, (found[node] for node in nodes)) if same else UNKNOWN


def _moved(node: Node, axes: Axes) -> Axes:
    """Where axes go when entries move: the places along which the number of an entry's feature changes."""
    if not axes:
        return UNKNOWN
    shape = node.inputs[0].shape
    own = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    numbers = torch.arange(math.prod(own), dtype=torch.float64).reshape(own).expand(shape)
    moved = node.apply(numbers.contiguous())
    return frozenset(
        axis
        for axis, size in enumerate(moved.shape)
        if size > 1 and bool((moved.narrow(axis, 1, size - 1) != moved.narrow(axis, 0, 1)).any())
    )
