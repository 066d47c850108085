"""Groups of matrices that act on an index which is only summed over: the kind `linear`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from normscope.symmetry.families import Member, Paths
from normscope.symmetry.gauges import Bond
from normscope.symmetry.groups import Action, Group, Parameters
from normscope.symmetry.system import System

BALANCED = 1e-15  # the size of a step at which both sides are in balance
MOST_STEPS = 200
RANK = 1e-12  # eigenvalues below this share of the largest are zero


@dataclass(frozen=True)
class Matrices:
    """The Lie algebra of one block: all k × k matrices or, where planes are turned, those that commute: a + b J a plane."""

    size: int
    planes: tuple[tuple[int, int], ...] = ()

    @property
    def dimension(self) -> int:
        return 2 * len(self.planes) if self.planes else self.size**2

    def matrix(self, amounts: torch.Tensor) -> torch.Tensor:
        if not self.planes:
            return amounts.reshape(self.size, self.size)
        first, second = torch.tensor(self.planes).T
        stretch, turn = amounts.reshape(-1, 2).T
        places = torch.cat([first, second, first, second]), torch.cat([first, second, second, first])
        return amounts.new_zeros(self.size, self.size).index_put(places, torch.cat([stretch, stretch, -turn, turn]))

    def balancing(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A and A^{-T} at the least tr A S Aᵀ + tr A^{-T} T A^{-1}, S and T the Gram matrices; the identity if either is zero.

        A starts at the multiple of 1 that makes the traces equal; then Newton's method: A ← exp(H) A with HG + GH = T − S and
        G = S + T, until both sides are in balance, S = T.
        """
        unit = torch.eye(self.size, dtype=first.dtype)
        if not float(first.trace()) * float(second.trace()):
            return unit, unit
        ratio = (second.trace() / first.trace()).sqrt()
        matrix, first, second = ratio.sqrt() * unit, ratio * first, second / ratio
        for _ in range(MOST_STEPS):
            step = self._step(first, second)
            grow, shrink = torch.linalg.matrix_exp(step), torch.linalg.matrix_exp(-step)
            matrix, first, second = grow @ matrix, grow @ first @ grow, shrink @ second @ shrink
            if float(step.abs().max()) <= BALANCED:
                break
        return matrix, torch.linalg.inv(matrix).mT

    def _step(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if self.planes:  # one stretch per plane: H and G commute there
            one, other = (own.diagonal()[torch.tensor(self.planes)].sum(1) for own in (first, second))
            stretch = torch.where(one + other > 0, 0.5 * (other - one) / (one + other), 0.0)
            return self.matrix(torch.stack([stretch, torch.zeros_like(stretch)], 1).reshape(-1))
        sizes, basis = torch.linalg.eigh(first + second)
        sums = sizes[:, None] + sizes
        gap = basis.mT @ (second - first) @ basis
        return basis @ torch.where(sums > RANK * sizes.max(), gap / sums, 0.0) @ basis.mT


@dataclass(frozen=True, eq=False)
class LinearGroup(Group):
    """v → A v on one side of a sum over an index, w → A^{-T} w on the other, with one A a block of the index.

    coordinates: for each action, which coordinate of its block an entry belongs to, −1 for none. algebras: for each block,
    the matrices whose exponentials A may be.
    """

    coordinates: tuple[np.ndarray, ...] = ()
    algebras: tuple[Matrices, ...] = ()

    def transform(self, parameters: Parameters, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        widths = torch.cat([torch.full((algebra.dimension,), algebra.size**0.5) for algebra in self.algebras])
        return self.flowed(parameters, 0.5 * self._normal(parameters, generator) / widths)

    def flowed(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        matrices = list(self._matrices(amounts))
        return self._applied(parameters, [(torch.linalg.matrix_exp(own), torch.linalg.matrix_exp(-own.mT)) for own in matrices])

    def balanced(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """The parameters at their least sum of squares on the orbit of this group; up to rotations there is one such point."""
        grams = [(self._gram(parameters, block, 1.0), self._gram(parameters, block, -1.0)) for block in range(len(self.algebras))]
        return self._applied(parameters, [algebra.balancing(*gram) for algebra, gram in zip(self.algebras, grams, strict=True)])

    def _applied(self, parameters: Parameters, matrices: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """With A and A^{-T} of every block acting on the two sides."""
        moved = dict(parameters)
        for block, (here, there) in enumerate(matrices):
            for action, coordinates in zip(self.actions, self.coordinates, strict=True):
                side = here if action.degree > 0 else there
                moved[action.parameter] = _acted(moved[action.parameter], action, coordinates, block, side)
        return moved

    def _gram(self, parameters: Parameters, block: int, degree: float) -> torch.Tensor:
        """Σ v vᵀ over the vectors v of a block on one side."""
        size = self.algebras[block].size
        total = torch.zeros(size, size, dtype=torch.float64)
        for action, coordinates in zip(self.actions, self.coordinates, strict=True):
            if action.degree == degree:
                rows = _rows(parameters[action.parameter].detach().double(), action)
                for places in _copies(action, coordinates, block):
                    total += rows[places] @ rows[places].mT
        return total

    def tangent(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for block, matrix in enumerate(self._matrices(amounts)):
            sides = {1.0: matrix, -1.0: -matrix.mT}
            for action, coordinates in zip(self.actions, self.coordinates, strict=True):
                value = parameters[action.parameter].detach()
                moved = _acted(value, action, coordinates, block, sides[action.degree], tangent=True)
                found[action.parameter] = found.get(action.parameter, 0) + moved
        return found

    def _matrices(self, amounts: torch.Tensor) -> Iterator[torch.Tensor]:
        """One matrix a block."""
        parts = amounts.split([algebra.dimension for algebra in self.algebras])
        return (algebra.matrix(part) for algebra, part in zip(self.algebras, parts, strict=True))

    def contains(self, member: Member, leaves: Mapping[str, Sequence[np.ndarray]]) -> bool:
        """Whether a scaling is one of this group's diagonal matrices, up to entries that are left alone (unknown 0)."""
        speeds: dict[tuple[int, int], float] = {}
        moved = 0
        for (name, number, degree), places in member.items():
            for action, coordinates in self._acting_on(name, leaves[name][number].shape):
                own = places[action.members.flat[places] >= 0]
                moved += len(own)
                for value in zip(action.members.flat[own].tolist(), coordinates.flat[own].tolist(), strict=True):
                    if speeds.setdefault(value, degree * action.degree) != degree * action.degree:
                        return False
        if moved != sum(map(len, member.values())):
            return False
        return moved == sum(
            int(((action.members == block) & (coordinates == coordinate) & _free(leaves[action.parameter], action)).sum())
            for block, coordinate in speeds
            for action, coordinates in zip(self.actions, self.coordinates, strict=True)
        )

    def _acting_on(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Action, np.ndarray]]:
        for action, coordinates in zip(self.actions, self.coordinates, strict=True):
            if action.parameter == name and action.members.shape == shape:
                yield action, coordinates


def without_diagonals(
    members: Iterable[Member], groups: Iterable[LinearGroup], leaves: Mapping[str, Sequence[np.ndarray]]
) -> list[Member]:
    """The scalings that are not diagonal matrices of some group."""
    acting: dict[str, list[LinearGroup]] = defaultdict(list)
    for group in groups:
        for name in dict.fromkeys(group.parameters):
            acting[name].append(group)
    return [member for member in members if not any(group.contains(member, leaves) for group in acting[next(iter(member))[0]])]


def _free(arrays: Sequence[np.ndarray], action: Action) -> np.ndarray:
    """Where a parameter has unknowns of its own."""
    return next((ids != System.ZERO for ids in arrays if ids.shape == action.members.shape), np.ones((), dtype=bool))


def _acted(
    value: torch.Tensor, action: Action, coordinates: np.ndarray, block: int, matrix: torch.Tensor, tangent: bool = False
) -> torch.Tensor:
    """A parameter with a matrix acting on the entries of one block; tangent: only those entries, zero elsewhere."""
    order = _order(value, action)
    rows = _rows(value, action)
    result = torch.zeros_like(rows) if tangent else rows
    for places in _copies(action, coordinates, block):
        result = result.index_copy(0, places, matrix @ rows[places])  # not in place: `Group.directions` maps over matrices
    back = [order.index(axis) for axis in range(value.dim())]
    return result.reshape([value.shape[axis] for axis in order]).permute(back)


def _order(value: torch.Tensor, action: Action) -> list[int]:
    """The axes of a parameter, those along which members differ first."""
    return sorted(range(value.dim()), key=lambda axis: axis not in action.axes)


def _rows(value: torch.Tensor, action: Action) -> torch.Tensor:
    """A parameter as a matrix with a row for each entry of the members."""
    return value.permute(_order(value, action)).reshape(action.members.size, -1)


def _copies(action: Action, coordinates: np.ndarray, block: int) -> Iterator[torch.Tensor]:
    """The places of a block's coordinates, in order; several times where a parameter holds several such vectors."""
    own = np.flatnonzero(action.members.ravel() == block)
    if not len(own):
        return
    values = coordinates.ravel()[own]
    size = int(values.max()) + 1
    ordered = own[np.lexsort((own, values))].reshape(size, -1)  # (coordinate, copy)
    for places in ordered.T:
        yield torch.from_numpy(places.copy())


def linear_group(bond: Bond, shapes: Mapping[str, tuple[int, ...]], paths: Paths) -> LinearGroup:
    """The group of a bond."""
    block_of = {value: number for number, block in enumerate(bond.blocks) for value in block}
    place_in = {value: place for block in bond.blocks for place, value in enumerate(block)}
    blocks, places = (np.array([table[value] for value in range(len(table))]) for table in (block_of, place_in))
    actions, coordinates = [], []
    names = sorted(bond.codes, key=list(shapes).index)
    first = bond.codes[names[0]]
    front = int(first[first >= 0].min() % 2)  # the side of the first parameter
    for name in names:
        codes = bond.codes[name]
        for side, degree in ((front, 1.0), (1 - front, -1.0)):
            own = (codes >= 0) & (codes % 2 == side)
            if own.any():
                values = np.maximum(codes, 0) // 2
                actions.append(Action(name, shapes[name], np.where(own, blocks[values], -1), degree))
                coordinates.append(np.where(own, places[values], -1))
    algebras = tuple(_algebra(block, bond.planes) for block in bond.blocks)
    count = sum(algebra.dimension for algebra in algebras)
    path = paths.between(names[0], bond.start)
    return LinearGroup("linear", tuple(actions), count, path=path, coordinates=tuple(coordinates), algebras=algebras)


def _algebra(block: Sequence[int], planes: Sequence[tuple[int, int]]) -> Matrices:
    place = {value: i for i, value in enumerate(block)}
    return Matrices(len(block), tuple((place[a], place[b]) for a, b in planes if a in place))
