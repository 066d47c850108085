"""What is looked at on every step, sampled or not: the loss that the loop gives, the norms of the gradients, the learning rate.

One fused norm per step. On an accelerator nothing waits for it: numbers stay on the device, and now and then a copy of them is
started that is read when it has arrived. The last steps are kept, and written as rows when something happens, so that a report can
show where it began.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from normscope._watch.budget import Budget
from normscope._watch.layers import Layer, is_plain
from normscope._watch.unrecorded import unrecorded
from normscope._watch.weights import local, norms
from normscope.findings.finding import Finding
from normscope.findings.over_time import Chronicle
from normscope.findings.rows import STEP_RULES

HOST = ("cpu",)  # devices whose numbers can be read without waiting
KEPT = 50  # steps, for when something happens
TOGETHER = 32  # readings that are copied from an accelerator at once
SHARE, FREE = 0.5, 1.0  # of the budget, that looking at gradients may take, and seconds of it in any case


@dataclass(frozen=True)
class Reading:
    """A loss, or the norms of the gradients of the named parameters, of one step."""

    step: int
    value: torch.Tensor
    names: list[str] | None = None  # of gradients
    learning_rate: float = math.nan


class EveryStep:
    """Judges each reading as soon as it is on the host. said: gets what begins or ends to hold, in the order of steps."""

    def __init__(
        self, layers: Sequence[Layer], rows: Sequence[Mapping[str, Any]], budget: Budget, said: Callable[[Finding], None],
        since: int = 0,
    ) -> None:  # fmt: skip
        self.chronicle = Chronicle(rows, STEP_RULES, since)
        self.places = {layer.parameter: index for index, layer in enumerate(layers) if layer.parameter}
        self.layers, self.budget, self.said = len(layers), budget, said
        self.losses_read = self.gradients_read = 0
        self.latest: tuple[int, torch.Tensor] | None = None  # the last step whose gradients were looked at
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._spent = 0.0
        self._names: Sequence[str] = ()  # of the last gradients, which of them are of layers, and of which
        self._known: list[int] = []
        self._at: list[int] = []
        self._waiting: deque[Reading] = deque()  # on a device
        self._landing: tuple[list[Reading], torch.Tensor, Any] | None = None  # a copy under way, and the event that ends it

    def affordable(self) -> bool:
        """Whether the gradients of this step are looked at: always, unless that takes more than its share of a long time."""
        return self.budget.dense_now or self._spent <= FREE + SHARE * self.budget.share * self.budget.elapsed

    def gradients(self, step: int, parameters: Mapping[str, torch.Tensor], learning_rate: Any) -> None:
        """Of a step that is about to be made, as the optimizer is given them: after clipping and unscaling."""
        start = self.budget.clock()
        names, found = [], []
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is not None and (type(gradient) is torch.Tensor or is_plain(gradient)):
                names.append(name)
                found.append(gradient)
        if found:
            with unrecorded():
                vector = norms([local(gradient) for gradient in found])
            rate = float(learning_rate) if isinstance(learning_rate, (int, float)) else math.nan  # a tensor would have to be read
            self.latest = step, vector
            self._read(Reading(step, vector, names, rate))
        self._spent += self.budget.clock() - start

    def loss(self, step: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        if value.numel() != 1:
            return
        if value.device.type in HOST and not self._waiting:
            self._judge_loss(step, value.item())
        else:
            self._read(Reading(step, value.detach().reshape(1)))

    def kept(self, after: int, before: int) -> list[dict[str, Any]]:
        """Rows of the last steps between these two that were not sampled."""
        return [row for step, row in self._kept.items() if after < step < before]

    def finish(self) -> None:
        """Wait for what is still on a device: training is over."""
        if self._landing is not None:
            readings, _, _ = self._landing
            self._waiting.extendleft(reversed(readings))
            self._landing = None
        while self._waiting:
            reading = self._waiting.popleft()
            self._judge(reading, reading.value.double().cpu().numpy())

    def _read(self, reading: Reading) -> None:
        if reading.value.device.type in HOST and not self._waiting:
            self._judge(reading, reading.value.numpy())
            return
        self._waiting.append(reading)
        if self._landing is not None:
            readings, copied, event = self._landing
            if not event.query():
                return
            self._landing = None
            ends = np.cumsum([one.value.numel() for one in readings])[:-1]
            for one, values in zip(readings, np.split(copied.numpy(), ends), strict=True):
                self._judge(one, values)
        if len(self._waiting) >= TOGETHER:
            self._land()

    def _land(self) -> None:
        """Start a copy of all that waits."""
        readings, device = list(self._waiting), self._waiting[0].value.device
        self._waiting.clear()
        with unrecorded():
            together = torch.cat([reading.value.to(device=device, dtype=torch.float32) for reading in readings])
            copied = torch.empty(together.shape, dtype=torch.float32, pin_memory=device.type == "cuda")
            copied.copy_(together, non_blocking=True)
        event = torch.Event(device=device)
        event.record()
        self._landing = readings, copied, event

    def _judge(self, reading: Reading, values: np.ndarray) -> None:
        if reading.names is None:
            self._judge_loss(reading.step, float(values[0]))
        else:
            self.gradients_read += 1
            row = self._of_gradients(reading.names, np.asarray(values, np.float64))
            self._look(reading.step, row | {"learning_rate": reading.learning_rate})

    def _judge_loss(self, step: int, loss: float) -> None:
        self.losses_read += 1
        self._look(step, {"loss": loss, "loss_given": True})

    def _look(self, step: int, row: dict[str, Any]) -> None:
        row["step"] = step
        kept = self._kept.get(step)
        if kept is None:
            kept = self._kept[step] = {"time": time.time()}
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        kept.update(row, losses_read=self.losses_read, gradients_read=self.gradients_read)
        for finding in self.chronicle.look(row):
            self.said(finding)

    def _of_gradients(self, names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
        if names != self._names:  # seldom: the same parameters have gradients in every step
            known = [index for index, name in enumerate(names) if name in self.places]
            self._names, self._known, self._at = names, known, [self.places[names[index]] for index in known]
        held, seen = np.full(self.layers, np.nan), np.zeros(self.layers, bool)
        held[self._at], seen[self._at] = values[self._known], True
        with np.errstate(all="ignore"):
            total = math.sqrt(values @ values)
        return {"total_gradient_norm": total, "gradient_norm": held, "gradient_seen": seen}
