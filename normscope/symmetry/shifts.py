"""Which additions to a tensor no output can see, found backwards from the outputs.

For every form there is a partition of its entries: adding the same number to all entries of a class changes nothing
(class −1: any addition does). A normalizer that subtracts its mean makes one class of each set that it normalizes, a
softmax of each slice; linear maps carry classes back to what they read; everything else forbids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from normscope.rules.algebra import (
    Contraction,
    Fixed,
    Form,
    Homogeneous,
    Lookup,
    Mixed,
    Moved,
    Normalized,
    Product,
    Softmax,
    Sum,
)  # fmt: skip
from normscope.rules.readings import Random
from normscope.rules.registry import registry
from normscope.symmetry.indices import Shape, compressed, extends, forbidden, joined, padded, partition, renumbered, reshaped


class Shifts:
    """The invisible additions to every form of a graph.

    edges: for every form, for each of its operands, what may be added to that operand as far as this form goes.
    absorbers: sums of which one operand holds a bias, of the given shape, that takes back what is added to the others. What it
    takes back must be the same for every input and every random number: where a factor depends on them, `known` is all that
    may be added, the shifts that need no absorber.
    """

    def __init__(
        self, forms: Sequence[Form], absorbers: Mapping[Form, tuple[Form, Shape]] | None = None, known: Shifts | None = None
    ) -> None:
        self.absorbers, self.known = absorbers or {}, known
        self.varying = set() if known is None else _varying(forms)
        self.labels: dict[Form, np.ndarray] = {}
        self.edges: dict[Form, list[np.ndarray]] = {}
        demands: dict[Form, list[np.ndarray]] = {form: [] for form in forms}
        for form in reversed(forms):
            self.labels[form] = joined(demands[form]) if demands[form] else forbidden(len(form.shape))
            self.edges[form] = self.pulled(form, self.labels[form])
            for operand, labels in zip(form.operands, self.edges[form], strict=True):
                demands[operand].append(labels)

    def pulled(self, form: Form, labels: np.ndarray) -> list[np.ndarray]:
        """What may be added to each operand of a form, given what may be added to the form itself."""
        if form in self.absorbers:
            return [self._absorbed(form, operand, labels) for operand in form.operands]
        if isinstance(form, Normalized) and form.centered:
            return [_sets(form.shape, form.axes)]
        if isinstance(form, Softmax):
            return [_sets(form.shape, (form.axis,))]
        if isinstance(form, Moved):  # what it drops is free, whatever is asked of what it keeps
            return moved_pull(form, labels)
        if (labels < 0).all():
            return [forbidden(len(operand.shape)) for operand in form.operands]
        if isinstance(form, Homogeneous) and form.odd_linear:
            return [labels]
        if isinstance(form, Sum):
            return [broadcast_pull(labels, operand.shape) for operand in form.operands]
        if isinstance(form, Product):
            return [self._unless_it_varies(form, i, _factor_pull(form, i, labels)) for i in range(len(form.operands))]
        if isinstance(form, Mixed):
            return [_mixed_pull(form, labels)]
        if isinstance(form, Contraction):
            return [self._unless_it_varies(form, i, *_contraction_pull(form, i, labels)) for i in range(2)]
        if isinstance(form, Lookup):
            return [_lookup_pull(form, labels, alike=self.known is not None)]
        return [forbidden(len(operand.shape)) for operand in form.operands]

    def _absorbed(self, form: Form, operand: Form, labels: np.ndarray) -> np.ndarray:
        holder, shape = self.absorbers[form]
        if operand is holder:
            return broadcast_pull(labels, operand.shape)
        return broadcast_pull(padded(np.arange(math.prod(shape)).reshape(shape), len(form.shape)), operand.shape)

    def _unless_it_varies(self, form: Form, operand: int, labels: np.ndarray, averaged: bool = False) -> np.ndarray:
        """averaged: the other operand holds weights that sum to 1, so that it does not matter what they are."""
        others = (other for i, other in enumerate(form.operands) if i != operand)
        if self.known is None or averaged or not any(other in self.varying for other in others):
            return labels
        return self.known.edges[form][operand]


def _factor_pull(form: Product, operand: int, labels: np.ndarray) -> np.ndarray:
    """A factor may move where the others are constant on every class."""
    own = form.operands[operand]
    rank = len(form.shape)
    for i, other in enumerate(form.operands):
        shape = (1,) * (rank - len(other.shape)) + other.shape
        if i != operand and any(extends(labels, axis, form.shape[axis]) for axis in range(rank) if shape[axis] > 1):
            return forbidden(len(own.shape))
    return broadcast_pull(labels, own.shape) if form.powers[operand] == 1 else forbidden(len(own.shape))


def seen(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Which entries of an operand matter: those that may not be moved each on its own."""
    if labels.shape != shape:
        return np.ones(shape, dtype=bool)
    names, counts = np.unique(labels, return_counts=True)
    alone = names[(counts == 1) & (names >= 0)]
    return ~np.isin(labels, alone)


def _sets(shape: tuple[int, ...], axes: Iterable[int]) -> np.ndarray:
    """A class for every set of entries along `axes`."""
    kept = tuple(1 if axis in set(axes) else size for axis, size in enumerate(shape))
    return np.arange(math.prod(kept)).reshape(kept)


def broadcast_pull(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Classes of an operand that is broadcast to a tensor with the given classes."""
    own = (1,) * (labels.ndim - len(shape)) + shape
    kept = tuple(min(sizes) for sizes in zip(labels.shape, own, strict=True))
    entries = np.arange(math.prod(kept)).reshape(kept)
    found = labels if kept == labels.shape else compressed(partition(kept, [(entries, labels)]))
    return found.reshape(found.shape[labels.ndim - len(shape) :])


def moved_pull(form: Moved, labels: np.ndarray) -> list[np.ndarray]:
    """Classes of each operand, moved alone: what comes from the others stays where it is."""
    whole = np.broadcast_to(renumbered(labels), form.shape)
    found, start = [], 0
    for operand in form.operands:
        own = (form.source >= start) & (form.source < start + operand.entries)
        entries = np.where(own, form.source - start, -1)
        found.append(compressed(partition((operand.entries,), [(entries, whole)]).reshape(operand.shape)))
        start += operand.entries
    return found


def _mixed_pull(form: Mixed, labels: np.ndarray) -> np.ndarray:
    operand = form.operands[0]
    kept = reshaped(labels, form.shape, form.kept)
    reach = any(extends(kept, axis, form.kept[axis]) for axis in form.axes)
    if reach and not form.constants:
        return forbidden(len(operand.shape))
    sizes = tuple(1 if axis in form.axes else size for axis, size in enumerate(kept.shape))
    entries = np.arange(math.prod(sizes)).reshape(sizes)
    found = compressed(partition(sizes, [(entries, kept)]))
    if reach or not form.linear:
        return found if form.constants else forbidden(len(operand.shape))
    free = tuple(operand.shape[axis] if axis in form.axes else 1 for axis in range(len(operand.shape)))
    return freed(found, free)


def freed(labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A class of its own for every index of the axes of `shape`, within each class of `labels` (of size 1 there)."""
    number = np.arange(math.prod(shape)).reshape(shape)
    return compressed(renumbered(np.where(labels < 0, -1, labels * math.prod(shape) + number)))


def _varying(forms: Sequence[Form]) -> set[Form]:
    """What depends on the input, or on random numbers."""
    found: set[Form] = set()
    for form in forms:
        given = isinstance(form, Fixed) and form.node is not None and (form.node.is_input or form.node.is_drawn)
        drawn = form.node is not None and registry.reading(form.node, Random) is not None
        if given or drawn or any(operand in found for operand in form.operands):
            found.add(form)
    return found


def _contraction_pull(form: Contraction, operand: int, labels: np.ndarray) -> tuple[np.ndarray, bool]:
    """Also whether the other operand only averages what is constant."""
    own = form.operands[operand]
    names, view = form.names[operand], form.views[operand]
    whole = reshaped(labels, form.shape, form.out_view)
    sizes = dict(zip(form.out, form.out_view, strict=True))
    axis_of = {name: axis for axis, name in enumerate(form.out)}
    reaching = {name for name in form.out if extends(whole, axis_of[name], sizes[name])}
    seen_by_other = reaching & set(form.names[1 - operand])
    made = reaching & form.made()
    constant_along: set[str] = set()
    if seen_by_other:
        if not _averages(form, 1 - operand):
            return forbidden(len(own.shape)), False
        constant_along |= form.contracted()
    if made:
        if operand != 0 or not form.constants:
            return forbidden(len(own.shape)), False
        constant_along |= form.mixed(operand)
    kept = [name for name in names if name in form.out]
    rest = [name for name in form.out if name not in kept]
    ordered = whole.transpose([axis_of[name] for name in (*kept, *rest)])
    shape = ordered.shape[: len(kept)]
    entries = np.arange(math.prod(shape)).reshape(shape + (1,) * len(rest))
    found = compressed(partition(shape, [(entries, ordered)]))
    placed = found.reshape([found.shape[kept.index(name)] if name in kept else 1 for name in names])
    free = tuple(size if name not in kept and name not in constant_along else 1 for name, size in zip(names, view, strict=True))
    return reshaped(freed(placed, free), view, own.shape), bool(seen_by_other)


def _averages(form: Contraction, operand: int) -> bool:
    """Whether an operand holds weights that sum to 1 over all that is contracted."""
    weights = form.operands[operand]
    if not isinstance(weights, Softmax) or not weights.stochastic or weights.axis != len(weights.shape) - 1:
        return False
    return form.contracted() == {form.names[operand][-1]}


def _lookup_pull(form: Lookup, labels: np.ndarray, alike: bool) -> np.ndarray:
    """alike: all rows move together, because which of them is read depends on the input."""
    table = form.operands[0]
    ids = range(len(form.shape) - 1)
    same_for_all = any(extends(labels, axis, form.shape[axis]) for axis in ids)
    columns = broadcast_pull(labels, table.shape[1:])
    found = padded(columns, 2)
    return found if same_for_all or alike else freed(found, (table.shape[0], 1))
