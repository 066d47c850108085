"""Where a bound holds: a ball or a box of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Union

import torch

from normscope.core.errors import InputError
from normscope.core.interval import Interval
from normscope.core.rounding import euclidean_norm, length

INSIDE = 1 - 1e-6  # the share of the radius to which points outside are moved, so that they are inside in float32 too
Point = Union[torch.Tensor, Sequence[torch.Tensor], float]  # a number stands for every entry, where a shape is known


def _parts(point: Point) -> tuple[torch.Tensor, ...]:
    if isinstance(point, (int, float)):
        point = torch.tensor(float(point))
    parts = (point,) if isinstance(point, torch.Tensor) else tuple(point) if isinstance(point, Sequence) else (point,)
    wrong = [type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)]
    if wrong:
        raise InputError(
            f"a region is made of numbers and tensors, got {wrong[0]}: pass one tensor, or one per floating-point input in the "
            "order of the example"
        )
    return tuple(part.detach().to(torch.float64) for part in parts)


def _check_finite(point: Point) -> None:
    if not all(bool(part.isfinite().all()) for part in _parts(point)):
        raise InputError("a region is made of finite numbers; this one holds NaN or infinity")


@dataclass(frozen=True)
class Ball:
    """All x with ‖x − center‖₂ ≤ radius; `center` is one sample, without batch axis, or one tensor per input."""

    center: Point
    radius: float

    def __post_init__(self) -> None:
        _check_finite(self.center)
        if not isinstance(self.radius, (Real, torch.Tensor)) or not 0 <= self.radius < float("inf"):
            raise InputError(f"radius must be a finite number ≥ 0, got {self.radius}")

    @property
    def middle(self) -> tuple[torch.Tensor, ...]:
        return _parts(self.center)

    @property
    def reach(self) -> float:
        """The largest distance from the middle."""
        return float(self.radius)

    def resized(self, reach: float) -> Ball:
        """The same middle with another reach."""
        return Ball(self.center, reach)

    def intervals(self) -> tuple[Interval, ...]:
        return tuple(Interval.around(part, torch.full_like(part, self.radius)) for part in self.middle)

    def project(self, points: torch.Tensor) -> torch.Tensor:
        """The nearest points of the region, for flat points (count, d)."""
        middle = torch.cat([part.reshape(-1) for part in self.middle]).to(points.dtype)
        away = points - middle
        largest = away.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(away.dtype).tiny)
        unit = away / largest  # so that no square overflows or vanishes
        longest = self.radius * INSIDE / torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp(min=1e-30)
        return middle + unit * torch.minimum(largest, longest)

    def contains(self, point: Sequence[torch.Tensor]) -> bool:
        away = [(a.double() - b).reshape(-1) for a, b in zip(point, self.middle, strict=True)]
        return float(euclidean_norm(torch.cat(away))) <= self.radius


@dataclass(frozen=True)
class Box:
    """All x with low ≤ x ≤ high, entry by entry; both are one sample, without batch axis, or one tensor per input."""

    low: Point
    high: Point

    def __post_init__(self) -> None:
        _check_finite(self.low)
        _check_finite(self.high)
        low, high = _parts(self.low), _parts(self.high)
        if [a.shape for a in low] != [b.shape for b in high] or any(bool((a > b).any()) for a, b in zip(low, high, strict=True)):
            raise InputError("a box needs low ≤ high in every entry, and both of one shape")

    @property
    def middle(self) -> tuple[torch.Tensor, ...]:
        return tuple(a / 2 + b / 2 for a, b in zip(_parts(self.low), _parts(self.high), strict=True))

    @property
    def reach(self) -> float:
        sides = zip(self.middle, _parts(self.low), _parts(self.high), strict=True)
        return float(length(torch.cat([torch.maximum(m - a, b - m).reshape(-1) for m, a, b in sides])))  # the middle is rounded

    def resized(self, reach: float) -> Box:
        """The same middle and proportions with another reach, which is half the diagonal."""
        scale, middle = reach / self.reach, self.middle
        low, high = (
            [m + scale * (part - m) for m, part in zip(middle, _parts(side), strict=True)] for side in (self.low, self.high)
        )
        return Box(low, high)

    def intervals(self) -> tuple[Interval, ...]:
        return tuple(Interval(a, b) for a, b in zip(_parts(self.low), _parts(self.high), strict=True))

    def project(self, points: torch.Tensor) -> torch.Tensor:
        low, high = (torch.cat([part.reshape(-1) for part in _parts(side)]).to(points.dtype) for side in (self.low, self.high))
        return torch.minimum(torch.maximum(points, low), high)

    def contains(self, point: Sequence[torch.Tensor]) -> bool:
        sides = zip(point, _parts(self.low), _parts(self.high), strict=True)
        return all(bool(((a <= x.double()) & (x.double() <= b)).all()) for x, a, b in sides)


Region = Union[Ball, Box]
