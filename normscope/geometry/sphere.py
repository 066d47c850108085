"""Products of spheres in any set of axes, with the metric that scale-free weights see.

A weight whose scale does not matter lives on rays, and g_y(u, v) = ⟨u, v⟩/‖y‖² is the metric on them that a change of scale
leaves alone (Akbar, section on Riemannian geometry). Its distances are angles. Every map below keeps the norm of its point, so it
is the map of a sphere of that radius, for every vector at once. A zero vector lies on no sphere: there the maps are those of flat
space, so that nothing divides by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from normscope.core.errors import InputError
from normscope.geometry.vectors import Vectors

Point = TypeVar("Point", torch.Tensor, tuple[torch.Tensor, ...])  # one tensor, or several that share their vectors


def inner(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """⟨x, y⟩ of every row, (…, 1)."""
    return torch.linalg.vecdot(first, second).unsqueeze(-1)


def norm(rows: torch.Tensor) -> torch.Tensor:
    """‖x‖ of every row, (…, 1), without overflow or underflow of squares; infinite where an entry is."""
    largest = _nonzero(rows.abs().amax(-1, keepdim=True)) if rows.shape[-1] else rows.new_ones(*rows.shape[:-1], 1)
    largest = torch.where(largest.isinf(), 1.0, largest)
    return torch.linalg.vector_norm(rows / largest, dim=-1, keepdim=True) * largest


def project(point: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """u − ⟨ŷ, u⟩ŷ: the tangent part of u at y, for rows. Twice, so that what remains along y is of the size of rounding."""
    unit = point / _nonzero(norm(point))
    for _ in range(2):
        vector = vector - inner(unit, vector) * unit
    return vector


def exponential(point: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """exp_y(u) = cos θ y + (sin θ/θ) u with θ = ‖u‖/‖y‖, for rows: the end of the geodesic that leaves y with velocity u."""
    radius = norm(point)
    angle = norm(tangent) / _nonzero(radius)
    moved = angle.cos() * point + torch.sinc(angle / math.pi) * tangent
    return torch.where(radius > 0, _rescaled(moved, radius), tangent)


def retract(point: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """‖y‖ (y + u)/‖y + u‖, for rows: equal to the exponential map up to third order."""
    radius = norm(point)
    return torch.where(radius > 0, _rescaled(point + tangent, radius), tangent)


def transport(point: torch.Tensor, tangent: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """v − ⟨û, v⟩((1 − cos θ)û + sin θ ŷ), for rows: parallel along the geodesic that leaves y with velocity u."""
    radius, length = norm(point), norm(tangent)
    angle = length / _nonzero(radius)
    direction, unit = tangent / _nonzero(length), point / _nonzero(radius)
    along = inner(direction, vector)
    versine = 2 * (angle / 2).sin().square()  # 1 − cos θ without cancellation
    return torch.where(radius > 0, vector - along * (versine * direction + angle.sin() * unit), vector)


def distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The angle between rows, (…, 1): their distance in the metric g, accurate for the smallest and largest angles (Kahan)."""
    unit, other = (rows / _nonzero(norm(rows)) for rows in (first, second))
    return 2 * torch.atan2(norm(unit - other), norm(unit + other))


def logarithm(point: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The tangent at y whose exponential is the ray of `other`, for rows.

    Opposite rays are joined by many shortest paths; the one along the coordinate where y is smallest is taken.
    """
    radius = norm(point)
    unit, target = (rows / _nonzero(norm(rows)) for rows in (point, other))
    toward = project(unit, target - unit)
    resolution = 8 * torch.finfo(point.dtype).eps
    opposite = (norm(toward) <= resolution) & (inner(unit, target) < 0)
    smallest = torch.zeros_like(unit).scatter_(-1, unit.abs().argmin(-1, keepdim=True), 1)
    toward = torch.where(opposite, project(unit, smallest), toward)
    tangent = distance(point, other) * radius * toward / _nonzero(norm(toward))
    return torch.where(radius > 0, tangent, other)


def metric(point: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """g_y(u, v) = ⟨u, v⟩/⟨y, y⟩ of every row, (…, 1); at y = 0 the flat ⟨u, v⟩."""
    radius = _nonzero(norm(point))
    return inner(first / radius, second / radius)


def _nonzero(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, torch.ones_like(values), values)


def _rescaled(rows: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return rows * (radius / _nonzero(norm(rows)))


@dataclass(frozen=True)
class Spheres:
    """A product of spheres: the vectors of a tensor that differ along `axes`, `block` indices at a time.

    >>> kernel = torch.ones(4, 3, 5, 5)
    >>> Spheres(axes=(0,)).distance(kernel, 2 * kernel)  # one sphere per output channel; a scale is no distance
    tensor([0., 0., 0., 0.])

    A point may also be a tuple of tensors that share their vectors; then axes and block are tuples with one entry for each.
    """

    axes: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    block: int | tuple[int, ...] = 1

    def norm(self, point: Point) -> torch.Tensor:
        """‖y‖ of every vector, (count,)."""
        return self._values(norm, point)

    def metric(self, point: Point, first: Point, second: Point) -> torch.Tensor:
        """g_y(u, v) of every vector, (count,)."""
        return self._values(metric, point, first, second)

    def distance(self, first: Point, second: Point) -> torch.Tensor:
        """The angle between corresponding vectors, (count,)."""
        return self._values(distance, first, second)

    def project(self, point: Point, vector: Point) -> Point:
        """The tangent part of a vector."""
        return self._points(project, point, vector)

    def exponential(self, point: Point, tangent: Point) -> Point:
        """The end of the geodesic that leaves the point with this velocity, at time 1."""
        return self._points(exponential, point, tangent)

    def retract(self, point: Point, tangent: Point) -> Point:
        """The sum, scaled back to the norms of the point."""
        return self._points(retract, point, tangent)

    def transport(self, point: Point, tangent: Point, vector: Point) -> Point:
        """Parallel transport of `vector` along the geodesic that leaves the point with velocity `tangent`."""
        return self._points(transport, point, tangent, vector)

    def logarithm(self, point: Point, other: Point) -> Point:
        """The velocity of the shortest geodesic from the point to the ray of the other."""
        return self._points(logarithm, point, other)

    def vectors(self, point: torch.Tensor | Sequence[torch.Tensor]) -> Vectors:
        """How the entries of this point form vectors."""
        if isinstance(point, torch.Tensor):
            return Vectors.of((point,), (self.axes,), (self.block,))  # type: ignore[arg-type]
        blocks = (self.block,) * len(point) if isinstance(self.block, int) else self.block
        if len(self.axes) != len(point) or any(isinstance(axes, int) for axes in self.axes):
            raise InputError(f"{len(point)} tensors need as many tuples of axes, got {self.axes}")
        return Vectors.of(point, self.axes, blocks)  # type: ignore[arg-type]

    def _values(self, function: Callable[..., torch.Tensor], *points: Point) -> torch.Tensor:
        return function(*_gathered(self.vectors(points[0]), points)).squeeze(-1)

    def _points(self, function: Callable[..., torch.Tensor], point: Point, *others: Point) -> Point:
        vectors = self.vectors(point)
        tensors = vectors.scatter(function(*_gathered(vectors, (point, *others))))
        return tensors[0] if isinstance(point, torch.Tensor) else tensors


def _gathered(vectors: Vectors, points: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [vectors.gather((point,) if isinstance(point, torch.Tensor) else point) for point in points]
