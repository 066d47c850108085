"""The check that every certified bound passes before anyone sees it: two points of the region must not contradict it."""

from __future__ import annotations

import torch

from normscope.certify.lower import Space, quotient
from normscope.core.errors import InternalError
from normscope.core.magnitude import Magnitude
from normscope.core.region import Region
from normscope.graph.graph import Graph

STEPS = (0.999, 1e-3)  # how far the second point is from the first, relative to the region's or the point's size
VISIBLE = 1e-6  # quotients that exceed a bound by less than this are not looked at twice


def check_bound(graph: Graph, bound: Magnitude, region: Region | None) -> None:
    """Raise `InternalError` if a difference quotient exceeds the bound; from the region's middle, or a random point.

    The second point lies along Jᵀu for a random u. It takes one derivative and three evaluations; what looks like a
    contradiction is then computed with its rounding taken off (certify/lower.py).
    """
    space = Space(graph)
    if not bound.finite or not space.dimension:
        return
    start = _start(space, region)
    size = region.reach if region is not None else max(float(torch.linalg.vector_norm(start)), 1.0)
    try:
        direction = _direction(space, start)
        ends = torch.cat([start + step * size * direction for step in STEPS])
        ends = ends if region is None else region.project(ends)
        with torch.no_grad():
            values = space.function(torch.float64)(torch.cat([start, ends]))
    except (RuntimeError, NotImplementedError):  # an operation that does not run on these values has no quotient there
        return
    changes = torch.linalg.vector_norm(values[1:] - values[:1], dim=1)
    apart = torch.linalg.vector_norm(ends - start, dim=1)
    for end, change, distance in zip(ends, changes.tolist(), apart.tolist(), strict=True):
        if distance > 0 and change < float("inf") and Magnitude(change) > bound * distance * (1 + VISIBLE):
            found = quotient(graph, space, start[0], end)
            if region is None or all(region.contains(space.unflat_one(one)) for one in (start[0], end)):
                refuse_contradicted("a difference quotient", found, bound)


def refuse_contradicted(what: str, found: Magnitude, bound: Magnitude, where: str = "") -> None:
    """Raise `InternalError` if something that was computed at points exceeds what is certified."""
    if found > bound:
        raise InternalError(f"{what} of {found:.17}{where} exceeds the certified bound {bound:.17}")


def _start(space: Space, region: Region | None) -> torch.Tensor:
    if region is not None:
        return space.flat([part[None] for part in region.middle]).to(torch.float64)
    return torch.randn(1, space.dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _direction(space: Space, start: torch.Tensor) -> torch.Tensor:
    """A unit vector along Jᵀu at the start; a random one where that is zero or not finite."""
    generator = torch.Generator().manual_seed(0)
    function = space.function(torch.float64)
    with torch.enable_grad():
        leaf = start.detach().requires_grad_(True)
        output = function(leaf)
        chosen = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        (slope,) = torch.autograd.grad(output, leaf, chosen, allow_unused=True) if output.requires_grad else (None,)
    if slope is None or not bool(slope.isfinite().all()) or not bool(slope.any()):
        slope = torch.randn(start.shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(slope / slope.abs().max(), dim=1)
