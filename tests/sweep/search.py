"""Pairs of points with a large difference quotient: gradient ascent on both ends, with the model itself in float64.

All pairs climb at once, as one batch: a program whose samples mix is judged by that alone, before any pair is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import normscope as ns

Function = Callable[[Tensor], Tensor]
Region = ns.Ball | ns.Box | None
Pair = tuple[Tensor, Tensor]
GENERATOR = torch.Generator().manual_seed(0)
SAFETY = 100
TINY = 1e-303  # below it numbers have too few digits
SHARES = (1.0, 0.3, 0.05)  # of a pair's distance, that its ends may move at once


def largest_quotient(
    function: Function, center: Tensor, region: Region, seed: int, starts: int = 12, turns: int = 12
) -> tuple[float, Pair | None]:
    """The largest quotient found between two points (one sample each, without the batch axis), and the pair."""
    generator = torch.Generator().manual_seed(seed)
    first, second = _starts(center, region, generator, starts)
    values = quotients(function, first, second)
    for _ in range(turns):
        before = values
        first, second, values = _ascended(function, first, second, values, region, generator)
        if torch.equal(values, before):
            break
    best = int(values.argmax())
    return (float(values[best]), (first[best], second[best])) if values[best] > 0 else (0.0, None)


def refutes(function: Function, pair: Pair, bound: float) -> bool:
    """Whether a quotient above the bound is more than rounding: pairs nearby and farther apart show it, each pair by itself."""
    middle, half = (pair[0] + pair[1]) / 2, (pair[0] - pair[1]) / 2
    noise = rounding(function, pair) / float(_sizes((pair[0] - pair[1])[None]))
    stretched = (stretch * half for stretch in (1.0, 0.9, 0.8, 0.95, 0.85))
    return all(quotients(function, (middle + step)[None], (middle - step)[None]) > bound * (1 + 1e-6) + noise for step in stretched)


class Roundings(TorchDispatchMode):
    """Every operation's result is off by about a unit of float64's precision, relative to every entry."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in operation._schema.returns)
        for value in [] if views else tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point():
                value.mul_(1 + torch.finfo(value.dtype).eps * torch.randn(value.shape, generator=GENERATOR, dtype=value.dtype))
        return result


def rounding(function: Function, pair: Pair) -> float:
    """At most what rounding makes of the difference of a pair's values, many times what it was seen to make."""
    plain = [_values(function, end[None]) for end in pair]
    changes = []
    for _ in range(3):
        with torch.no_grad(), Roundings():
            changes += [_values(function, end[None]) - before for end, before in zip(pair, plain, strict=True)]
    return SAFETY * max(float(_sizes(change.detach())) for change in changes)


def quotients(function: Function, first: Tensor, second: Tensor) -> Tensor:
    """‖f(x) − f(y)‖/‖x − y‖ of each pair; 0 where it overflows, underflows, or drowns in the rounding of its values."""
    with torch.no_grad():
        one, other = _values(function, torch.cat([first, second])).chunk(2)
    change, distance = _sizes(one - other), _sizes(first - second)
    resolved = (1e-7 * torch.maximum(_sizes(one), _sizes(other)) < change) & (change > TINY) & (distance > TINY)
    apart = distance > 1e-9 * torch.maximum(_sizes(first), _sizes(second))
    return torch.where(change.isfinite() & resolved & apart, change / distance, 0.0)


def _values(function: Function, points: Tensor) -> Tensor:
    try:
        together = function(points * 1)  # a program may write to its input
    except RuntimeError:  # it takes one sample alone
        together = None
    return torch.cat([function(point[None] * 1) for point in points]) if together is None else together


def _sizes(values: Tensor) -> Tensor:
    """The norm of each sample, without overflow; a sample that is not finite has none."""
    flat = values.flatten(1)
    largest = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return torch.where(largest.isfinite(), scale * torch.linalg.vector_norm(flat / scale[:, None], dim=1), largest)


def _times(factors: Tensor, points: Tensor) -> Tensor:
    return factors.reshape(-1, *[1] * (points.dim() - 1)) * points


def _inside(region: Region, points: Tensor) -> Tensor:
    if isinstance(region, ns.Ball):
        away = points - region.center
        return region.center + _times((region.radius * (1 - 1e-9) / _sizes(away).clamp(min=1e-320)).clamp(max=1.0), away)
    return points if region is None else points.clamp(region.low, region.high)


def _starts(center: Tensor, region: Region, generator: torch.Generator, count: int) -> Pair:
    """Points spread over the region, and partners of theirs: every other one at any distance, the rest as far as the spread."""
    middle, reach = center, float(_sizes(center[None])) or 1.0
    if isinstance(region, ns.Ball):
        middle, reach = region.center, region.radius
    elif isinstance(region, ns.Box):
        middle, reach = (region.low + region.high) / 2, float(_sizes((region.high - region.low)[None]))
    noise = torch.randn(2, count, *center.shape, generator=generator, dtype=torch.float64)
    nearer, closer = 10 ** -torch.rand(2, count, generator=generator, dtype=torch.float64)
    spread = reach * nearer**2 / math.sqrt(center.numel())
    closer[::2] = 1.0
    first = _inside(region, middle + _times(spread, noise[0]))
    return first, _inside(region, first + _times(spread * closer**3, noise[1]))


def _ascended(
    function: Function, first: Tensor, second: Tensor, values: Tensor, region: Region, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair one step up log ‖f(x) − f(y)‖ − log ‖x − y‖, by the largest of SHARES that gains; or where it was."""
    ends, random = torch.cat([first, second]), torch.randn(2, *first.shape, generator=generator, dtype=torch.float64)
    slopes = _slopes(function, ends)
    useful = (_sizes(slopes) > 0) & _sizes(slopes).isfinite()
    directions = _chosen(useful, slopes, random.flatten(0, 1))
    steps = _times((_sizes(first - second).repeat(2) / _sizes(directions)), directions)
    best, reached = ends, values
    for share in SHARES:
        moved = _inside(region, ends + share * steps)
        found = quotients(function, *moved.chunk(2))
        better = (found > values) & (reached == values)
        best, reached = _chosen(better.repeat(2), moved, best), torch.where(better, found, reached)
    return *best.chunk(2), reached


def _chosen(where: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(where.reshape(-1, *[1] * (one.dim() - 1)), one, other)


def _slopes(function: Function, ends: Tensor) -> Tensor:
    """Gradients of every pair's quotient; zeros where autograd cannot go back through what was overwritten."""
    ends = ends.clone().requires_grad_(True)
    try:
        change, distance = (torch.linalg.vector_norm((one - other).flatten(1), dim=1) for one, other in
                            (_values(function, ends).chunk(2), ends.chunk(2)))  # fmt: skip
        return torch.autograd.grad((change.log() - distance.log()).sum(), ends, materialize_grads=True)[0]
    except RuntimeError:
        return torch.zeros_like(ends)
