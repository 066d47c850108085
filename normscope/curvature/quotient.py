"""Curvature up to symmetry: the matrix at the canonical representative of the orbit, on the directions that change the function.

Along an orbit of the model's symmetries the loss is constant, yet the plain Hessian depends on where on the orbit one stands: with
every scale-free weight c times as large it is c² times as small. Here scale groups have unit norm, rescaled layers are in balance,
shifts are at zero, and H becomes P H P with P the orthogonal projection onto what no symmetry moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from normscope.core.errors import InputError
from normscope.curvature.matrices import CurvatureMatrix
from normscope.curvature.objective import Objective
from normscope.symmetry.indices import components

Named = dict[str, torch.Tensor]

LARGEST_TANGENTS = 2**24  # entries of a matrix of tangents that is held and factorized
RANK = 1e-10  # singular values below this share of the largest are zero
BALANCED = 1e-12  # relative change of a vector at which balancing ends
MOST_SWEEPS = 200


class QuotientHessian:
    """P H P at one point of an orbit, with P v = v − Dᵀ(DDᵀ)⁺D v and D the tangents of the orbits."""

    def __init__(self, matrix: CurvatureMatrix, symmetries: Any) -> None:
        self.matrix, self.symmetries = matrix, symmetries
        self.size = matrix.size
        self.point = named_point(matrix.objective)

    def product(self, vector: torch.Tensor) -> torch.Tensor:
        return self.project(self.matrix.product(self.project(vector)))

    def normal(self, generator: torch.Generator) -> torch.Tensor:
        return self.project(self.matrix.normal(generator))

    def signs(self, generator: torch.Generator) -> torch.Tensor:
        return self.project(self.matrix.signs(generator))

    def project(self, vector: torch.Tensor) -> torch.Tensor:
        if self.vertical is not None:
            rows = self.vertical.to(vector)
            return vector - (rows @ vector) @ rows
        from normscope.geometry.quotient import horizontal

        layout = self.matrix.objective.layout
        return layout.flatten(horizontal(self.symmetries, self.point, layout.unflatten(vector))).to(vector)

    @cached_property
    def vertical(self) -> torch.Tensor | None:
        """An orthonormal basis of the orbits' tangents, where it is small enough to be held."""
        if sum(group.count for group in self.symmetries.groups) * self.size > LARGEST_TANGENTS:
            return None
        layout = self.matrix.objective.layout
        rows = [layout.flatten(tangent) for group in self.symmetries.groups for tangent in _tangents(group, self.point)]
        return orthonormal_basis(torch.stack(rows) if rows else torch.zeros(0, self.size, dtype=torch.float64))


def orthonormal_basis(rows: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the span of the rows, (rank, columns).

    By singular values of the rows at unit length, one block at a time: symmetries of different layers move different entries.
    """
    if not len(rows):
        return rows
    lengths = rows.norm(dim=1, keepdim=True)
    units = rows / torch.where(lengths > 0, lengths, 1.0)
    values, basis = torch.zeros(len(units)).to(units), torch.zeros_like(units)
    for own, columns in _diagonal_blocks(units):
        _, found, directions = torch.linalg.svd(units[own[:, None], columns], full_matrices=False)
        places = own[: len(found)]
        values[places], basis[places[:, None], columns] = found, directions
    return basis[values > RANK * values.max()]


def _diagonal_blocks(matrix: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows and the columns of each block of a matrix that is block diagonal but for the order of its rows and columns."""
    count, size = matrix.shape
    row, column = matrix.nonzero().T
    labels = torch.from_numpy(components(torch.stack([row, count + column]).numpy(), count + size))
    for label in labels[:count].unique():
        yield (labels[:count] == label).nonzero()[:, 0], (labels[count:] == label).nonzero()[:, 0]


def named_point(objective: Objective) -> Named:
    """The point of an objective by name, in float64."""
    return objective.layout.unflatten(objective.point.double())


def symmetries_of(objective: Objective) -> Any:
    """The groups of the model in the objective's mode, found on its first batch; all parameters must have been chosen."""
    from normscope.symmetry.detect import symmetries

    absent = [name for name, _ in objective.model.named_parameters() if name not in objective.layout.shapes]
    if absent:
        raise InputError(f"the quotient needs all parameters, and {absent[0]} is left out: drop parameters=, or quotient=False")
    call = next(iter(objective.batches)).call
    return symmetries(objective.model, call.kwargs or call.args, mode=objective.mode)


def representative(objective: Objective, symmetries: Any) -> Objective:
    """The same objective at the canonical point of its orbit; `linear` groups, too, at their least sum of squares."""
    from normscope.geometry.quotient import canonical

    point = canonical(symmetries, named_point(objective))
    linear = [group for group in symmetries.groups if group.kind == "linear"]

    def balanced(before: Named) -> Named:
        for group in linear:
            before = group.balanced(before)
        return canonical(symmetries, before)

    if linear:
        point = _settled(balanced, point)
    return objective.at(objective.layout.flatten(point))


def _settled(step: Callable[[Named], Named], point: Named) -> Named:
    """Repeat a step until it changes nothing."""
    for _ in range(MOST_SWEEPS):
        before, point = point, step(point)
        change = sum(float((point[name] - before[name]).square().sum()) for name in point)
        if change <= BALANCED**2 * sum(float(part.square().sum()) for part in before.values()):
            break
    return point


def _tangents(group: Any, point: Named) -> list[Named]:
    return [group.tangent(point, unit) for unit in torch.eye(group.count, dtype=torch.float64)]
