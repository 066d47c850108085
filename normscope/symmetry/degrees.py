"""How every tensor scales when parameters do: its degree, a linear form in unknown exponents, entry by entry.

A parameter's entries scale by e^degree. Degrees add in products and contractions, must agree in sums (but for a term that
no output can see) and along whatever is mixed or normalized together; normalizers set them to 0, and whatever is not
homogeneous, the outputs included, needs 0. The solutions of these equations are the scale symmetries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
    Opaque,
    Parameter,
    Product,
    Rotation,
    Softmax,
    Sum,
)  # fmt: skip
from normscope.symmetry.indices import compressed, padded, reshaped
from normscope.symmetry.shifts import Shifts, seen
from normscope.symmetry.system import System, Terms

Part = list[tuple[float, np.ndarray]]  # Σ coefficient · unknowns, on some axes
Degree = list[Part]  # the sum of parts on disjoint axes; none means 0


class Degrees:
    """The degrees of all forms of a graph, and the system of what must hold between them.

    leaves: for every parameter the unknowns of its entries, as a sum of arrays that broadcast to its shape.
    ignored: sums with a constant that need not scale along, because a later bias can take back what it adds (by `wider`).
    """

    def __init__(self, forms: Sequence[Form], shifts: Shifts, wider: Shifts) -> None:
        self.system, self.shifts, self.wider = System(), shifts, wider
        self.ignored: list[Form] = []
        self.leaves: dict[str, list[np.ndarray]] = {}
        self._loose: dict[int, set[int]] = {}  # first unknown of an array → those of its leaf that may still absorb a scalar
        self._users: dict[Form, list[Form]] = defaultdict(list)
        for form in forms:
            for operand in form.operands:
                self._users[operand].append(form)
        self._degrees: dict[Form, Degree] = {}
        for form in forms:
            self._degrees[form] = self._degree(form)
        for loose in {id(loose): loose for loose in self._loose.values()}.values():
            for first in sorted(loose)[1:]:
                self.system.equate(first, System.ZERO)

    def _degree(self, form: Form) -> Degree:
        operands = [self._degrees[operand] for operand in form.operands]
        if isinstance(form, Parameter):
            return self._leaf(form)
        if isinstance(form, Fixed):
            return []
        if isinstance(form, Homogeneous):
            return scaled(operands[0], form.power)
        if isinstance(form, Product):
            return self._product(form, operands)
        if isinstance(form, Sum):
            return self._sum(form, operands)
        if isinstance(form, Moved):
            return self._moved(form, operands)
        if isinstance(form, Mixed):
            mixed = self._uniform(operands[0], form.axes)
            return [[(c, reshaped(ids, form.kept, form.shape)) for c, ids in part] for part in mixed]
        if isinstance(form, Normalized):
            uniform = self._uniform(operands[0], form.axes)
            return [] if form.divides else uniform
        if isinstance(form, Contraction):
            return self._contraction(form, operands)
        if isinstance(form, Lookup):
            return self._lookup(form, operands[0])
        if isinstance(form, Rotation):
            return self._rotation(form, operands[0])
        assert isinstance(form, (Opaque, Softmax)), form
        for degree in operands:
            self._zero(degree)
        return []

    # leaves -----------------------------------------------------------------------------------------------------------

    def _leaf(self, form: Parameter) -> Degree:
        """An unknown for every entry; for a matrix that is contracted, one for every row and one for every column.

        Entries that no output sees are left alone: they are shifts.
        """
        rank = len(form.shape)
        if rank < 2 or not self._is_contracted(form):
            ids = np.where(seen(self.shifts.labels[form], form.shape), self.system.fresh(form.shape), System.ZERO)
            self.leaves[form.name] = [ids]
            return [[(1.0, ids)]]
        arrays = [
            self.system.fresh([size if other == axis else 1 for other in range(rank)])
            for axis, size in enumerate(form.shape)
            if size > 1 or axis == 0
        ]
        loose = {int(ids.flat[0]) for ids in arrays}
        self._loose.update(dict.fromkeys(loose, loose))
        self.leaves[form.name] = arrays
        return [[(1.0, ids)] for ids in arrays]

    def _is_contracted(self, form: Form) -> bool:
        """Whether a contraction reads the form, rearranged perhaps, so that only rows and columns can scale."""
        for user in self._users[form]:
            if isinstance(user, Contraction):
                sizes = dict(zip(user.names[0], user.views[0], strict=True))
                return all(sizes[name] == 1 for name in user.batched())
            if isinstance(user, Lookup) or (isinstance(user, (Moved, Normalized)) and self._is_contracted(user)):
                return True
        return False

    def _absorbs(self, ids: np.ndarray) -> bool:
        """Whether an array of a leaf may still absorb a scalar, which it then has done: another of its arrays carries it."""
        first = int(ids.flat[0])
        loose = self._loose.get(first)
        if loose is None or first not in loose or len(loose) == 1:
            return False
        loose.discard(first)
        return True

    # equations --------------------------------------------------------------------------------------------------------

    def _uniform(self, degree: Degree, axes: Iterable[int]) -> Degree:
        """The degree, made equal along axes."""
        result: Degree = []
        for part in degree:
            along = [axis for axis in axes if any(ids.shape[axis] > 1 for _, ids in part)]
            if not along:
                result.append(part)
                continue
            coefficient, ids = self._single(part)
            first = ids
            for axis in along:
                first = first[(slice(None),) * axis + (slice(0, 1),)]
            self.system.equate(ids, first)
            if first.size == 1 and self._absorbs(ids):
                self.system.equate(first, System.ZERO)
            result.append([(coefficient, first)])
        return result

    def _single(self, part: Part) -> tuple[float, np.ndarray]:
        """A part as one array of unknowns."""
        if len(part) == 1:
            return part[0]
        ids = self.system.fresh(np.broadcast_shapes(*(ids.shape for _, ids in part)))
        self.system.vanish([(-1.0, ids), *part])
        return 1.0, ids

    def _zero(self, degree: Degree) -> None:
        if not degree:
            return
        if len(degree) == 1 and len(degree[0]) == 1:
            self.system.equate(degree[0][0][1], System.ZERO)
            return
        rank = degree[0][0][1].ndim
        scalars: Terms = [self._single(part) for part in self._uniform(degree, range(rank))]
        self.system.vanish([(coefficient, ids.ravel()) for coefficient, ids in scalars])

    def _equal(self, one: Degree, other: Degree) -> None:
        if len(one) == len(other) == 1 and len(one[0]) == len(other[0]) == 1 and one[0][0][0] == other[0][0][0]:
            self.system.equate(one[0][0][1], other[0][0][1])
        else:
            self._zero(disjoint([*one, *scaled(other, -1.0)]))

    # forms ------------------------------------------------------------------------------------------------------------

    def _product(self, form: Product, operands: Sequence[Degree]) -> Degree:
        rank = len(form.shape)
        parts = [part for degree, power in zip(operands, form.powers, strict=True) for part in scaled(degree, power)]
        return disjoint([[(c, padded(ids, rank)) for c, ids in part] for part in parts])

    def _sum(self, form: Sum, operands: Sequence[Degree]) -> Degree:
        """All terms alike, except those, or those entries of them, that no output can see."""
        rank = len(form.shape)
        kept: Degree | None = None
        waiting: list[tuple[Degree, np.ndarray]] = []
        for operand, degree, labels in zip(form.operands, operands, self.shifts.edges[form], strict=True):
            if isinstance(operand, Fixed) and self._is_taken_back(form, operand):
                self.ignored.append(form)
                continue
            visible = seen(labels, operand.shape)
            degree = [[(c, padded(ids, rank)) for c, ids in part] for part in degree]
            if not visible.any():
                continue
            if visible.all():
                if kept is not None:
                    self._equal(kept, degree)
                if kept is None or len(degree) < len(kept) or (degree and _size(degree) < _size(kept)):
                    kept = degree
            else:
                waiting.append((degree, padded(visible, rank)))
        for degree, visible in waiting:
            if kept is None:
                kept = degree
                continue
            one, other, mask = np.broadcast_arrays(self._whole(kept, rank), self._whole(degree, rank), visible)
            self.system.equate(one[mask], other[mask])
        return kept or []

    def _is_taken_back(self, form: Sum, constant: Form) -> bool:
        labels = self.wider.edges[form][form.operands.index(constant)]
        unseen = form not in self.wider.absorbers and not seen(labels, constant.shape).any()
        return unseen and constant not in self.wider.varying

    def _whole(self, degree: Degree, rank: int) -> np.ndarray:
        """A degree as one array of unknowns."""
        if not degree:
            return np.full((1,) * rank, System.ZERO)
        if len(degree) == 1 and len(degree[0]) == 1 and degree[0][0][0] == 1.0:
            return degree[0][0][1]
        terms = [term for part in degree for term in part]
        ids = self.system.fresh(np.broadcast_shapes(*(ids.shape for _, ids in terms)))
        self.system.vanish([(-1.0, ids), *terms])
        return ids

    def _moved(self, form: Moved, operands: Sequence[Degree]) -> Degree:
        source = form.source
        if len(operands) == 1 and (source >= 0).all():
            shape = form.operands[0].shape
            return disjoint([[(c, _picked(ids, shape, source)) for c, ids in part] for part in operands[0]])
        whole = np.concatenate([
            np.broadcast_to(self._whole(degree, len(operand.shape)), operand.shape).ravel()
            for degree, operand in zip(operands, form.operands, strict=True)
        ])  # fmt: skip
        ids = np.where(source >= 0, whole[np.maximum(source, 0)], System.ZERO)
        zeros = source == -1  # zero scales like anything
        if zeros.any():
            ids[zeros] = self.system.fresh((int(zeros.sum()),))
        return [[(1.0, compressed(ids))]]

    def _contraction(self, form: Contraction, operands: Sequence[Degree]) -> Degree:
        """What is contracted must scale alike together; the rest adds up."""
        contracted, batched = form.contracted(), form.batched()
        total: Degree = []
        inner: list[Part] = []
        absorbed = False
        for i, degree in enumerate(operands):
            names, view = form.names[i], form.views[i]
            viewed = disjoint([[(c, reshaped(ids, form.operands[i].shape, view)) for c, ids in part] for part in degree])
            viewed = self._uniform(viewed, [axis for axis, name in enumerate(names) if name in form.mixed(i)])
            for part in viewed:
                touched = {names[axis] for _, ids in part for axis in range(ids.ndim) if ids.shape[axis] > 1}
                if not touched & contracted:
                    total.append(_named(part, names, form.out))
                    continue
                if not touched <= contracted | batched:
                    part, outer = self._split(part, names, contracted, batched)
                    total.append(_named(outer, names, form.out))
                    absorbed = True
                elif not absorbed and any(self._absorbs(ids) for _, ids in part):
                    absorbed = True
                inner.append(_named(part, names, (*sorted(batched), *sorted(contracted))))
        if inner:
            rank = len(batched) + len(contracted)
            together = disjoint(inner)
            if absorbed:
                self._zero_along(together, len(batched), rank)
            else:
                order = (*sorted(batched), *sorted(contracted))
                total += [_named(part, order, form.out) for part in self._uniform(together, range(len(batched), rank))]
        return disjoint([[(c, reshaped(ids, form.out_view, form.shape)) for c, ids in part] for part in total])

    def _zero_along(self, degree: Degree, batched: int, rank: int) -> None:
        """Zero, where a leaf has absorbed whatever constant there was."""
        whole = self._uniform(degree, range(batched, rank)) if len(degree) > 1 else degree
        terms = [term for part in whole for term in part]
        if len(terms) == 1:
            self.system.equate(terms[0][1], System.ZERO)
        else:
            self.system.vanish(terms)

    def _split(self, part: Part, names: Sequence[str], contracted: set[str], batched: set[str]) -> tuple[Part, Part]:
        """A part as inner + outer, on what is contracted and on what is not; a constant between the two is free."""
        _, ids = term = self._single(part)
        inner = self.system.fresh([s if n in contracted | batched else 1 for s, n in zip(ids.shape, names, strict=True)])
        outer = self.system.fresh([1 if n in contracted else s for s, n in zip(ids.shape, names, strict=True)])
        self.system.vanish([term, (-1.0, inner), (-1.0, outer)])
        return [(1.0, inner)], [(1.0, outer)]

    def _lookup(self, form: Lookup, table: Degree) -> Degree:
        rank = len(form.shape)
        rows = self._uniform(table, (0,))
        return [[(c, padded(ids.reshape(ids.shape[1:]), rank)) for c, ids in part] for part in rows]

    def _rotation(self, form: Rotation, operand: Degree) -> Degree:
        """Both coordinates of a plane alike."""
        ids = self._whole(operand, len(form.shape))
        if ids.shape[-1] > 1:
            half = ids.shape[-1] // 2
            self.system.equate(ids[..., :half], ids[..., half:])
        return [[(1.0, ids)]]


def scaled(degree: Degree, power: float) -> Degree:
    """The degree of a power of a tensor."""
    return [[(c * power, ids) for c, ids in part] for part in degree] if power else []


def disjoint(degree: Degree) -> Degree:
    """The same sum with parts that share an axis joined."""
    result: list[tuple[set[int], Part]] = []
    for part in degree:
        axes = {axis for _, ids in part for axis in range(ids.ndim) if ids.shape[axis] > 1}
        joined = list(part)
        apart = []
        for other_axes, other in result:
            if axes & other_axes:
                axes, joined = axes | other_axes, other + joined
            else:
                apart.append((other_axes, other))
        result = [*apart, (axes, joined)]
    return [part for _, part in result]


def _picked(ids: np.ndarray, shape: tuple[int, ...], source: np.ndarray) -> np.ndarray:
    return compressed(np.broadcast_to(ids, shape).ravel()[source]) if ids.size > 1 else ids.reshape((1,) * source.ndim)


def _named(part: Part, names: Sequence[str], target: Sequence[str]) -> Part:
    """A part with named axes, in the order of `target`; axes that it does not depend on have size 1."""
    result = []
    for coefficient, ids in part:
        kept = [axis for axis, name in enumerate(names) if name in target]
        order = sorted(kept, key=lambda axis: list(target).index(names[axis]))
        moved = ids.transpose([*order, *(axis for axis in range(ids.ndim) if axis not in kept)])
        shape = dict(zip((names[axis] for axis in order), moved.shape, strict=False))
        result.append((coefficient, moved.reshape([shape.get(name, 1) for name in target])))
    return result


def _size(degree: Degree) -> int:
    return sum(ids.size for part in degree for _, ids in part)
