"""Pairs of points with a large difference quotient: gradient ascent on both ends, with the model itself in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import normscope as ns

Function = Callable[[Tensor], Tensor]
Region = ns.Ball | ns.Box | None


def largest_quotient(
    function: Function, center: Tensor, region: Region, seed: int, starts: int = 6, turns: int = 12
) -> tuple[float, tuple[Tensor, Tensor] | None]:
    """The largest quotient found between two points (one sample each, without the batch axis), and the pair."""
    generator = torch.Generator().manual_seed(seed)
    best, found = 0.0, None
    for first, second in _starts(function, center, region, generator, starts):
        for _ in range(turns):
            value = quotient(function, first, second)
            if value > best:
                best, found = value, (first, second)
            moved = _ascend(function, first, second, region, generator)
            if moved is None:
                break
            first, second = moved
    return best, found


def quotient(function: Function, first: Tensor, second: Tensor) -> float:
    """‖f(x) − f(y)‖/‖x − y‖; 0 where it overflows, underflows, or drowns in the rounding of its values."""
    values = _values(function, first, second)
    change, distance = _size(values[0] - values[1]), _size(first - second)
    resolved = 1e-7 * max(map(_size, values)) < change and change > 1e-290 and distance > 1e-290
    return change / distance if math.isfinite(change) and resolved and distance > 1e-9 * max(_size(first), _size(second)) else 0.0


def _values(function: Function, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        try:
            return function(first[None].clone()), function(second[None].clone())
        except RuntimeError:  # some writes that overlap run on several samples and not on one
            both = function(torch.stack([first, second]))
            return both[:1], both[1:]


def refutes(function: Function, pair: tuple[Tensor, Tensor], bound: float, region: Region) -> bool:
    """Whether a quotient above the bound is more than rounding: pairs nearby and farther apart must show it, too."""
    first, second = pair
    for stretch in (1.0, 0.9, 0.8, 0.95, 0.85):
        middle = (first + second) / 2
        nearby = middle + stretch * (first - middle), middle + stretch * (second - middle)
        if not quotient(function, *nearby) > bound * (1 + 1e-6):
            return False
    return True


def _size(value: Tensor) -> float:
    largest = float(value.abs().max()) if value.numel() else 0.0
    return largest * float(torch.linalg.vector_norm(value / largest)) if 0 < largest < math.inf else largest


def _inside(region: Region, point: Tensor, center: Tensor) -> Tensor:
    if isinstance(region, ns.Ball):
        away = point - region.center
        return region.center + away * min(1.0, region.radius * (1 - 1e-9) / max(_size(away), 1e-320))
    return point if region is None else point.clamp(region.low, region.high)


def _starts(
    function: Function, center: Tensor, region: Region, generator: torch.Generator, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    reach = _size(center) or 1.0
    if isinstance(region, ns.Ball):
        reach = region.radius
    elif isinstance(region, ns.Box):
        reach = _size(region.high - region.low)
    for turn in range(count):
        noise = [torch.randn(center.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        spread = reach * 10 ** (-2 * float(torch.rand((), generator=generator))) / math.sqrt(center.numel())
        base = (
            region.center
            if isinstance(region, ns.Ball)
            else (region.low + region.high) / 2
            if isinstance(region, ns.Box)
            else center
        )
        first = _inside(region, base + spread * noise[0], center)
        apart = spread * 10 ** (-3 * float(torch.rand((), generator=generator)) if turn % 2 else 0.0)
        yield first, _inside(region, first + apart * noise[1], center)


def _ascend(
    function: Function, first: Tensor, second: Tensor, region: Region, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Both ends moved up the gradient of log ‖f(x) − f(y)‖ − log ‖x − y‖, by a part of their distance; tries shorter moves."""
    ends = [end.clone().requires_grad_(True) for end in (first, second)]
    try:
        change = torch.linalg.vector_norm(function(ends[0][None] * 1) - function(ends[1][None] * 1))
        slopes = torch.autograd.grad(change.log() - torch.linalg.vector_norm(ends[0] - ends[1]).log(), ends, allow_unused=True)
    except RuntimeError:  # autograd cannot go back through what was overwritten
        slopes = (None, None)
    distance = _size(first - second)
    directions = [
        slope
        if slope is not None and 0 < _size(slope) < math.inf
        else torch.randn(first.shape, generator=generator, dtype=torch.float64)
        for slope in slopes
    ]
    now = quotient(function, first, second)
    for share in (1.0, 0.3, 0.05):
        moved = [
            _inside(region, end + direction * (share * distance / _size(direction)), end)
            for end, direction in zip((first, second), directions, strict=True)
        ]
        if quotient(function, *moved) > now:
            return moved[0], moved[1]
    return None
