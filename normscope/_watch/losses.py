"""The losses that a loop gives, and the steps that they belong to."""

from __future__ import annotations

import math
from typing import Any

import torch

from normscope._watch.scaling import active_scaler
from normscope._watch.unrecorded import aside


class Losses:
    """A loop gives its losses always before or always after the optimizer's step. The first step settles which.

    after: None until then. An iteration that makes no step, because a GradScaler skips it, gives a loss as well. That loss
    belongs to no step: before the step the next one takes its place, and after it only the first one counts. Loss and accuracy
    may come in two calls before the step.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self.after: bool | None = None
        self.coming: dict[str, Any] = {}  # loss and accuracy of the step to come
        self.scaled = False  # whether a GradScaler was seen, which may skip a step
        self._scale = None if scaler is None or scaler._scale is None else scale_of(scaler)  # when the recording began
        self._calls, self._passes = 0, 0  # before the first step, and training passes when the last call came
        self._latest: int | None = None  # the step whose loss came last, after it

    def given(self, steps: int, step: int, passes: int, values: dict[str, Any]) -> bool:
        """Whether these values are of the last step that was made, `step`. steps, passes: how many there were so far."""
        if self.after is None and steps:
            self.after = True
        if not self.after:
            self._calls, self._passes = self._calls + 1, passes
            self.coming = (self.coming if self.coming.keys().isdisjoint(values) else {}) | copied(values)
            return False
        known, self._latest = self._latest == step, step if "loss" in values else self._latest
        return not known

    def settle(self, passes: int, scaler: torch.amp.GradScaler | None) -> None:
        """At the first step. The calls came after iterations without a step if a GradScaler has skipped as many.

        Its scale tells how many, and a training pass must have begun since the last call, unless passes are not seen,
        as those of a compiled model. scaler: found where it calls the optimizer, if it is not given.
        """
        scaler = scaler or active_scaler()
        self.scaled = scaler is not None and scaler.is_enabled()
        if self.after is None and self._calls:
            skipped = skipped_steps(scaler, self._scale) if scaler is not None and self.scaled else 0
            self.after = self._calls <= skipped and (passes > self._passes or not passes)
            self.coming = {} if self.after else self.coming


@aside
def copied(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that the loop may still write into."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


@aside
def detached(**values: Any) -> dict[str, Any]:
    known = ((name, value) for name, value in values.items() if value is not None)
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in known}


@aside
def complete(row: dict[str, Any], name: str, value: Any) -> None:
    """Put a number that came after the step into its row."""
    row[name] = float(value)
    row["loss_given"] |= name == "loss"


@aside
def scale_of(scaler: torch.amp.GradScaler) -> float:
    return float(scaler._scale)


def skipped_steps(scaler: torch.amp.GradScaler, before: float | None) -> int:
    """How many times in a row its scale was reduced: log(scale before/scale)/log(1/backoff factor). before: None for its first."""
    if scaler._scale is None:
        return 0
    first, scale, factor = scaler._init_scale if before is None else before, scale_of(scaler), scaler._backoff_factor
    if not (0 < scale < math.inf and 0 < first < math.inf and 0 < factor < 1):
        return 0
    return round((math.log(first) - math.log(scale)) / -math.log(factor))
