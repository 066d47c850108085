"""The certificate gap: both sides of a bracket against the radius of its region, and the largest radius at which they are close."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from normscope.core.bracket import Bracket, Explorer, plain_sides, ratio, read_sides
from normscope.core.codec import named
from normscope.core.errors import InputError, Refusal
from normscope.core.magnitude import ZERO, Magnitude
from normscope.core.progress import Progress, shown
from normscope.core.region import Region
from normscope.core.rendering import Text
from normscope.core.result import Result

STEP = 10.0  # between radii until one is within the factor and a larger one is not
MOST_STEPS = 8  # of that size, in either direction


@dataclass(frozen=True)
class CurvePoint:
    """Both sides on the region of one radius; upper: None where no bound could be proved."""

    radius: float
    lower: Magnitude
    upper: Magnitude | None

    @property
    def ratio(self) -> Magnitude:
        return ratio(self.lower, self.upper)


@dataclass(frozen=True, repr=False)
class GapCurve(Result):
    """Every radius that was tried, and where upper ≤ factor · lower. Nothing is said about radii between them.

    interrupted: the search was stopped before it was done. region: the one that belongs to `radius`.
    """

    schema = "normscope.gap_curve/1"

    factor: float
    points: tuple[CurvePoint, ...]  # by radius
    interrupted: bool = False
    region: Region | None = field(default=None, repr=False, compare=False)

    def within(self, point: CurvePoint) -> bool:
        return point.ratio <= self.factor

    @property
    def radius(self) -> float:
        """The largest radius tried at which upper ≤ factor · lower; 0 where there is none."""
        return max((point.radius for point in self.points if self.within(point)), default=0.0)

    @property
    def beyond(self) -> float | None:
        """The next larger radius that was tried, at which it fails; None where nothing larger was tried."""
        return min((point.radius for point in self.points if point.radius > self.radius), default=None)

    @property
    def exceptions(self) -> tuple[float, ...]:
        """Smaller radii than `radius` at which it fails all the same: the curve is not monotone there."""
        return tuple(point.radius for point in self.points if point.radius < self.radius and not self.within(point))

    def to_dict(self) -> dict[str, Any]:
        """The curve as plain JSON values."""
        return {
            **named(self, "schema", "factor", "radius", "beyond", "interrupted"),
            "points": [{"radius": point.radius, **plain_sides(point.lower, point.upper)} for point in self.points],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> GapCurve:
        """The curve that `to_dict` described."""
        points = [CurvePoint(float(point["radius"]), *read_sides(point)) for point in content["points"]]
        return GapCurve(float(content["factor"]), tuple(points), bool(content["interrupted"]))

    def _figures(self) -> dict[str, Callable[..., Any]]:
        from normscope.report.audits import certificate_gap

        return {"gap": partial(certificate_gap, self)}

    def lines(self) -> list[str]:
        """The answer in words."""
        smallest, largest = self.points[0].radius, self.points[-1].radius
        if not self.radius:
            found = f"at no radius tried, from {smallest:.3g} to {largest:.3g}, is upper ≤ {self.factor:g} · lower"
        else:
            end = "the largest tried" if self.beyond is None else f"not at {self.beyond:.3g}"
            found = f"upper ≤ {self.factor:g} · lower {'at' if self.exceptions else 'up to'} radius {self.radius:.3g}, {end}"
        made = [f"{found}; {len(self.points)} radii tried"]
        if self.exceptions:
            made.append(f"the ratio is not monotone: it is larger at {', '.join(f'{radius:.3g}' for radius in self.exceptions)}")
        return [*made, "interrupted: a longer search may find a larger radius"] if self.interrupted else made

    def render(self) -> Text:
        rows = [
            f"{point.radius:>10.3g}  {point.lower:>9}  {'none' if point.upper is None else f'{point.upper}':>9}  {point.ratio:>9}"
            for point in self.points
        ]
        return Text.of_lines([*self.lines(), f"{'radius':>10}  {'at least':>9}  {'at most':>9}  {'ratio':>9}", *rows])


def search(bracket: Bracket, factor: float, tolerance: float = 0.05, progress: Progress = None) -> GapCurve:
    """Steps of ten until a radius is within the factor and the next two are not, then bisection in log r.

    The second step is taken because the ratio may fall again: for all inputs together both sides may be close.
    """
    explore, region = _checked(bracket, factor, tolerance)
    found = {region.reach: CurvePoint(region.reach, bracket.lower, bracket.upper)}
    interrupted = False

    with shown("radius", progress) as bar:

        def within(radius: float) -> bool:
            if radius not in found:
                try:
                    there = explore.on(region.resized(radius))
                    found[radius] = CurvePoint(radius, there.lower, there.upper)
                except Refusal:  # there is a rule that gives no bound on so large a region
                    found[radius] = CurvePoint(radius, ZERO, None)
                bar.advance()
            return found[radius].ratio <= factor

        try:
            good, bad = _enclosed(within, region.reach)
            while good and bad is not None and bad / good > 1 + tolerance:
                middle = math.sqrt(good) * math.sqrt(bad)
                good, bad = (middle, bad) if within(middle) else (good, middle)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            explore.forget()
    curve = GapCurve(float(factor), tuple(found[radius] for radius in sorted(found)), interrupted)
    return GapCurve(curve.factor, curve.points, interrupted, region.resized(curve.radius) if curve.radius else None)


def _enclosed(within: Any, start: float) -> tuple[float, float | None]:
    """The largest radius within and a larger one that is not; (0, …) or (…, None) where there is none among those tried."""
    good, bad = 0.0, None
    if within(start):
        good, tried = start, start
        for _ in range(MOST_STEPS):
            tried *= STEP
            if within(tried):
                good, bad = tried, None
            elif bad is not None:
                break
            else:
                bad = tried
        return good, bad
    bad, tried = start, start
    for _ in range(MOST_STEPS):
        tried /= STEP
        if within(tried):
            return tried, bad
        bad = tried
    return good, bad


def check_above(name: str, value: object, least: float) -> None:
    """Refuse what is not a finite number above the least."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least < float(value) < math.inf:
        raise InputError(f"{name} must be a finite number above {least:g}, got {value!r}")


def _checked(bracket: Bracket, factor: object, tolerance: object) -> tuple[Explorer, Region]:
    """What the search needs, or an error that says what to do."""
    check_above("factor", factor, 1)
    check_above("tolerance", tolerance, 0)
    if bracket.region is None or bracket.explore is None:
        raise InputError(
            "this bracket has no region to make larger or smaller: take that of ns.lipschitz(model, x, region=ns.Ball(x[0], 0.01))"
        )
    if not bracket.region.reach > 0:
        raise InputError("this bracket's region is a single point: take a radius above 0")
    return bracket.explore, bracket.region
