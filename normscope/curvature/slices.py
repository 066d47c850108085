"""The loss on lines and planes through a point: along given, random, gradient or eigenvector directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
import torch

from normscope.core.errors import InputError
from normscope.curvature.matrices import matrix_of
from normscope.curvature.objective import Objective
from normscope.curvature.quotient import named_point, symmetries_of
from normscope.curvature.spectrum import Curvature

KINDS = ("random", "gradient", "top")

Direction = Union[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Slice:
    """losses[i] = L(θ + xᵢ d), or losses[i, j] = L(θ + xᵢ d₁ + xⱼ d₂), x the offsets."""

    names: tuple[str, ...]
    offsets: np.ndarray
    losses: np.ndarray
    vectors: tuple[torch.Tensor, ...] = field(default=(), repr=False)  # d, or d₁ and d₂
    objective: Objective | None = field(default=None, repr=False)

    def coordinates(self, points: Iterable[Mapping[str, torch.Tensor]]) -> np.ndarray:
        """(points, directions): the place of each point, a state_dict of the model, projected onto the line or the plane."""
        if self.objective is None:
            raise InputError("this slice has lost its objective, so that no point can be placed on it")
        layout, origin = self.objective.layout, self.objective.point.double()
        basis = torch.stack([vector.double() for vector in self.vectors], 1)  # (parameters, directions)
        moved = []
        for point in points:
            missing = [name for name in layout.shapes if name not in point]
            if missing:
                raise InputError(f"a point of the trajectory has no {missing[0]}: give copies of the model's state_dict()")
            moved.append(layout.flatten({name: point[name] for name in layout.shapes}).to(origin) - origin)
        return torch.linalg.lstsq(basis, torch.stack(moved, 1)).solution.T.cpu().numpy()

    def figure(self, trajectory: Iterable[Mapping[str, torch.Tensor]] = ()) -> Any:
        """A line, or contours of a plane with the path of a training, given as copies of the model's state_dict()."""
        from normscope.report.curvature import loss_slice

        points = list(trajectory)
        return loss_slice(self, self.coordinates(points) if points else None)


def slice_of(
    objective: Objective,
    *directions: Direction,
    radius: float = 1.0,
    points: int = 21,
    spheres: bool = False,
    generator: torch.Generator | None = None,
) -> Slice:
    """The loss on a line (one direction) or a plane (two) through the objective's point, offsets from −radius to radius.

    A direction is "random" (normal, every filter of the norm that the weight's has, Li et al. 2018; vectors such as biases and
    normalizers' parameters held), "gradient" (of unit length), "top" (unit eigenvectors of the largest eigenvalues, the second time
    the second), or a tensor per parameter. spheres: weights that are scale-free move on their spheres, of the norm that they have.
    """
    if not 1 <= len(directions) <= 2 or points < 2 or not radius > 0:
        raise InputError(
            f"a slice needs 1 or 2 directions, 2 points or more and a radius above 0, got {len(directions)}, {points}, {radius}"
        )
    vectors = _vectors(objective, directions, generator or torch.Generator().manual_seed(0))
    offsets = np.linspace(-radius, radius, points)
    symmetries = symmetries_of(objective) if spheres else None
    grid = np.stack(np.meshgrid(*[offsets] * len(vectors), indexing="ij"), -1).reshape(-1, len(vectors))
    losses = []
    for place in grid:
        moved = objective.point + sum(float(x) * vector for x, vector in zip(place, vectors, strict=True))
        losses.append(objective.value(_on_spheres(objective, moved, symmetries) if spheres else moved))
    names = tuple(direction if isinstance(direction, str) else "a given direction" for direction in directions)
    return Slice(names, offsets, np.array(losses).reshape([points] * len(vectors)), tuple(vectors), objective)


def _vectors(objective: Objective, directions: tuple[Direction, ...], generator: torch.Generator) -> list[torch.Tensor]:
    wrong = [direction for direction in directions if isinstance(direction, str) and direction not in KINDS]
    if wrong:
        raise InputError(f"a direction must be one of {', '.join(KINDS)} or a tensor per parameter, got {wrong[0]!r}")
    tops = sum(direction == "top" for direction in directions)
    eigenvectors = iter(Curvature(objective, matrix_of("hessian", objective)).top(tops) if tops else [])
    found = []
    for direction in directions:
        if isinstance(direction, Mapping):
            vector = objective.layout.flatten(direction)
        elif direction == "random":
            vector = _filter_normalized(objective, generator)
        elif direction == "top":
            vector = objective.layout.flatten(next(eigenvectors).vector)
        else:
            vector = objective.gradient()
            vector = vector / vector.norm().clamp(min=1e-300)
        found.append(vector.to(objective.point))
    return found


def _filter_normalized(objective: Objective, generator: torch.Generator) -> torch.Tensor:
    parts = {}
    for name, value in named_point(objective).items():
        draw = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        if value.dim() > 1:
            rows, wanted = draw.flatten(1), value.flatten(1).norm(dim=1, keepdim=True)
            parts[name] = (rows * wanted / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)).reshape(value.shape)
        else:
            parts[name] = torch.zeros_like(value)
    return objective.layout.flatten(parts)


def _on_spheres(objective: Objective, moved: torch.Tensor, symmetries: Any) -> torch.Tensor:
    """Every scale-free vector brought back to the norm that it has at the objective's point."""
    from normscope.geometry.groups import by_member, members, spread

    start, values = named_point(objective), objective.layout.unflatten(moved.double())
    for group in symmetries.groups:
        if group.kind not in ("scale", "joint-scale") or set(group.degrees) != {1.0}:
            continue
        own = list(zip(group.parameters, members(group, start), strict=True))
        before, after = (
            torch.stack([by_member(numbers, tensors[name].square(), group.count) for name, numbers in own]).sum(0)
            for tensors in (start, values)
        )
        factors = torch.where(after > 0, before / after, 1.0).sqrt()
        for name, numbers in own:
            values[name] = values[name] * spread(numbers, factors, elsewhere=1.0)
    return objective.layout.flatten(values)
