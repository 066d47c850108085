"""Bounded losses, one value a sample: the named ones, and any callable with the bound that its author states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch

from normscope.core.errors import InputError

RAMP_MARGIN = 1.0
SLACK = 1e-5  # relative: what rounding may add to a loss at its bound

Values = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """f(outputs, targets) in [0, bound], one value a sample.

    slope: its Lipschitz constant in one sample's outputs, in ℓ2, for every target; infinite where it jumps, None if unknown.
    classes: whether targets are the indices of outputs.
    """

    name: str
    bound: float
    function: Values
    slope: float | None = None
    classes: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise InputError(f"the loss bound C is a finite number above 0, not {self.bound}")

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
            raise InputError(f"loss(outputs, targets) returns one value a sample, not {shape}: leave out its reduction")
        outside = ~((values >= -SLACK * self.bound) & (values <= self.bound * (1 + SLACK)))  # NaN is outside
        if bool(outside.any()):
            value = float(values.detach()[outside][0])
            advice = "look for nan in the data and the weights" if math.isnan(value) else "state a loss_bound that holds"
            raise InputError(f"the {self.name} loss is {value:.6g} at a sample, not in [0, {self.bound:g}]: {advice}")


def check_classes(outputs: Any, targets: Any) -> None:
    """Outputs are (samples, classes), at least two of them, and targets index them."""
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise InputError(f"this loss takes outputs of shape (samples, classes), at least two classes, not {shape}")
    if not is_labels(targets) or targets.shape != outputs.shape[:1]:
        shape = f"{targets.dtype} of shape {tuple(targets.shape)}" if isinstance(targets, torch.Tensor) else type(targets).__name__
        raise InputError(f"this loss takes integer targets of shape ({len(outputs)},), not {shape}")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise InputError(f"targets from {int(targets.min())} to {int(targets.max())} do not index {outputs.shape[1]} outputs")


def is_labels(targets: Any) -> bool:
    """Whether targets are one class index a sample."""
    if not isinstance(targets, torch.Tensor) or targets.dim() != 1:
        return False
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def margins(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The right output less the largest other one, z_y − max_{j≠y} z_j; below 0 for a wrong answer."""
    right = outputs.gather(1, targets[:, None])
    others = outputs.scatter(1, targets[:, None], -math.inf)
    return right[:, 0] - others.amax(1)


def l1() -> Loss:
    """‖softmax(z) − e_y‖₁ = 2(1 − p_y), with C = 2.

    Its gradient in z is 2 p_y (p − e_y), of norm at most 2√2 p_y(1 − p_y) ≤ 1/√2 (docs/laws.md).
    """

    def values(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        others = torch.softmax(outputs, 1).scatter(1, targets[:, None], 0.0)  # 1 − p_y without cancellation
        return 2 * others.sum(1)

    return Loss("l1", 2.0, values, math.sqrt(0.5) * (1 + 2**-50))


def zero_one() -> Loss:
    """1 where another output is at least as large as the right one, with C = 1; it jumps, so it has no slope."""
    return Loss("zero-one", 1.0, lambda outputs, targets: (margins(outputs, targets) <= 0).to(outputs.dtype), math.inf)


def ramp(margin: float = RAMP_MARGIN) -> Loss:
    """min(1, max(0, 1 − (z_y − max_{j≠y} z_j)/γ)), with C = 1: at least the zero-one loss, and √2/γ-Lipschitz in z."""
    if not 0 < margin < math.inf:
        raise InputError(f"the margin of a ramp is a finite number above 0, not {margin}")

    def values(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (1 - margins(outputs, targets) / margin).clamp(0, 1)

    name = "ramp" if margin == RAMP_MARGIN else f"ramp of margin {margin:g}"
    return Loss(name, 1.0, values, math.sqrt(2) / margin * (1 + 2**-50))


NAMED: dict[str, Callable[[], Loss]] = {"l1": l1, "zero-one": zero_one, "ramp": ramp}


def loss_of(loss: Union[str, Loss, Values], loss_bound: float | None = None) -> Loss:
    """The loss of a name, one made by this module, or a callable with its bound."""
    if isinstance(loss, str):
        if loss not in NAMED:
            raise InputError(f"loss is one of {', '.join(NAMED)}, or a callable with loss_bound=; not {loss!r}")
        loss = NAMED[loss]()
    if isinstance(loss, Loss):
        if loss_bound is not None and loss_bound != loss.bound:
            raise InputError(f"the {loss.name} loss is at most {loss.bound:g}: leave out loss_bound, or give a callable")
        return loss
    if not callable(loss):
        raise InputError(f"loss is one of {', '.join(NAMED)}, or a callable with loss_bound=; not a {type(loss).__name__}")
    if loss_bound is None:
        raise InputError("a loss of your own needs loss_bound=C, the largest value that it can take")
    return Loss(getattr(loss, "__name__", type(loss).__name__), float(loss_bound), loss, classes=False)
