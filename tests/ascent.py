"""A search for violations: gradient ascent on pairs of points, both of which move, written without normscope."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Projection = Callable[[Tensor], Tensor]


def quotient(function: nn.Module, first: Tensor, second: Tensor) -> float:
    """‖f(x) − f(y)‖/‖x − y‖ in float64; 0 where it overflows, underflows or drowns in rounding."""
    with torch.no_grad():
        values = function(first), function(second)
    change = float(torch.linalg.vector_norm(values[0] - values[1]))
    resolved = 1e-6 * max(float(torch.linalg.vector_norm(value)) for value in values) < change > 1e-280
    distance = float(torch.linalg.vector_norm(first - second))
    return change / distance if math.isfinite(change) and resolved and distance > 0 else 0.0


def ascended(function: nn.Module, first: Tensor, second: Tensor, steps: int, inside: Projection = lambda x: x) -> float:
    """The largest quotient on the way up log ‖f(x) − f(y)‖ − log ‖x − y‖, from one pair, over x and y alike.

    A step is a share of the distance between both points, halved whenever it led down. inside: the projection to a region.
    """
    ends = [inside(first.detach()), inside(second.detach())]
    best, share = quotient(function, *ends), 0.5
    for _ in range(steps):
        slopes = _slopes(function, *ends)
        size = math.hypot(*(float(torch.linalg.vector_norm(slope)) for slope in slopes)) if slopes else math.nan
        if not (math.isfinite(size) and size > 0):
            break
        length = share * float(torch.linalg.vector_norm(ends[0] - ends[1])) / size
        moved = [inside(end + length * slope) for end, slope in zip(ends, slopes, strict=True)]
        found = quotient(function, *moved)
        if found > best:
            best, ends = found, moved
        else:
            share /= 2
    return best


def _slopes(function: nn.Module, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Of the log quotient in both points; nothing where autograd cannot go back, as through a ReLU that was overwritten."""
    ends = [end.detach().requires_grad_(True) for end in (first, second)]
    change = torch.linalg.vector_norm(function(ends[0]) - function(ends[1]))
    if not change.requires_grad or not bool(change.isfinite()) or not float(change) > 0:
        return ()
    value = change.log() - torch.linalg.vector_norm(ends[0] - ends[1]).log()
    try:
        slopes = torch.autograd.grad(value, ends, allow_unused=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return ()
    return tuple(torch.zeros_like(end) if slope is None else slope for slope, end in zip(slopes, ends, strict=True))


def project(region: object, points: Tensor) -> Tensor:
    """Into a ball or a box, a little inside of its rim; the point may have a batch axis of one."""
    if hasattr(region, "radius"):
        away = points - region.center
        distance = float(torch.linalg.vector_norm(away))
        return region.center + away * min(1.0, region.radius * (1 - 1e-9) / max(distance, 1e-300))
    return torch.minimum(torch.maximum(points, region.low), region.high)
