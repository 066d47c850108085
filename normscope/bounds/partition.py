"""Cells of the input space that do not depend on the training sample: each lies in a ball, all else is one remainder.

A bound that sums over cells needs of a cell only a convex set around it on which the loss is Lipschitz. So a cell is

    X_i = {x : index(x) = i and ‖x − c_i‖ ≤ r_i}

for any map `index` to 0 … count − 1 that was fixed before the training sample was looked at. What no ball holds is the remainder:
no assumption on the support of P is needed, and a poor choice of cells costs tightness, never validity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Union

import numpy as np
import torch

from normscope.bounds.table import NotApplicable
from normscope.core.errors import InputError
from normscope.core.region import Ball, Box, Region
from normscope.core.rounding import euclidean_norm, exponent_of, times_power_of_two

PAIRS = (10, 100, 1_000, 10_000)  # how many cell–label pairs are tried where only a kind of partition is named
COVERAGE = 0.95  # the share of held-out points that radii are chosen to hold
BLOCK = 2**24  # entries of a matrix of distances at a time
ROOM = 1e-9  # relative: so that rounding leaves no point of a cell to the remainder; any radius is valid
ROWS = 1024  # points whose distances are taken in float64 at a time

Index = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells 0 … count − 1, each in a ball; `count` itself stands for the remainder."""

    kind: str
    centers: torch.Tensor  # (count, d)
    radii: torch.Tensor  # (count,), float64
    index: Index

    @property
    def count(self) -> int:
        return len(self.centers)

    @property
    def name(self) -> str:
        return f"{self.kind} of {self.count:,} cell{'s' if self.count > 1 else ''}"

    def locate(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cell of every point (samples, d), and its distance from that cell's centre."""
        candidate = self.index(points)
        places = zip(points.split(ROWS), candidate.split(ROWS), strict=True)
        distance = torch.cat([euclidean_norm(x.double() - self.centers[i].double(), 1) for x, i in places])
        return torch.where(distance <= self.radii[candidate], candidate, self.count), distance


@dataclass(frozen=True)
class Partition:
    """How cells are made.

    kind: "voronoi", cells of held-out points drawn at random; "k-means", cells of the means of held-out points; "grid", intervals
    along `axes` random directions, which needs a domain or held-out points. cells: how many, of inputs; with K classes there are
    N = cells · K + 1 pairs of cell and label. radius: of every ball; if not given, the radius that holds the share `coverage` of
    the held-out points, or for a grid in a domain the one that the geometry gives.
    """

    kind: str = "voronoi"
    cells: int = 100
    coverage: float = COVERAGE
    radius: float | None = None
    axes: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"a partition must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.cells < 1 or self.axes < 1 or not 0 < self.coverage <= 1 or not (self.radius is None or self.radius > 0):
            raise InputError(
                f"a partition must have at least one cell and one axis, a coverage in (0, 1] and a radius above 0, got {self}"
            )

    def build(self, points: torch.Tensor | None, domain: Region | None, generator: torch.Generator) -> Cells:
        """The cells; `points` (n, d) are held-out."""
        made = KINDS[self.kind](self, points, domain, generator)
        return made if self.radius is None else replace(made, radii=torch.full_like(made.radii, self.radius))


Choice = Union[str, Partition, Sequence[Union[str, Partition]], None]


def partitions(wanted: Choice, classes: int, points: int, domain: Region | None) -> list[Partition]:
    """Every partition that is tried: what the user names, with several numbers of cells for a kind without one."""
    if wanted is None:
        wanted = "voronoi" if points else "grid"
    if isinstance(wanted, Partition):
        return [wanted]
    if not isinstance(wanted, str):
        found = [one for item in wanted for one in partitions(item, classes, points, domain)]
        if not found:
            raise InputError("partition= is empty")
        return found
    largest = 10**9 if wanted == "grid" and domain is not None else points // 2
    sizes = dict.fromkeys(max(1, pairs // classes) for pairs in PAIRS)
    return [Partition(wanted, cells) for cells in sizes if cells <= largest] or [Partition(wanted, max(1, largest))]


# kinds ---------------------------------------------------------------------------------------------------------------


def _voronoi(wanted: Partition, points: torch.Tensor | None, domain: Region | None, generator: torch.Generator) -> Cells:
    points = _held_out(wanted, points)
    order = torch.randperm(len(points), generator=generator)
    centers, others = points[order[: wanted.cells]], points[order[wanted.cells :]]
    return _around(wanted, centers, others, lambda x: nearest(x, centers))


def _k_means(wanted: Partition, points: torch.Tensor | None, domain: Region | None, generator: torch.Generator) -> Cells:
    from sklearn.cluster import MiniBatchKMeans

    points = _held_out(wanted, points)
    seed = int(torch.randint(2**31, (), generator=generator))
    fitted = MiniBatchKMeans(wanted.cells, random_state=seed, n_init=1, batch_size=max(1024, 2 * wanted.cells)).fit(points.numpy())
    centers = torch.tensor(np.asarray(fitted.cluster_centers_), dtype=points.dtype)
    return _around(wanted, centers, points, lambda x: nearest(x, centers))


def _grid(wanted: Partition, points: torch.Tensor | None, domain: Region | None, generator: torch.Generator) -> Cells:
    if domain is not None:
        middle = torch.cat([part.flatten() for part in domain.middle])
        directions = _directions(wanted, len(middle), generator)
        low, high = _range(domain, directions)
    elif points is not None:
        middle = points.double().mean(0)
        directions = _directions(wanted, len(middle), generator)
        projected = points.double() @ directions
        low, high = projected.amin(0), projected.amax(0)
    else:
        raise NotApplicable("a grid needs domain=, or held_out= to choose its range")
    bins = max(1, round(wanted.cells ** (1 / directions.shape[1])))
    edges = low[:, None] + (high - low)[:, None] * torch.arange(bins + 1, dtype=torch.float64) / bins  # (axes, bins + 1)
    below, above = (torch.cartesian_prod(*ends).reshape(-1, len(edges)) for ends in (edges[:, :-1], edges[:, 1:]))  # (cells, axes)
    centers = middle + ((below + above) / 2 - middle @ directions) @ directions.T

    def index(x: torch.Tensor) -> torch.Tensor:
        along = (x.double() @ directions - low) / (high - low).clamp(min=1e-300) * bins
        place = along.nan_to_num(0).clamp(0, bins - 1).long()
        return (place * bins ** torch.arange(place.shape[1] - 1, -1, -1)).sum(1)

    if points is not None and domain is None:
        return _around(wanted, centers, points, index)
    assert domain is not None
    return Cells(wanted.kind, centers, _radii(domain, middle, directions, below, above), index)


def _radii(
    domain: Region, middle: torch.Tensor, directions: torch.Tensor, below: torch.Tensor, above: torch.Tensor
) -> torch.Tensor:
    """√(half diagonal² + reach² − ρ²): what of the domain's ball projects into the bins, ρ away from the projected middle.

    Half the diagonal where the directions are all there are.
    """
    projected, reach = middle @ directions, torch.tensor([[domain.reach]], dtype=torch.float64)
    parts = (above - below) / 2, torch.maximum(below - projected, projected - above).clamp(min=0), reach
    exponent = exponent_of(torch.cat([part.flatten() for part in parts]))  # so that no square overflows or vanishes
    squares, beside, most = (times_power_of_two(part, -exponent).square().sum(1) for part in parts)
    if directions.shape[1] < len(middle):
        squares = squares + (most - beside).clamp(min=0)
    return times_power_of_two(squares.sqrt() * (1 + ROOM), exponent)


KINDS: dict[str, Callable[[Partition, torch.Tensor | None, Region | None, torch.Generator], Cells]] = {
    "voronoi": _voronoi,
    "k-means": _k_means,
    "grid": _grid,
}


def _held_out(wanted: Partition, points: torch.Tensor | None) -> torch.Tensor:
    if points is None:
        raise NotApplicable(f"cells of kind {wanted.kind} need held_out=, points that training has not seen")
    if len(points) <= wanted.cells:
        raise NotApplicable(f"{wanted.cells:,} cells of kind {wanted.kind} need more held-out points than {len(points):,}")
    return points


def _around(wanted: Partition, centers: torch.Tensor, points: torch.Tensor, index: Index) -> Cells:
    """Balls of one radius that hold the wanted share of the points."""
    unbounded = Cells(wanted.kind, centers, torch.full((len(centers),), math.inf, dtype=torch.float64), index)
    _, distance = unbounded.locate(points)
    return replace(unbounded, radii=torch.full_like(unbounded.radii, float(distance.quantile(wanted.coverage))))


def nearest(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """The centre nearest to every point, up to float32 rounding: argmin ‖c‖² − 2 x·c, some points at a time."""
    half_squares = centers.square().sum(1) / 2
    block = max(1, BLOCK // len(centers))
    parts = [torch.addmm(half_squares, part.to(centers), centers.T, alpha=-1).argmin(1) for part in points.split(block)]
    return torch.cat(parts)


def _directions(wanted: Partition, dimension: int, generator: torch.Generator) -> torch.Tensor:
    """Orthonormal columns: the coordinate axes where there are no more of them than asked for, else random."""
    if dimension <= wanted.axes:
        return torch.eye(dimension, dtype=torch.float64)
    return torch.linalg.qr(torch.randn(dimension, wanted.axes, dtype=torch.float64, generator=generator))[0]


def _range(domain: Region, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest value on the domain along every direction."""
    middle = torch.cat([part.flatten() for part in domain.middle]) @ directions
    if isinstance(domain, Ball):
        reach = torch.full_like(middle, domain.reach)
    else:
        half = torch.cat([((interval.high - interval.low) / 2).flatten() for interval in domain.intervals()])
        reach = half @ directions.abs()
    return middle - reach, middle + reach


def expanded(domain: Region | None, shapes: Sequence[torch.Size]) -> Region | None:
    """A domain whose ends may be single numbers, in the shape of the inputs."""
    if domain is None or [part.shape for part in domain.middle] == list(shapes):
        return domain
    if len(shapes) != 1 or len(domain.middle) != 1 or domain.middle[0].numel() != 1:
        given, wanted = (", ".join(str(tuple(shape)) for shape in some) for some in ([p.shape for p in domain.middle], shapes))
        raise InputError(f"domain= holds points of shape {given}, a sample has {wanted}")
    if isinstance(domain, Box):
        low, high = (side.expand(shapes[0]) for side in (domain.intervals()[0].low, domain.intervals()[0].high))
        return Box(low, high)
    return Ball(domain.middle[0].expand(shapes[0]), domain.radius)
