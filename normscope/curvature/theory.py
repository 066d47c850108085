"""What the theory says about second derivatives along symmetries, as checks on a given model.

If L(exp(tX)θ) = L(θ) for all t then ⟨∇L, Xθ⟩ = 0 and H Xθ = −Xᵀ∇L. For a scale-free weight w this is H w = −∇_w L: the Hessian is
zero along w at a critical point (what holds of the structure at a BN equilibrium in Akbar's A.1.2), and elsewhere it is not. A
shift has H d = 0 everywhere. The Gauss-Newton matrix is zero along every orbit at every point, because no output changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normscope.core.errors import InputError
from normscope.curvature.matrices import CurvatureMatrix, GaussNewton, Hessian
from normscope.curvature.quotient import QuotientHessian, named_point, symmetries_of
from normscope.curvature.spectrum import Curvature
from normscope.geometry.groups import SCALES, SHIFTS, self_contained

ZERO = 1e-9  # eigenvalues below this share of the largest are zero


@dataclass(frozen=True)
class ZeroModes:
    """named: independent directions of the symmetries. null: zero eigenvalues of a matrix M.

    residual: the largest ‖M d‖/‖M‖ over unit directions d of the symmetries.
    """

    named: int
    null: int
    residual: float


@dataclass(frozen=True)
class Equilibrium:
    """‖∇L‖ at a point, and the zero modes of the Hessian there."""

    gradient_norm: float
    modes: ZeroModes


@dataclass(frozen=True)
class Identity:
    """H d = −Xᵀ∇L for the sum d of a group's tangents: ‖H d + Xᵀ∇L‖ / (‖H d‖ + ‖Xᵀ∇L‖), zero but for ε and rounding."""

    kind: str
    parameters: tuple[str, ...]
    defect: float


def zero_modes(curvature: Curvature, symmetries: Any = None) -> ZeroModes:
    """Count the zero eigenvalues of the Gauss-Newton matrix against the symmetries; for small models.

    The residual is zero but for ε and rounding at every point. null exceeds named where the data do not see every direction.
    """
    objective = _plain(curvature).objective
    return _modes(GaussNewton(objective, curvature.matrix.memory), symmetries)


def equilibrium(curvature: Curvature, symmetries: Any = None) -> Equilibrium:
    """Count the zero eigenvalues of the Hessian against the symmetries; for small models.

    At a critical point H is zero along every symmetry, such as w and the bias before BN. Where ∇L is not zero, neither is the
    residual: H w = −∇L.
    """
    objective = _plain(curvature).objective
    return Equilibrium(float(objective.gradient().norm()), _modes(Hessian(objective, curvature.matrix.memory), symmetries))


def _modes(matrix: CurvatureMatrix, symmetries: Any) -> ZeroModes:
    objective = matrix.objective
    tangents = QuotientHessian(matrix, symmetries or symmetries_of(objective)).vertical
    if tangents is None:
        raise InputError(f"counting zero modes is for small models, not {objective.size} parameters: try a smaller one of its kind")
    values = torch.linalg.eigvalsh(Curvature(objective, matrix).dense().double()).abs()
    largest = float(values.max())
    images = [float(matrix.product(direction.to(matrix.vector_dtype)).norm()) for direction in tangents]
    return ZeroModes(len(tangents), int((values <= ZERO * largest).sum()), max(images, default=0.0) / (largest or 1.0))


def scale_identities(curvature: Curvature, symmetries: Any = None) -> list[Identity]:
    """H w = −∇L for every group that only scales (degree by degree), H d = 0 for every shift of a single parameter."""
    objective = _plain(curvature).objective
    layout, point = objective.layout, named_point(objective)
    matrix = Hessian(objective, curvature.matrix.memory)
    gradient = layout.unflatten(objective.gradient().double())
    found = []
    for group in (symmetries or symmetries_of(objective)).groups:
        scales = group.kind in SCALES and self_contained(group, point)  # a bias that follows makes X depend on the point
        if not scales and not (group.kind in SHIFTS and len(group.parameters) == 1):
            continue
        ones = torch.ones(group.count, dtype=torch.float64)
        image = matrix.product(layout.flatten(group.tangent(point, ones)).to(matrix.vector_dtype))
        turned = torch.zeros_like(image)
        if group.kind in SCALES:  # X is diagonal, so that Xᵀ∇L is what the group does to ∇L
            turned = layout.flatten(group.tangent(gradient, ones)).to(image)
        scale = float(image.norm() + turned.norm())
        if group.kind in SHIFTS:
            scale = float(objective.gradient().norm())
        found.append(Identity(group.kind, group.parameters, float((image + turned).norm()) / (scale or 1.0)))
    return found


def _plain(curvature: Curvature) -> Curvature:
    if curvature.symmetries is not None:
        raise InputError("these checks are about the plain matrix: use quotient=False")
    return curvature
