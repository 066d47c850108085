"""Curvature up to symmetry: the matrix at the canonical representative of the orbit, on the directions that change the function.

Along an orbit of the model's symmetries the loss is constant, yet the plain Hessian depends on where on the orbit one stands: with
every scale-free weight c times as large it is c² times as small. Here scale groups have unit norm, rescaled layers are in balance,
shifts are at zero, and H becomes P H P with P the orthogonal projection onto what no symmetry moves.
"""

from __future__ import annotations

from typing import Any

import torch

from normscope.core.errors import InputError
from normscope.curvature.objective import Objective
from normscope.curvature.products import Matrix


class Quotient:
    """P H P at one point of an orbit, with P v = v − Dᵀ(DDᵀ)⁺D v and D the tangents of the orbits."""

    def __init__(self, matrix: Matrix, symmetries: Any) -> None:
        self.matrix, self.symmetries = matrix, symmetries
        self.size = matrix.size
        self.parameters = named_point(matrix.objective)

    def product(self, vector: torch.Tensor) -> torch.Tensor:
        return self.project(self.matrix.product(self.project(vector)))

    def project(self, vector: torch.Tensor) -> torch.Tensor:
        from normscope.geometry.quotient import horizontal

        layout = self.matrix.objective.layout
        return layout.flatten(horizontal(self.symmetries, self.parameters, layout.unflatten(vector))).to(vector)

    def normal(self, generator: torch.Generator) -> torch.Tensor:
        return self.project(self.matrix.normal(generator))

    def signs(self, generator: torch.Generator) -> torch.Tensor:
        return self.project(self.matrix.signs(generator))


def named_point(objective: Objective) -> dict[str, torch.Tensor]:
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


def canonical_objective(objective: Objective, symmetries: Any) -> Objective:
    """The same objective at the representative of its orbit."""
    from normscope.geometry.quotient import canonical

    return objective.at(objective.layout.flatten(canonical(symmetries, named_point(objective))))
