"""A constant between a certified upper bound and a lower bound that has a witness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.core.errors import InternalError
from normscope.core.magnitude import INFINITY, Magnitude
from normscope.core.rendering import Rendered, Text
from normscope.core.text import inert, visible

if TYPE_CHECKING:
    import torch


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
    """Why the upper bound holds: every step in order, and the reason where it is infinite."""

    steps: tuple[Step, ...] = ()
    reason: str = ""
    rounding: float = 0.0  # relative inflation that covers the rounding of the composition itself

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
class Bracket(Rendered):
    """lower ≤ truth ≤ upper: `upper` is certified, `lower` is a difference quotient that `witness` attains.

    notes: what a reader must know beside the numbers, such as inputs that were held fixed.
    """

    lower: Magnitude
    upper: Magnitude
    witness: Witness | None = None
    certificate: Certificate = field(default_factory=Certificate)
    layers: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lower > self.upper:
            raise InternalError(f"lower bound {self.lower:.17} exceeds upper bound {self.upper:.17}")

    @property
    def reason(self) -> str:
        """Why the upper bound is infinite, or an empty string."""
        return self.certificate.reason

    @property
    def ratio(self) -> Magnitude:
        """upper / lower: how far apart the two sides are."""
        return self.upper / self.lower if self.lower else INFINITY

    def __contains__(self, value: float | Magnitude) -> bool:
        return self.lower <= Magnitude(value) <= self.upper

    def render(self) -> Text:
        text = Text(f"Lipschitz constant (ℓ2): {self}   upper certified, lower witnessed")
        for note in self.notes:
            text.append("\n").append(visible(f"· {note}"), "dim")
        return text

    def __str__(self) -> str:
        text = f"{self.lower} ≤ L ≤ {self.upper}"
        return inert(f"{text} ({visible(self.reason)})") if self.reason else text
