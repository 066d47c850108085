"""Bonds: indices that are only summed over, on which any invertible matrix may act and its inverse undo it.

If the vectors v and w meet only in Σ_i v_i w_i, then v → A v, w → A^{-T} w changes nothing. From each contraction the
search follows its index through everything that is linear and treats all of its values alike, on both sides, to the
parameters; what treats them differently cuts the index into blocks, and anything else ends the search: no bond.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from normscope.rules.algebra import Contraction, Form, Homogeneous, Lookup, Mixed, Moved, Parameter, Product, Rotation, Sum
from normscope.symmetry.indices import compressed, padded, partition, reshaped

NONE = -1  # an entry that no bond moves; any other is 2 · value of the index + 1 where A^{-T} acts, + 0 where A does


class Impassable(Exception):
    """The index is seen by something that no matrix passes."""


@dataclass(frozen=True)
class Bond:
    """A closed index, summed over in `start`.

    codes: for every parameter, 2 · coordinate + side of each entry, or NONE. blocks: the coordinates that mix.
    planes: pairs of coordinates that a rotary embedding turns, within which A must commute with the rotation.
    """

    start: Contraction
    codes: dict[str, np.ndarray]
    blocks: tuple[tuple[int, ...], ...]
    planes: tuple[tuple[int, int], ...]


def bonds(forms: Sequence[Form]) -> Iterator[Bond]:
    """Every bond of a graph whose index has blocks of more than one value, once."""
    users: dict[Form, list[Form]] = defaultdict(list)
    for form in forms:
        for operand in dict.fromkeys(form.operands):
            users[operand].append(form)
    known: set[tuple[str, ...]] = set()
    for form in forms:
        if isinstance(form, Contraction) and form.operands[0] is not form.operands[1]:
            try:
                found = _IndexSearch(form, users).bond()
            except Impassable:
                continue
            key = tuple(sorted(f"{name}:{(codes >= 0).tobytes().hex()}" for name, codes in found.codes.items()))
            if key not in known and any(len(block) > 1 for block in found.blocks):
                known.add(key)
                yield found


class _IndexSearch:
    """Follows the index of one contraction; `codes` are those of every form that it reaches."""

    def __init__(self, start: Contraction, users: dict[Form, list[Form]]) -> None:
        self.start, self.users = start, users
        self.codes: dict[Form, np.ndarray] = {}
        self.waiting: list[Form] = []
        self.same: list[np.ndarray] = []  # pairs of codes that must be one
        self.cuts: list[tuple[np.ndarray, np.ndarray]] = []  # (codes, index): values with different indices do not mix
        self.turned: list[np.ndarray] = []
        batched, contracted = sorted(start.batched()), sorted(start.contracted())
        sizes = dict(zip(start.names[0], start.views[0], strict=True))
        shape = [sizes[name] for name in (*batched, *contracted)]
        self.size, self.length = math.prod(shape), math.prod(sizes[name] for name in contracted)
        if not contracted or self.length < 2:
            raise Impassable
        index = 2 * np.arange(self.size).reshape(shape)
        for operand in range(2):
            self._reach(start.operands[operand], _placed(index + operand, (*batched, *contracted), start, operand))
        for name in batched:
            self._cut(index, (*batched, *contracted).index(name))

    def bond(self) -> Bond:
        while self.waiting:
            form = self.waiting.pop()
            codes = self.codes[form]
            self._follow_back(form, codes)
            for user in self.users[form]:
                self._follow(form, user, codes)
        return self._closed()

    # the two directions -----------------------------------------------------------------------------------------------

    def _follow_back(self, form: Form, codes: np.ndarray) -> None:
        """From a form to what it is made of."""
        if isinstance(form, Parameter):
            return
        if isinstance(form, Sum):
            for operand in form.operands:
                self._reach(operand, self._without(codes, operand.shape))
        elif isinstance(form, Moved):
            self._moved_back(form, codes)
        elif isinstance(form, (Product, Contraction)):
            carrier = self._carrier(form, codes)
            back = self._factor(form, carrier, codes) if isinstance(form, Product) else self._summand(form, carrier, codes)
            self._reach(form.operands[carrier], back)
        elif isinstance(form, Mixed):
            self._reach(form.operands[0], reshaped(codes, form.shape, form.kept))
            self._check_unmixed(form, reshaped(codes, form.shape, form.kept))
        elif isinstance(form, Homogeneous) and form.odd_linear:
            self._reach(form.operands[0], codes)
        elif isinstance(form, Rotation):
            self.turned.append(codes)
            self._reach(form.operands[0], codes)
        elif isinstance(form, Lookup):
            self._reach(form.operands[0], padded(self._without(codes, form.operands[0].shape[1:]), 2))
        else:
            raise Impassable

    def _follow(self, form: Form, user: Form, codes: np.ndarray) -> None:
        """From a form to one that reads it."""
        if isinstance(user, Sum):
            self._reach(user, padded(codes, len(user.shape)))
        elif isinstance(user, Moved):
            start = sum(operand.entries for operand in user.operands[: user.operands.index(form)])
            flat = np.full(sum(operand.entries for operand in user.operands) + 1, NONE)
            flat[start : start + form.entries] = np.broadcast_to(codes, form.shape).ravel()
            self._reach(user, compressed(np.where(user.source >= 0, flat[user.source], NONE)))
        elif isinstance(user, Product):
            self._reach(user, padded(codes, len(user.shape)))
        elif isinstance(user, Contraction):
            self._into_contraction(form, user, codes)
        elif isinstance(user, Mixed):
            self._check_unmixed(user, codes)
            self._reach(user, reshaped(codes, user.kept, user.shape))
        elif isinstance(user, Rotation) or (isinstance(user, Homogeneous) and user.odd_linear):
            self._reach(user, codes)
        elif isinstance(user, Lookup):
            if codes.shape[0] > 1:
                raise Impassable
            self._reach(user, padded(codes.reshape(codes.shape[1:]), len(user.shape)))
        else:
            raise Impassable

    def _into_contraction(self, form: Form, user: Contraction, codes: np.ndarray) -> None:
        """Either the index goes on into the result, or it is summed over here too: then the other side moves."""
        if user.operands[0] is user.operands[1]:
            raise Impassable
        operand = user.operands.index(form)
        names, view = user.names[operand], reshaped(codes, form.shape, user.views[operand])
        varying = {name for axis, name in enumerate(names) if view.shape[axis] > 1}
        if varying & user.mixed(operand):
            raise Impassable
        if not varying & user.contracted():
            out = _renamed(view, names, user.out)
            self._reach(user, reshaped(out, user.out_view, user.shape))
            return
        if not varying <= user.contracted() | user.batched():
            raise Impassable
        for axis, name in enumerate(names):
            if name in user.batched():
                self._cut(view, axis)
        order = tuple(name for name in names if name in user.shared())
        other = np.where(view >= 0, view ^ 1, NONE)
        self._reach(user.operands[1 - operand], _placed(_renamed(other, names, order), order, user, 1 - operand))

    # bookkeeping ------------------------------------------------------------------------------------------------------

    def _reach(self, form: Form, codes: np.ndarray) -> None:
        """Note that the index moves these entries of a form."""
        codes = compressed(codes)
        if not (codes >= 0).any():
            return
        if form not in self.codes:
            self.codes[form] = codes
            self.waiting.append(form)
            return
        known, new = np.broadcast_arrays(self.codes[form], codes)
        both = (known >= 0) & (new >= 0)
        self._identify(known[both], new[both])
        joined = compressed(np.where(known >= 0, known, new))
        if ((joined >= 0) != (self.codes[form] >= 0)).any():
            self.codes[form] = joined
            self.waiting.append(form)

    def _identify(self, one: np.ndarray, other: np.ndarray) -> None:
        if ((one ^ other) & 1).any():
            raise Impassable  # the same entry on both sides: only orthogonal matrices would do
        differ = one != other
        if differ.any():
            self.same.append(np.stack([one[differ] // 2, other[differ] // 2]))

    def _cut(self, codes: np.ndarray, axis: int) -> None:
        """Values of the index at different places along an axis do not mix."""
        if codes.shape[axis] > 1:
            places = np.arange(codes.shape[axis]).reshape([-1 if i == axis else 1 for i in range(codes.ndim)])
            self.cuts.append((codes, np.broadcast_to(places, codes.shape)))

    def _without(self, codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Codes of an operand of `shape` that is broadcast: along the axes that it lacks all values are one."""
        own = (1,) * (codes.ndim - len(shape)) + shape
        first = self._merged(codes, [axis for axis, size in enumerate(own) if size == 1])
        return first.reshape(first.shape[codes.ndim - len(shape) :])

    def _merged(self, codes: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        """Codes with all values along some axes made one."""
        first = codes
        for axis in axes:
            first = np.take(first, [0], axis)
        known, new = np.broadcast_arrays(first, codes)
        if ((known >= 0) != (new >= 0)).any():
            raise Impassable
        self._identify(known[known >= 0], new[known >= 0])
        return first

    def _moved_back(self, form: Moved, codes: np.ndarray) -> None:
        source, whole = form.source.ravel(), np.broadcast_to(codes, form.shape).ravel()
        moved = whole >= 0
        if (source[moved] == -2).any():
            raise Impassable
        moved &= source >= 0
        flat = np.full(sum(operand.entries for operand in form.operands), NONE)
        flat[source[moved]] = whole[moved]
        self._identify(flat[source[moved]], whole[moved])
        sizes = np.cumsum([operand.entries for operand in form.operands])[:-1]
        for operand, part in zip(form.operands, np.split(flat, sizes), strict=True):
            self._reach(operand, part.reshape(operand.shape))

    def _check_unmixed(self, form: Mixed, codes: np.ndarray) -> None:
        if not form.linear or any(codes.shape[axis] > 1 for axis in form.axes):
            raise Impassable

    def _carrier(self, form: Product | Contraction, codes: np.ndarray) -> int:
        """Which factor the index comes from."""
        reached = [i for i, operand in enumerate(form.operands) if operand in self.codes]
        if isinstance(form, Product):
            rank = len(form.shape)
            shapes = [(1,) * (rank - len(operand.shape)) + operand.shape for operand in form.operands]
            lacking = [[axis for axis in range(rank) if shape[axis] == 1] for shape in shapes]
        else:
            codes = reshaped(codes, form.shape, form.out_view)
            lacking = [[axis for axis, name in enumerate(form.out) if name not in names] for names in form.names]
        able = [i for i, axes in enumerate(lacking) if not self._tells_apart(codes, axes)]
        if isinstance(form, Product):
            able = [i for i in able if form.powers[i] == 1]
        chosen = [i for i in able if i in reached] or able
        if not chosen or len(reached) > 1:
            raise Impassable
        return chosen[0]

    def _tells_apart(self, codes: np.ndarray, axes: Sequence[int]) -> bool:
        """Whether different values of the index, rather than the same of different batches, lie along some axes."""
        values = np.where(codes >= 0, codes // 2 % self.length, NONE)
        return any((values != np.take(values, [0], axis)).any() for axis in axes)

    def _factor(self, form: Product, carrier: int, codes: np.ndarray) -> np.ndarray:
        rank = len(form.shape)
        for i, operand in enumerate(form.operands):
            shape = (1,) * (rank - len(operand.shape)) + operand.shape
            for axis in range(rank):
                if i != carrier and shape[axis] > 1:
                    self._cut(codes, axis)
        return self._without(codes, form.operands[carrier].shape)

    def _summand(self, form: Contraction, carrier: int, codes: np.ndarray) -> np.ndarray:
        view = reshaped(codes, form.shape, form.out_view)
        for axis, name in enumerate(form.out):
            if name in form.batched():
                self._cut(view, axis)
        view = self._merged(view, [axis for axis, name in enumerate(form.out) if name not in form.names[carrier]])
        return _placed(view, form.out, form, carrier)

    # the result -------------------------------------------------------------------------------------------------------

    def _closed(self) -> Bond:
        coordinate = _classes(self.size, self.same)
        self._cut_parts()
        keys: dict[int, list[set[int]]] = defaultdict(list)
        for codes, places in self.cuts:
            met: dict[int, set[int]] = defaultdict(set)
            used = codes >= 0
            for value, place in set(zip(coordinate[codes[used] // 2].tolist(), places[used].tolist(), strict=True)):
                met[value].add(place)
            for value in np.unique(coordinate).tolist():
                keys[value].append(met.get(value, set()))
        paired = {value for codes in self.turned for value in coordinate[codes[codes >= 0] // 2].tolist()}
        blocks: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for value in np.unique(coordinate).tolist():
            blocks[(*map(frozenset, keys[value]), value in paired)].append(value)
        parameters = {form.name: codes for form, codes in self.codes.items() if isinstance(form, Parameter)}
        named = {
            name: np.where(codes >= 0, 2 * coordinate[np.maximum(codes, 0) // 2] + (codes & 1), NONE)
            for name, codes in parameters.items()
        }
        return Bond(self.start, named, tuple(map(tuple, blocks.values())), self._planes(coordinate))

    def _cut_parts(self) -> None:
        """Values that are put together from several forms, or taken out of one, do not mix with the rest.

        What happens to one part, before or after, need not happen to the others.
        """
        origins: dict[Form, np.ndarray] = {}
        for form, codes in self.codes.items():
            if isinstance(form, Moved) and not all(isinstance(user, Moved) for user in self.users[form]):
                whole = np.broadcast_to(codes, form.shape).ravel()
                pairs = np.unique(np.stack([whole, _origins(form, origins)]), axis=1)
                self.cuts.append((pairs[0], pairs[1]))

    def _planes(self, coordinate: np.ndarray) -> tuple[tuple[int, int], ...]:
        found: set[tuple[int, int]] = set()
        for codes in self.turned:
            if (codes < 0).any() or codes.shape[-1] < 2:
                raise Impassable
            half = codes.shape[-1] // 2
            values = coordinate[codes // 2]
            found |= set(zip(values[..., :half].ravel().tolist(), values[..., half:].ravel().tolist(), strict=True))
        if len({value for plane in found for value in plane}) != 2 * len(found):
            raise Impassable
        return tuple(sorted(found))


def _origins(form: Form, known: dict[Form, np.ndarray]) -> np.ndarray:
    """For every entry the number of the form that it was made in, before it was only moved; −1 for what is fixed."""
    if form not in known:
        own = np.full(form.entries, len(known))
        if isinstance(form, Moved):
            own = np.concatenate([*(_origins(operand, known) for operand in form.operands), [-1]])[np.maximum(form.source, -1)]
        known[form] = own.ravel()
    return known[form]


def _classes(size: int, same: Sequence[np.ndarray]) -> np.ndarray:
    """The values of the index, numbered anew where some are one."""
    pairs = np.concatenate([np.zeros((2, 0), dtype=np.int64), *same], 1)
    return partition((size,), [(pairs, np.arange(pairs.shape[1]))])


def _renamed(array: np.ndarray, names: Sequence[str], target: Sequence[str]) -> np.ndarray:
    """An array with named axes in the order of `target`; axes that it lacks have size 1, and those dropped must."""
    kept = [axis for axis, name in enumerate(names) if name in target]
    order = sorted(kept, key=lambda axis: list(target).index(names[axis]))
    moved = array.transpose([*order, *(axis for axis in range(array.ndim) if axis not in kept)])
    sizes = dict(zip((names[axis] for axis in order), moved.shape, strict=False))
    return moved.reshape([sizes.get(name, 1) for name in target])


def _placed(codes: np.ndarray, names: Sequence[str], form: Contraction, operand: int) -> np.ndarray:
    """Codes with named axes as codes of an operand of a contraction."""
    own = form.names[operand]
    if any(codes.shape[axis] > 1 for axis, name in enumerate(names) if name not in own):
        raise Impassable
    kept = [axis for axis, name in enumerate(names) if name in own]
    trimmed = codes.reshape([codes.shape[axis] for axis in kept])
    return reshaped(_renamed(trimmed, [names[axis] for axis in kept], own), form.views[operand], form.operands[operand].shape)
