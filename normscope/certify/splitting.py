"""A box cut into parts: on a convex region that closed parts cover, the constant is at most the largest of theirs.

The segment between two points of the box lies in the box and is covered by the parts, so it is a finite chain of pieces, each in
one of them: the output changes along each by at most that part's constant times its length, and the lengths add up to the distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from normscope.certify.forms import MOST_WORK, AffineForms
from normscope.core.magnitude import Magnitude
from normscope.core.region import Box, Region

FEW_SIDES = 8  # of a box that is cut: each cut halves one of them
MOST_PARTS = 20  # with effort = 1
CLOSE = 1.01  # times the steepest derivative that was met, up to which a part is not cut again
COMPOSED = 1e-9  # relative rounding of compositions, which forms take over where they are smaller


@dataclass(eq=False)
class Part:
    """A box, the bound that affine forms give on it, and the derivative of the network in its middle, (outputs, d)."""

    box: Box
    bound: Magnitude
    derivative: torch.Tensor


Bounded = Callable[[Box], Part | None]  # None where there are no affine forms


def part_of(box: Box, forms: AffineForms) -> Part | None:
    derivative = None if forms.away is None or forms.moves is None else forms.away.jacobian.matrix
    if derivative is None or not bool(derivative.isfinite().all()):
        return None
    return Part(box, forms.bound.widened(COMPOSED), derivative)


def most_parts(region: Region | None, forms: AffineForms) -> int:
    """Into how many parts a region is cut at most: boxes with few sides, of networks that cost little."""
    if not isinstance(region, Box) or not forms.work or sum(part.numel() for part in region.middle) > FEW_SIDES:
        return 1
    return min(int(MOST_PARTS * forms.effort), int(MOST_WORK * forms.effort / forms.work))


def cut(whole: Part, bounded: Bounded, most: int) -> list[Part]:
    """Parts that cover a box, the one with the largest bound cut in half again and again, as long as that may help.

    Several may be as bad, so that the largest bound stays for many cuts, and then falls at once.
    """
    parts, steepest = [whole], _steepness(whole)
    while len(parts) < most:
        worst = max(parts, key=lambda part: part.bound)
        halves = _halves(worst)
        if float(worst.bound) <= CLOSE * steepest or halves is None:
            break
        made = [part for part in map(bounded, halves) if part is not None]
        if len(made) < len(halves):
            break
        for part in made:
            part.bound = min(part.bound, worst.bound)
        steepest = max(steepest, *map(_steepness, made))
        parts = [part for part in parts if part is not worst] + made
    return parts


def _steepness(part: Part) -> float:
    return float(torch.linalg.matrix_norm(part.derivative, 2))


def _halves(part: Part) -> tuple[Box, Box] | None:
    """Cut across the side along which the output moves most."""
    bounds, middle = part.box.intervals(), part.box.middle
    widths = torch.cat([(side.high - side.low).reshape(-1) for side in bounds])
    side = int((widths * torch.linalg.vector_norm(part.derivative, dim=0)).argmax())
    at = torch.cat([value.reshape(-1) for value in middle])[side]
    low, high = (torch.cat([end.reshape(-1) for end in ends]) for ends in zip(*((b.low, b.high) for b in bounds), strict=True))
    if not low[side] < at < high[side]:
        return None
    cut_high, cut_low = high.clone(), low.clone()
    cut_high[side] = cut_low[side] = at
    shapes = [value.shape for value in middle]
    return Box(_shaped(low, shapes), _shaped(cut_high, shapes)), Box(_shaped(cut_low, shapes), _shaped(high, shapes))


def _shaped(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    return [part.reshape(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]
