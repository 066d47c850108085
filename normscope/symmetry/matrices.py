"""Groups of matrices that act on an index which is only summed over: the kind `linear`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from normscope.symmetry.families import Member, Paths
from normscope.symmetry.gauges import Bond
from normscope.symmetry.groups import Action, Group, Parameters
from normscope.symmetry.system import System


@dataclass(frozen=True, eq=False)
class LinearGroup(Group):
    """v → A v on one side of a sum over an index, w → A^{-T} w on the other, with one A a block of the index.

    coordinates: for each action, which coordinate of its block an entry belongs to, −1 for none. generators: for each
    block, (dimension, k, k): a basis of the matrices whose exponentials A may be.
    """

    coordinates: tuple[np.ndarray, ...] = ()
    generators: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    def transform(self, parameters: Parameters, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        moved = dict(parameters)
        for block, matrix in enumerate(self._matrices(0.5 * self._normal(parameters, generator))):
            matrix = matrix / len(matrix) ** 0.5
            sides = {1.0: torch.linalg.matrix_exp(matrix), -1.0: torch.linalg.matrix_exp(-matrix.mT)}
            for action, coordinates in zip(self.actions, self.coordinates, strict=True):
                moved[action.parameter] = _acted(moved[action.parameter], action, coordinates, block, sides[action.degree])
        return moved

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
        """One matrix a block, from the amounts of its generators."""
        for basis, chosen in zip(self.generators, amounts.split([len(basis) for basis in self.generators]), strict=True):
            yield torch.tensordot(chosen, basis.to(chosen), 1)

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


def _free(arrays: Sequence[np.ndarray], action: Action) -> np.ndarray:
    """Where a parameter has unknowns of its own."""
    return next((ids != System.ZERO for ids in arrays if ids.shape == action.members.shape), np.ones((), dtype=bool))


def _acted(
    value: torch.Tensor, action: Action, coordinates: np.ndarray, block: int, matrix: torch.Tensor, tangent: bool = False
) -> torch.Tensor:
    """A parameter with a matrix acting on the entries of one block; tangent: only those entries, zero elsewhere."""
    axes = action.axes
    order = [*axes, *(axis for axis in range(value.dim()) if axis not in axes)]
    rows = value.permute(order).reshape(action.members.size, -1)
    result = torch.zeros_like(rows) if tangent else rows.clone()
    for places in _copies(action, coordinates, block):
        result[places] = matrix @ rows[places]
    back = [order.index(axis) for axis in range(value.dim())]
    return result.reshape([value.shape[axis] for axis in order]).permute(back)


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
    generators = tuple(_generators(block, bond.planes) for block in bond.blocks)
    count = sum(map(len, generators))
    path = paths.between(names[0], bond.start)
    return LinearGroup("linear", tuple(actions), count, path=path, coordinates=tuple(coordinates), generators=generators)


def _generators(block: Sequence[int], planes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """All k × k matrices; within turned planes those that commute with rotations, a + b J."""
    place = {value: i for i, value in enumerate(block)}
    size = len(block)
    own = [(place[a], place[b]) for a, b in planes if a in place]
    if not own:
        return torch.eye(size * size, dtype=torch.float64).reshape(-1, size, size)
    basis = torch.zeros(2 * len(own), size, size, dtype=torch.float64)
    for i, (a, b) in enumerate(own):
        basis[2 * i, a, a] = basis[2 * i, b, b] = 1
        basis[2 * i + 1, a, b], basis[2 * i + 1, b, a] = -1, 1
    return basis
