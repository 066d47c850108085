"""Bounded losses, one value per sample: the named ones, and any callable with the bound that its author states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch

from normscope.core.answers import has_answer
from normscope.core.errors import InputError
from normscope.core.rounding import root

RAMP_MARGIN = 1.0
SLACK = 1e-5  # relative: what rounding may add to a loss at its bound

SCORE_SLOPE = root(2)  # of a margin and of log-odds in the outputs
SCORE_ROUNDING = 2.0**-40  # relative: float64 arithmetic on scores, with room for thousands of classes

Values = Callable[[Any, Any], torch.Tensor]
Steepest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of the ends of an interval


@dataclass(frozen=True)
class Loss:
    """f(outputs, targets) in [0, bound], one value per sample.

    slope: its Lipschitz constant in one sample's outputs, in ℓ2, for every target; infinite where it jumps, None if unknown.
    classes: whether targets are the indices of outputs.
    score, steepest: a loss that is a function of one score s(z, y), itself √2-Lipschitz in z, and the largest slope of that
    function on an interval of scores; what the loss can do near given outputs follows from them.
    """

    name: str
    bound: float
    function: Values
    slope: float | None = None
    classes: bool = False
    score: Values | None = None
    steepest: Steepest | None = None

    @classmethod
    def of_score(
        cls, name: str, bound: float, score: Values, profile: Callable[[torch.Tensor], torch.Tensor], steepest: Steepest
    ) -> Loss:
        """A loss profile(score(outputs, classes))."""
        everywhere = torch.tensor(math.inf, dtype=torch.float64)
        slope = SCORE_SLOPE * float(steepest(-everywhere, everywhere))
        return cls(name, bound, lambda outputs, targets: profile(score(outputs, targets)), slope, True, score, steepest)

    def slope_near(self, outputs: torch.Tensor, targets: torch.Tensor, distance: float) -> torch.Tensor:
        """Its Lipschitz constant in z on ‖z − outputs‖ ≤ distance, one per row; float64 outputs, rounded up."""
        if self.score is None or self.steepest is None:
            return torch.full((len(outputs),), math.inf if self.slope is None else self.slope, dtype=torch.float64)
        score = self.score(outputs, targets)
        reach = SCORE_SLOPE * distance + SCORE_ROUNDING * (1 + score.abs() + outputs.abs().amax(1))
        slope = SCORE_SLOPE * self.steepest(score - reach, score + reach) * (1 + SCORE_ROUNDING)
        return slope.where(outputs.isfinite().all(1), math.inf)

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise InputError(f"the loss bound C must be a finite number above 0, got {self.bound}")

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The values (samples,), on the tape of the outputs; every one is checked to lie in [0, bound]."""
        if self.classes:
            check_classes(outputs, targets)
        values = self.function(outputs, targets)
        self._check(values, targets)
        return values

    def _check(self, values: Any, targets: Any) -> None:
        samples = len(targets) if isinstance(targets, torch.Tensor) and targets.dim() else None
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or samples not in (None, len(values)):
            shape = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise InputError(f"loss(outputs, targets) must return one value per sample, got {shape}: leave out its reduction")
        outside = ~((values >= -SLACK * self.bound) & (values <= self.bound * (1 + SLACK)))  # NaN is outside
        if bool(outside.any()):
            value = float(values.detach()[outside][0])
            advice = "look for nan in the data and the weights" if math.isnan(value) else "state a loss_bound that holds"
            raise InputError(f"the {self.name} loss is {value:.6g} at a sample, not in [0, {self.bound:g}]: {advice}")


def check_classes(outputs: Any, targets: Any) -> None:
    """Outputs are (samples, classes), at least two of them, and targets index them."""
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise InputError(f"this loss takes outputs of shape (samples, classes), at least two classes, got {shape}")
    if not is_labels(targets) or targets.shape != outputs.shape[:1]:
        shape = f"{targets.dtype} of shape {tuple(targets.shape)}" if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise InputError(f"this loss takes integer targets of shape ({len(outputs)},), got {shape}")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise InputError(f"targets from {int(targets.min())} to {int(targets.max())} do not index {outputs.shape[1]} outputs")


def is_labels(targets: Any) -> bool:
    """Whether targets are one class index a sample."""
    if not isinstance(targets, torch.Tensor) or targets.dim() != 1:
        return False
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def margins(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The right output less the largest other one, z_y − max_{j≠y} z_j; below 0 for a wrong answer, −∞ without an answer."""
    right = outputs.gather(1, targets[:, None])
    others = outputs.scatter(1, targets[:, None], -math.inf)
    return (right[:, 0] - others.amax(1)).where(_answered(outputs, right), -math.inf)


def log_odds(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """ln(p_y/(1 − p_y)) = z_y − ln Σ_{j≠y} e^{z_j} with p = softmax(z); −∞ without an answer."""
    right = outputs.gather(1, targets[:, None])
    odds = right[:, 0] - outputs.scatter(1, targets[:, None], -math.inf).logsumexp(1)
    return odds.where(_answered(outputs, right), -math.inf)


def _answered(outputs: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where NaN and overflow leave outputs that can be compared; elsewhere every loss is the largest."""
    return has_answer(outputs) & (right[:, 0] > -math.inf)


def l1() -> Loss:
    """‖softmax(z) − e_y‖₁ = 2(1 − p_y) = 2/(1 + e^s) of the log-odds s, with C = 2; its slope in s is 2p(1 − p) ≤ 1/2."""

    def steepest(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        nearest = torch.zeros_like(low).clamp(low, high)  # to p = ½
        return 2 * torch.sigmoid(nearest) * torch.sigmoid(-nearest)

    return Loss.of_score("l1", 2.0, log_odds, lambda score: 2 * torch.sigmoid(-score), steepest)


def zero_one() -> Loss:
    """1 where another output is at least as large as the right one, with C = 1. It jumps where the margin is 0."""

    def steepest(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(low).masked_fill((low <= 0) & (high > 0), math.inf)

    return Loss.of_score("zero-one", 1.0, margins, lambda score: (score <= 0).to(score.dtype), steepest)


def ramp(margin: float = RAMP_MARGIN) -> Loss:
    """min(1, max(0, 1 − (z_y − max_{j≠y} z_j)/γ)), with C = 1: at least the zero-one loss."""
    if not 0 < margin < math.inf:
        raise InputError(f"the margin of a ramp must be a finite number above 0, got {margin}")

    def steepest(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(low).masked_fill((low < margin) & (high > 0), 1 / margin)

    name = "ramp" if margin == RAMP_MARGIN else f"ramp of margin {margin:g}"
    return Loss.of_score(name, 1.0, margins, lambda score: (1 - score / margin).clamp(0, 1), steepest)


NAMED: dict[str, Callable[[], Loss]] = {"l1": l1, "zero-one": zero_one, "ramp": ramp}


def loss_of(loss: Union[str, Loss, Values], loss_bound: float | None = None) -> Loss:
    """The loss of a name, one made by this module, or a callable with its bound."""
    if isinstance(loss, str):
        if loss not in NAMED:
            raise InputError(f"loss must be one of {', '.join(NAMED)}, or a callable with loss_bound=, got {loss!r}")
        loss = NAMED[loss]()
    if isinstance(loss, Loss):
        if loss_bound is not None and loss_bound != loss.bound:
            raise InputError(f"the {loss.name} loss is at most {loss.bound:g}: leave out loss_bound, or give a callable")
        return loss
    if not callable(loss):
        raise InputError(f"loss must be one of {', '.join(NAMED)}, or a callable with loss_bound=, got {type(loss).__name__}")
    if loss_bound is None:
        raise InputError("a loss of your own needs loss_bound=C, the largest value that it can take")
    return Loss(getattr(loss, "__name__", type(loss).__name__), float(loss_bound), loss)
