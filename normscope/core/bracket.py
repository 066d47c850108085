"""A constant between a certified upper bound and a lower bound that has a witness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.core.errors import NO_CERTIFICATE, InputError, InternalError, Refusal
from normscope.core.magnitude import INFINITY, ONE, Magnitude, json_number
from normscope.core.progress import Progress
from normscope.core.rendering import Text
from normscope.core.result import Result
from normscope.core.text import inert, visible

if TYPE_CHECKING:
    import torch

    from normscope.core.gap_curve import GapCurve
    from normscope.core.region import Region

WORST_INPUT = "The bound over all inputs is about the worst input imaginable; region= asks about inputs like yours."
TOO_LOOSE = "too loose to use as a bound"
LOOSE = 1e3  # upper/lower from which the upper side says nothing about the network
WIDE = 1.01  # upper/lower from which it is worth a sentence where the gap comes from


@dataclass(frozen=True)
class Step:
    """One line of a certificate: a bound on one operation or one chain of operations.

    `gain` multiplies what enters; `method` names the theorem that gives it (docs/laws.md).
    """

    name: str
    path: str
    operation: str
    gain: Magnitude
    method: str


@dataclass(frozen=True)
class Certificate:
    """Why the upper bound holds: every step in order, and the reason where it is infinite or absent.

    causes: where it is absent, each operation without a bound, with its module path; advice: what to do about them.
    """

    steps: tuple[Step, ...] = ()
    reason: str = ""
    rounding: float = 0.0  # relative inflation that covers the rounding of the composition itself
    causes: tuple[str, ...] = ()
    advice: str = ""

    @staticmethod
    def refused(refusal: Refusal, rounding: float) -> Certificate:
        """No certificate, and why."""
        return Certificate((), refusal.headline.removeprefix(NO_CERTIFICATE), rounding, refusal.causes, refusal.advice)

    def __str__(self) -> str:
        lines = [f"{step.path or '·'} {step.operation}: ×{step.gain} ({step.method})" for step in self.steps]
        return inert("\n".join(map(visible, [*lines, self.reason] if self.reason else lines)))


@dataclass(frozen=True)
class Witness:
    """Two points whose difference quotient is the lower bound; `replay()` computes it again, in float64."""

    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    replay: Any = field(repr=False, compare=False, default=None)

    def __iter__(self) -> Any:
        return iter((self.first, self.second))


@dataclass(frozen=True)
class GapShare:
    """The part of the gap between both sides that one place of the network makes.

    units: how many entries of the operation are not straight, or not known to be, on the region. share: from 0 to 1, of all.
    """

    where: str
    operation: str
    units: int
    share: float

    def __str__(self) -> str:
        """
        >>> print(GapShare("layer2.0", "relu", 31, 0.62))
        62 % of the gap comes from 31 ReLUs of layer2.0
        >>> print(GapShare("relu", "relu", 2, 0.84))  # outside of any module
        84 % of the gap comes from 2 ReLUs
        """
        kind = "ReLU" if self.operation == "relu" else f"{self.operation} unit"
        of = f" of {self.where}" if self.where not in ("", self.operation) else ""
        made = f"{self.units:,} {kind}{'s' if self.units != 1 else ''}" if self.units else self.operation
        return visible(f"{100 * self.share:.0f} % of the gap comes from {made}{of}")


@dataclass(frozen=True)
class Explorer:
    """The bracket of the same function on another region. forget: lets go of what was kept for the next one."""

    on: Callable[[Region], Bracket]
    forget: Callable[[], None] = lambda: None


def ratio(lower: Magnitude, upper: Magnitude | None) -> Magnitude:
    """upper / lower; infinite where one of them is missing, 1 where both are 0."""
    if upper is None or (upper and not lower):
        return INFINITY
    return upper / lower if upper else ONE


def read_sides(content: Mapping[str, Any]) -> tuple[Magnitude, Magnitude | None]:
    """(lower, upper) from their logarithms in JSON."""
    lower = Magnitude.from_log10(float(content["lower_log10"]))
    upper = None if content["upper_log10"] is None else Magnitude.from_log10(float(content["upper_log10"]))
    if upper is not None and lower > upper:
        raise InputError(f"its lower bound {lower} exceeds its upper bound {upper}")
    return lower, upper


def plain_sides(lower: Magnitude, upper: Magnitude | None) -> dict[str, Any]:
    """The logarithms of both sides, as JSON values."""
    return {"lower_log10": json_number(lower.log10), "upper_log10": None if upper is None else json_number(upper.log10)}


@dataclass(frozen=True, repr=False)
class Bracket(Result):
    """lower ≤ truth ≤ upper: `upper` is certified, `lower` is a difference quotient that `witness` attains.

    upper: None where no bound could be proved; `reason` and `certificate.causes` say why. notes: what a reader must know beside
    the numbers, such as inputs that were held fixed. gap: what makes the difference of both sides, the largest share first, where
    affine forms give the bound; together at most 1. region: where both sides hold. everywhere: they hold for all inputs.
    """

    schema = "normscope.bracket/1"

    lower: Magnitude
    upper: Magnitude | None
    witness: Witness | None = None
    certificate: Certificate = field(default_factory=Certificate)
    layers: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    gap: tuple[GapShare, ...] = ()
    region: Region | None = field(default=None, repr=False, compare=False)
    everywhere: bool = False
    explore: Explorer | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.upper is not None and self.lower > self.upper:
            raise InternalError(f"lower bound {self.lower:.17} exceeds upper bound {self.upper:.17}")

    @property
    def proved(self) -> Magnitude:
        """The upper bound; a Refusal that says why where there is none."""
        if self.upper is None:
            raise Refusal(f"{NO_CERTIFICATE}{self.reason}", self.certificate.causes, self.certificate.advice)
        return self.upper

    @property
    def reason(self) -> str:
        """Why the upper bound is infinite or absent, or an empty string."""
        return self.certificate.reason

    @property
    def ratio(self) -> Magnitude:
        """upper / lower: how far apart the two sides are; infinite where one of them is missing, 1 where both are 0."""
        return ratio(self.lower, self.upper)

    def __contains__(self, value: float | Magnitude) -> bool:
        return self.lower <= Magnitude(value) and (self.upper is None or Magnitude(value) <= self.upper)

    def radius_within(self, factor: float = 2.0, tolerance: float = 0.05, progress: Progress = None) -> GapCurve:
        """The largest radius found at which upper ≤ factor · lower, with the same middle, and the curve of both sides.

        Of a bracket on a region. A box keeps its proportions; its radius is half the diagonal. tolerance: how close, relatively,
        the answer is to a radius at which it fails. Ctrl-C ends the search with what it has.

        >>> import torch, normscope as ns
        >>> x = torch.ones(1, 3)
        >>> found = ns.lipschitz(torch.nn.Linear(3, 2), x, region=ns.Ball(x[0], 0.1)).radius_within(2)
        >>> found.radius > 0.1
        True
        """
        from normscope.core.gap_curve import search

        return search(self, factor, tolerance, progress)

    def to_dict(self) -> dict[str, Any]:
        """Both sides and why the upper one holds, as plain JSON values; without the witness's points."""
        return {
            "schema": self.schema,
            **plain_sides(self.lower, self.upper),
            "certified": self.upper is not None,
            "reason": self.reason,
            "causes": list(self.certificate.causes),
            "advice": self.certificate.advice,
            "rounding": self.certificate.rounding,
            "notes": list(self.notes),
            "certificate": [
                {**asdict(step), "gain": None, "gain_log10": json_number(step.gain.log10)} for step in self.certificate.steps
            ],
            "gap": [asdict(share) for share in self.gap],
            "everywhere": self.everywhere,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], layers: tuple[Any, ...] = ()) -> Bracket:
        """The bracket that `to_dict` described."""
        lower, upper = read_sides(content)
        steps = tuple(
            Step(step["name"], step["path"], step["operation"], Magnitude.from_log10(float(step["gain_log10"])), step["method"])
            for step in content["certificate"]
        )
        causes, advice = tuple(content.get("causes", ())), content.get("advice", "")
        certificate = Certificate(steps, content["reason"], content["rounding"], causes, advice)
        gap = tuple(GapShare(**share) for share in content.get("gap", ()))
        everywhere = bool(content.get("everywhere", False))
        return Bracket(lower, upper, None, certificate, layers, tuple(content.get("notes", ())), gap, everywhere=everywhere)

    def render(self) -> Text:
        text = Text.of_lines([*self.lines(), *self.about_gap()])
        for note in (*self.notes, *([WORST_INPUT] if self.everywhere else [])):
            text.append("\n").append(visible(f"· {note}"), "dim")
        return text

    @property
    def loose(self) -> bool:
        """Whether the upper side is finite and says nothing about the network."""
        return self.upper is not None and self.upper.finite and bool(self.lower) and self.ratio > LOOSE

    def about_gap(self) -> list[str]:
        """What costs most, where both sides are apart."""
        return [f"{self.gap[0]}"] if self.gap and self.ratio > WIDE else []

    def lines(self) -> list[str]:
        """Both sides in words, and why one is infinite or absent."""
        if self.upper is None:
            below = f"at least {self.lower} (witnessed)" if self.lower else "no lower bound"
            why = [f"  {line}" for line in (*self.certificate.causes, self.certificate.advice) if line]
            return [f"Lipschitz constant (ℓ2): {below}", f"upper bound: none: {self.reason}", *why]
        both = f"Lipschitz constant (ℓ2): {self.lower} ≤ L ≤ {self.upper}   upper certified, lower witnessed"
        return [both, f"infinite because: {self.reason}"] if self.reason else [both]

    @property
    def sides(self) -> str:
        """Both sides, and why one is infinite or absent."""
        if self.upper is None:
            return inert(f"{self.lower} ≤ L; upper none: {visible(self.reason)}")
        return inert(f"{self.lower} ≤ L ≤ {self.upper}" + (f" ({visible(self.reason)})" if self.reason else ""))

    def __str__(self) -> str:
        if not self.loose:
            return self.sides
        advice = "region= asks about inputs like yours" if self.everywhere else "see .notes, or try a smaller region"
        return f"{self.sides} ({TOO_LOOSE}; {advice})"
