"""Evidence that no finite constant exists, where the pass found none: a bound is called infinite only with it.

A segment of inputs is halved again and again, towards its steepest half: by the triangle inequality one half has a difference
quotient at least as large. Where the function has a finite constant, quotients settle; at a jump they double with
every half, at a cusp such as that of √ they grow by √2, at a pole by 4. The same search on inputs of 8, 64, … times the size, or
beside tokens of that size, shows quotients that grow with the inputs, as those of products and of attention do, and on ever smaller
ones those of normalizers without ε. At 30,000 times the size, or at 2·10⁻¹³ of it, where any usual ε is felt, they must still grow;
where outputs overflow there, as those of exp do, at the furthest size where they do not. Where biases hide a product until inputs
are large, growth that has begun at the largest of these sizes is followed further. Quotients count with their roundoff taken off
(certify/lower.py). What levels off only beyond that, or is steep on less than 10⁻¹² of a segment, looks like growth or a jump:
evidence is no proof, so the certificate says what shows it.

Where the pass finds no bound and this finds no growth, nothing is proved either way: that is a refusal, and not infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from normscope.certify.lower import SEARCH_ENTRIES, Space, quotient
from normscope.certify.upper import Upper
from normscope.core.errors import NO_CERTIFICATE, Refusal
from normscope.core.magnitude import ZERO, Magnitude
from normscope.core.randomness import generator_of
from normscope.core.region import Region
from normscope.graph.graph import Graph
from normscope.rules.decisions import is_decision

HALVINGS, LEVEL = 40, 5  # of a segment; quotients are compared after every fifth
GROWING, GROWN = 4.0, 500.0  # factors by which the last quotient exceeds that of the level before, and the first
POWERS = tuple(range(-2, 4))  # of 8: sizes of inputs, relative to the example's
FURTHER, BEGUN = tuple(range(4, 7)), 1.1  # looked at where the last size above multiplied the quotient by so much
SCALED_HALVINGS = 25  # enough for the width of a transition of attention at the largest of these sizes
LARGE, SMALL = 5, -14  # powers of 8 up to which quotients must grow on; beyond the first, float64 does not resolve sharp attention
FURTHEST = 8  # the same behind FURTHER
NEARER = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1)  # parts of the way there, where outputs overflow at the end of it
STEADY = 0.8  # of the exponent with which they grew before
HUGE = 1e100  # a quotient up to which they need not be followed: beyond its square, float64 has no lengths
GROWTH_PER_SCALE, COMPARED = 2.5, 3  # what each of the last sizes multiplies the quotient by, at least, and how many there are
SEGMENTS, FEW = 8, 2  # that are halved together, and of a large network
MOST_EVALUATED = 2_000_000_000  # entries of all nodes at all points of a search: some 10 seconds for jumps, and as many for growth

HALVED = HALVINGS + 1  # times that a segment is evaluated, in search of a jump, and of growth
SCALED = (SCALED_HALVINGS + 1) * len(POWERS) + HALVED

UNPROVED = "no finite bound was found, and no inputs were found that rule one out"
ADVICE = "Pass region=ns.Ball(x, radius) around an input of yours: a small enough region often has a finite bound."


def proved_infinite(graph: Graph, above: Upper, points: torch.Tensor, region: Region | None) -> Upper:
    """An infinite bound with the evidence for it beside its reason, or a refusal; any other bound as it is."""
    if above.refusal is not None or above.bound.finite:
        return above
    found = evidence(graph, points, region)
    if found:
        return replace(above, certificate=replace(above.certificate, reason=f"{above.certificate.reason}; {found}"))
    whole = _affordable(graph, HALVED) >= FEW and (region is not None or _affordable(graph, SCALED) >= FEW)
    short = [] if whole else ["the search for such inputs was cut short, since every one costs much"]
    refusal = Refusal(f"{NO_CERTIFICATE}{UNPROVED}", [above.certificate.reason, *short], ADVICE)
    return replace(above, refusal=refusal, certificate=above.certificate.refused(refusal, above.certificate.rounding))


def evidence(graph: Graph, points: torch.Tensor, region: Region | None = None) -> str:
    """What shows that difference quotients grow without end, in words; empty if nothing was found that does."""
    space = Space(graph)
    if not space.dimension or not math.prod(graph.output.shape):
        return ""
    try:
        search = _Halving(space, points.double(), region)
        return search.jump() or ("" if region is not None else search.growth())
    except (RuntimeError, NotImplementedError):  # an operation does not run on these values: they show nothing
        return ""


def _affordable(graph: Graph, halved: int) -> int:
    """How many segments can be halved so many times."""
    return MOST_EVALUATED // max(5 * halved * sum(math.prod(node.shape) for node in graph), 1)


Pair = tuple[torch.Tensor, torch.Tensor]  # ends of segments, each (segments, d)


class _Halving:
    """Segments between random points, halved towards their largest difference quotient."""

    def __init__(self, space: Space, seeds: torch.Tensor, region: Region | None) -> None:
        self.space, self.region, self.generator = space, region, generator_of(None)
        held = sum(math.prod(node.shape) for node in space.graph)
        self.count = max(FEW, min(SEGMENTS, SEARCH_ENTRIES // max(7 * held, 1), _affordable(space.graph, HALVED)))
        self.decisions = [node for node in space.graph if is_decision(node)]
        self._captured = space.graph.batched_capture([space.graph.output, *self.decisions], torch.float64)
        self._values(torch.zeros(1, space.dimension, dtype=torch.float64))
        if self._captured.one_by_one:  # every point costs a pass of its own
            self.count = FEW
        self.ends = self._ends(seeds)
        self.held = self._held()

    def _held(self) -> torch.Tensor:
        """Which entries of a segment are the same at both ends: none, or in every other pair of segments half of the tokens."""
        some = [
            torch.zeros(self.count, *shape) if len(shape) < 2
            else (torch.rand(self.count, *shape[:-1], 1, generator=self.generator) < 0.5).expand(self.count, *shape)
            for shape in self.space.shapes
        ]  # fmt: skip
        return (torch.arange(self.count) // 2 % 2 == 1)[:, None] & self.space.flat(some).bool()

    def _ends(self, seeds: torch.Tensor) -> Pair:
        region = self.region
        noise = torch.randn((2 * self.count, self.space.dimension), generator=self.generator, dtype=torch.float64)
        if region is not None:
            middle = self.space.flat([part[None] for part in region.middle]).double()
            found = region.project(middle + region.reach * torch.nn.functional.normalize(noise, dim=1))
        else:
            size = float(seeds.square().mean().sqrt())
            around = seeds[torch.arange(len(noise)) % len(seeds)] * (torch.arange(len(noise)) // 2 % 2)[:, None]
            found = around + (size if 0 < size < math.inf else 1.0) * noise
        return found[0::2], found[1::2]

    def _values(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, answers of all decisions) at each point."""
        with torch.no_grad():
            output, *answers = self._captured(*self.space.unflat(points))
        decided = self.space.flat([output.new_zeros(len(points), 1), *(answer.double() for answer in answers)])
        return self.space.flat([output]), decided

    def _halved(self, ends: Pair, halvings: int) -> tuple[list[Pair], torch.Tensor]:
        """The segments at every level, and their quotients there, roundoff not yet taken off: (levels, segments).

        Of five pieces half as long, from a quarter before the segment to a quarter behind it, the one is kept on which a decision
        changes, and of such the steepest; every other segment looks at steepness alone. Pieces overlap and reach beyond the ends,
        so that a cusp or pole at an end is not lost.
        """
        first, second = ends
        low, high = (self._values(end) for end in ends)
        by_decision = (torch.arange(len(first)) % 2 == 0)[:, None]
        levels, quotients = list[Pair](), list[torch.Tensor]()
        for halving in range(halvings + 1):
            if halving % LEVEL == 0:
                levels.append((first, second))
                change = torch.linalg.vector_norm(high[0] - low[0], dim=1) / torch.linalg.vector_norm(second - first, dim=1)
                quotients.append(change.nan_to_num(0, 0, 0))
            points = [first + quarters * (second - first) / 4 for quarters in range(-1, 6)]
            points = points if self.region is None else [self.region.project(point) for point in points]
            fresh = [points[place] for place in (0, 2, 3, 4, 6)]
            inner = [*zip(*(part.chunk(len(fresh)) for part in self._values(torch.cat(fresh))), strict=True)]
            found = [inner[0], low, *inner[1:4], high, inner[4]]
            pieces = [*zip(found, found[2:], strict=False)]
            scores = torch.stack([torch.linalg.vector_norm(end[0] - start[0], dim=1) for start, end in pieces], 1)
            changes = torch.stack([(end[1] != start[1]).any(1) for start, end in pieces], 1)
            scores = torch.where(scores.isfinite(), scores, -1.0)
            scores = torch.where(changes.any(1, keepdim=True) & ~changes & by_decision, -2.0, scores)
            kept, each = scores.argmax(1), torch.arange(len(first))
            first, second = torch.stack(points)[kept, each], torch.stack(points)[kept + 2, each]
            outputs, answers = (torch.stack(part) for part in zip(*found, strict=True))
            low, high = ((outputs[place, each], answers[place, each]) for place in (kept, kept + 2))
        return levels, torch.stack(quotients)

    def _quotient(self, ends: Pair, segment: int) -> Magnitude:
        first, second = ends[0][segment], ends[1][segment]
        return quotient(self.space.graph, self.space, first, second) if bool((first != second).any()) else ZERO

    def jump(self) -> str:
        """Two inputs ever closer together whose outputs do not come closer in proportion."""
        if _affordable(self.space.graph, HALVED) < FEW:
            return ""
        levels, raw = self._halved(self.ends, HALVINGS)
        for segment in (raw / raw[0]).nan_to_num(0, 0, 0).amax(0).argsort(descending=True).tolist()[:2]:
            if float(raw[:, segment].max()) < GROWN * float(raw[0, segment]):
                continue
            start = self._quotient(levels[0], segment)
            for level in range(len(levels) - 1, 0, -1):  # from the closest pair that roundoff does not hide
                found = self._quotient(levels[level], segment)
                if not found:
                    continue
                before = self._quotient(levels[level - 1], segment)
                if start and found >= before * GROWING and found >= start * GROWN:
                    apart = Magnitude(float(torch.linalg.vector_norm(levels[level][0][segment] - levels[level][1][segment])))
                    return f"shown by two inputs {apart} apart whose outputs are {found * apart} apart"
                break
        return ""

    def growth(self) -> str:
        """Quotients that grow with the size of the inputs, or as they shrink; not sought where points cannot travel together."""
        self.count = min(self.count, _affordable(self.space.graph, SCALED))
        if self._captured.one_by_one or self.count < FEW:
            return ""
        found = self._at(POWERS, SCALED_HALVINGS)
        shown = self._grows(POWERS, found, LARGE, "larger") or self._grows(POWERS[::-1], found[::-1], SMALL, "smaller")
        before, last = found[-2:]
        if shown or not before or last is None or last < before * BEGUN or _affordable(self.space.graph, 2 * SCALED) < self.count:
            return shown
        return self._grows(FURTHER, self._at(FURTHER, SCALED_HALVINGS), FURTHEST, "larger")

    def _grows(self, powers: Sequence[int], found: Sequence[Magnitude | None], far: int, named: str) -> str:
        """Whether the last of these quotients grow with their sizes, and as steadily on to the size `far`."""
        last = [(power, value) for power, value in zip(powers, found, strict=True) if value is not None][-COMPARED:]
        if len(last) < COMPARED or not last[0][1] or any(b < a * GROWTH_PER_SCALE for (_, a), (_, b) in pairwise(last)):
            return ""
        (_, before), (power, end) = last[-2:]
        if end < HUGE and not self._goes_on(end, (end / before).log * STEADY, power, far):
            return ""
        said = ", ".join(f"{value} at {8.0**power:.3g} ×" for power, value in last)
        return f"shown by difference quotients that grow as inputs become {named}: {said} the example's size"

    def _goes_on(self, end: Magnitude, exponent: float, power: int, far: int) -> bool:
        """Whether quotients grow by an exponent per size, from one size on to `far`, or as near to it as outputs are finite."""
        for sizes in ((far,), [power + part * (far - power) for part in NEARER]):
            for size, found in zip(sizes, self._at(sizes, HALVINGS), strict=True):
                if found is not None:
                    return found >= end * math.exp(exponent * abs(size - power))
        return False

    def _at(self, powers: Sequence[float], halvings: int) -> list[Magnitude | None]:
        """The largest quotient at each size of the inputs; None where outputs overflow."""
        held, ends = self.held[: self.count], [end[: self.count] for end in self.ends]
        alone = ~held.any(1, keepdim=True)  # else what is held grows, and what moves does not
        factors = torch.cat([torch.where(alone | held, 8.0**power, 1.0) for power in powers])
        first, second = (factors * end.repeat(len(powers), 1) for end in (ends[0], torch.where(held, *ends)))
        levels, raw = self._halved((first, second), halvings)
        chosen = (raw[-1].reshape(len(powers), -1).argmax(1) + self.count * torch.arange(len(powers))).tolist()
        values = [self._values(end)[0] for end in levels[-1]]
        finite = [all(bool(value[segment].isfinite().all()) for value in values) for segment in chosen]
        return [self._quotient(levels[-1], one) if known else None for one, known in zip(chosen, finite, strict=True)]
