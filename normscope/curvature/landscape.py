"""`ns.curvature.landscape`: how far the gradient can be trusted along its own direction, and which learning rates are stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope.core.codec import named, number, numbers
from normscope.core.data import Data
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.rendering import Text
from normscope.core.result import Result
from normscope.curvature.matrices import Hessian
from normscope.curvature.objective import BATCH_SIZE, Loss, Objective
from normscope.curvature.slices import Direction, Slice, slice_of

MOST_DOUBLINGS = 60


@dataclass(frozen=True, repr=False)
class Landscape(Result):
    """The loss and its gradient at θ − η∇L(θ) for several η (Santurkar, Tsipras, Ilyas & Mądry 2018).

    losses: L(θ − ηg). gradient_changes: ‖∇L(θ − ηg) − g‖, the predictiveness of the gradient (the smaller, the better).
    """

    schema = "normscope.landscape/1"

    loss: float
    gradient_norm: float
    learning_rates: np.ndarray
    losses: np.ndarray
    gradient_changes: np.ndarray
    objective: Objective | None = field(default=None, repr=False)  # None where it was read from a file

    def render(self) -> Text:
        rates, (least, greatest) = self.learning_rates, self.loss_range
        return Text.of_lines([
            f"loss {self.loss:.4g}, gradient of norm {self.gradient_norm:.4g}",
            f"at θ − η∇L(θ), η from {rates.min():.3g} to {rates.max():.3g}: loss from {least:.4g} to {greatest:.4g}, "
            f"effective β {self.smoothness:.4g}",
        ])  # fmt: skip

    @property
    def lengths(self) -> np.ndarray:
        """Distances travelled, η‖g‖."""
        return self.learning_rates * self.gradient_norm

    @property
    def smoothness(self) -> float:
        """Effective β: the largest ‖∇L(θ − ηg) − g‖ / (η‖g‖) over the learning rates; no Lipschitz constant of ∇L is less."""
        ratios = self.gradient_changes / np.maximum(self.lengths, 1e-300)
        return float(ratios.max())

    @property
    def loss_range(self) -> tuple[float, float]:
        """The least and the greatest loss met on the way."""
        return float(self.losses.min()), float(self.losses.max())

    def largest_stable_rate(self, iterations: int = 20, precision: float = 0.05) -> float:
        """The largest η for which so many steps of gradient descent do not end above the loss that they start from.

        Found by doubling and bisection of log η, as if stability were lost once and for all; infinite for a loss without curvature.
        """
        if iterations < 1 or not 0 < precision < 1:
            raise InputError(f"iterations must be at least 1 and precision between 0 and 1, got {iterations} and {precision}")
        start = float(np.median(self.learning_rates))
        low, high = start, start
        for _ in range(MOST_DOUBLINGS):
            if self._stable(low, iterations):
                break
            low /= 2
        else:
            return 0.0
        high = max(high, 2 * low)
        for _ in range(MOST_DOUBLINGS):
            if not self._stable(high, iterations):
                break
            low, high = high, 2 * high
        else:
            return math.inf
        while high > (1 + precision) * low:
            middle = math.sqrt(low) * math.sqrt(high)
            if not low < middle < high:  # neighbours
                break
            low, high = (middle, high) if self._stable(middle, iterations) else (low, middle)
        return low

    def slice(self, *directions: Direction, **options: Any) -> Slice:
        """The loss on a line or a plane through θ: see `normscope.curvature.slices.slice_of`."""
        return slice_of(self._model, *directions, **options)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        from normscope.report import curvature

        return {"landscape": partial(curvature.landscape, self)}

    def to_dict(self) -> dict[str, Any]:
        """What was measured at every learning rate."""
        return named(self, "schema", "loss", "gradient_norm", "learning_rates", "losses", "gradient_changes", "smoothness")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Landscape:
        """The landscape that `to_dict` described; it cannot be sliced, for want of the model."""
        return cls(
            loss=number(content["loss"]),
            gradient_norm=number(content["gradient_norm"]),
            learning_rates=numbers(content["learning_rates"]),
            losses=numbers(content["losses"]),
            gradient_changes=numbers(content["gradient_changes"]),
        )

    @property
    def _model(self) -> Objective:
        if self.objective is None:
            raise InputError("this landscape was read from a file: there is no model to evaluate; call ns.curvature.landscape")
        return self.objective

    def _stable(self, rate: float, iterations: int) -> bool:
        model = self._model
        point = model.point
        for _ in range(iterations):
            value, gradient = model.value_and_gradient(point)
            if not math.isfinite(value) or not bool(gradient.isfinite().all()):
                return False
            point = point - rate * gradient
        value = model.value(point)
        return math.isfinite(value) and value <= self.loss


@earlier(positional=1, batches="data")
@boundary
def landscape(
    model: nn.Module,
    loss: Loss | Sequence[Loss],
    data: Data,
    *,
    mode: str = "train",
    learning_rates: Sequence[float] | None = None,
    parameters: str | Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int = BATCH_SIZE,
    microbatch: int | None = None,
    seed: int = 0,
) -> Landscape:
    """The loss and its gradient along the gradient's direction; by default in train mode, as training meets them.

    >>> data = torch.randn(32, 4), torch.randint(3, (32,))
    >>> found = landscape(nn.Linear(4, 3), nn.functional.cross_entropy, data)
    >>> found.loss_range[0] < found.loss
    True

    learning_rates: if not given, 25 from 0.01/β to 10/β with β = gᵀHg/gᵀg, the curvature along the gradient.
    loss, data, mode, parameters, dtype, batch_size, microbatch, seed: as in `ns.hessian`.
    """
    objective = Objective(model, loss, data, mode, parameters, dtype, batch_size, microbatch, seed)
    value, gradient = objective.value_and_gradient()
    length = float(gradient.norm())
    if length == 0:
        raise InputError("the gradient is zero here, so that it has no direction to look along: move off this critical point")
    rates = np.asarray(_default_rates(objective, gradient) if learning_rates is None else learning_rates, dtype=np.float64)
    if rates.ndim != 1 or not len(rates) or not (rates > 0).all() or not np.isfinite(rates).all():
        raise InputError("learning_rates are positive numbers, at least one")
    met = [objective.value_and_gradient(objective.point - rate * gradient) for rate in rates]
    losses = np.array([other for other, _ in met])
    changes = np.array([float((moved - gradient).norm()) for _, moved in met])
    return Landscape(value, length, rates, losses, changes, objective)


def _default_rates(objective: Objective, gradient: torch.Tensor) -> np.ndarray:
    length = float(gradient.norm())
    unit = gradient / length
    curvature = abs(float(unit @ Hessian(objective, memory=0).product(unit)))
    scale = 1 / curvature if curvature * length > 1e-12 * length else 1 / length
    return scale * np.logspace(-2, 1, 25)
