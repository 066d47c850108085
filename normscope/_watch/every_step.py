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
    names: tuple[str, ...] | None = None  # of gradients
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
        self._waiting: deque[Reading] = deque()  # on a device
        self._landing: tuple[list[Reading], torch.Tensor, Any] | None = None  # a copy under way, and the event that ends it

    def affordable(self) -> bool:
        """Whether the gradients of this step are looked at: always, unless that takes more than its share of a long time."""
        return self.budget.dense_now or self._spent <= FREE + SHARE * self.budget.share * self.budget.elapsed

    def gradients(self, step: int, parameters: Mapping[str, torch.Tensor], learning_rate: Any) -> None:
        """Of a step that is about to be made, as the optimizer is given them: after clipping and unscaling."""
        start = self.budget.clock()
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None and is_plain(p.grad)}
        if found:
            with unrecorded():
                vector = norms([local(gradient) for gradient in found.values()])
            rate = float(learning_rate) if isinstance(learning_rate, (int, float)) else math.nan  # a tensor would have to be read
            self.latest = step, vector
            self._read(Reading(step, vector, tuple(found), rate))
        self._spent += self.budget.clock() - start

    def loss(self, step: int, value: Any) -> None:
        given = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        if given.numel() == 1:
            self._read(Reading(step, given.reshape(1)))

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
            self._judge(reading, reading.value.double().numpy())
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
        row: dict[str, Any]
        if reading.names is None:
            self.losses_read += 1
            row = {"loss": float(values[0]), "loss_given": True}
        else:
            self.gradients_read += 1
            row = self._of_gradients(reading.names, values) | {"learning_rate": reading.learning_rate}
        kept = self._kept.setdefault(reading.step, {"step": reading.step, "time": time.time()})
        kept |= row | {"losses_read": self.losses_read, "gradients_read": self.gradients_read}
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        for finding in self.chronicle.look({"step": reading.step, **row}):
            self.said(finding)

    def _of_gradients(self, names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
        held, seen = np.full(self.layers, np.nan), np.zeros(self.layers, bool)
        for name, value in zip(names, values, strict=True):
            if (place := self.places.get(name)) is not None:
                held[place], seen[place] = value, True
        with np.errstate(all="ignore"):
            total = float(np.sqrt(np.square(values).sum()))
        return {"total_gradient_norm": total, "gradient_norm": held, "gradient_seen": seen}
