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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from normscope._watch.budget import BESIDE, Budget
from normscope._watch.layers import WatchedLayer, is_plain
from normscope._watch.preparation import given_to
from normscope._watch.scaling import may_skip, scale_left_to
from normscope._watch.transfer import HOST
from normscope._watch.unrecorded import aside
from normscope._watch.weights import local, norms
from normscope.findings.finding import Finding
from normscope.findings.over_time import Chronicle
from normscope.findings.rows import STEP_RULES

KEPT = 50  # steps, for when something happens
CALM = 8  # readings on the host that are judged together
TOGETHER = 32  # readings that are copied from an accelerator at once
SHARE, FREE = 0.5, 1.0  # of the budget, that looking at gradients may take, and seconds of it in any case


@dataclass(frozen=True)
class Reading:
    """A loss, or the norms of the gradients of the named parameters, of one step."""

    step: int
    value: torch.Tensor
    names: list[str] | None = None  # of gradients
    learning_rate: float = math.nan
    skippable: bool = False  # the optimizer made no step if one of them is NaN
    time: float = field(default_factory=time.time)


class EveryStep:
    """Judges the readings in their order. said: gets what begins or ends to hold.

    On the host one is judged at once where it is not finite or above all of its kind that were judged last, else some together,
    which is cheaper. So a jump is found at its step, and a slow change some steps late, with the step at which it began.
    """

    def __init__(
        self, layers: Sequence[WatchedLayer], rows: Sequence[Mapping[str, Any]], budget: Budget, said: Callable[[Finding], None],
        since: int = 0,
    ) -> None:  # fmt: skip
        self.chronicle = Chronicle(rows, STEP_RULES, since)
        self.places = {layer.parameter: index for index, layer in enumerate(layers) if layer.parameter}
        self.layers, self.budget, self.said = len(layers), budget, said
        self.losses_read = self.gradients_read = 0
        self._latest: tuple[int, torch.Tensor] | None = None  # the last step whose gradients were looked at, and their norms
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._spent = 0.0
        self._names: Sequence[str] = ()  # of the last gradients, which of them are of layers, and of which
        self._known: list[int] = []
        self._at: list[int] = []
        self._calm: list[tuple[Reading, np.ndarray]] = []  # on the host, not judged yet
        self._highest: dict[bool, float] = {}  # of the losses, and of the gradients, that were judged last
        self._waiting: deque[Reading] = deque()  # on a device
        self._landing: tuple[list[Reading], torch.Tensor, Any] | None = None  # a copy under way, and the event that ends it

    def affordable(self) -> bool:
        """Whether the gradients of this step are looked at: always, unless that takes more than its share of a long time."""
        return self.budget.dense_now or BESIDE * self._spent <= FREE + SHARE * self.budget.share * self.budget.elapsed

    @aside
    def gradients(self, step: int, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Of a step, as the optimizer uses them: after clipping and unscaling, and of the parameters that it holds."""
        start = self.budget.clock()
        learning_rate, scale, skippable = optimizer.param_groups[0].get("lr"), scale_left_to(optimizer), may_skip(optimizer)
        names, found = [], []
        for name, parameter in given_to(optimizer, parameters).items():
            gradient = parameter.grad
            if gradient is not None and (type(gradient) is torch.Tensor or is_plain(gradient)):
                names.append(name)
                found.append(gradient)
        if found:
            vector = norms([local(gradient) for gradient in found])
            if scale is not None:
                vector = vector / torch.as_tensor(scale).to(vector.device, non_blocking=True)
            if skippable:
                vector = vector.where(vector.isfinite(), math.nan)
            rate = float(learning_rate) if isinstance(learning_rate, (int, float)) else math.nan  # a tensor would have to be read
            self._latest = step, vector
            self._read(Reading(step, vector, names, rate, skippable))
        seconds = self.budget.clock() - start
        self._spent += seconds
        self.budget.charge(seconds)

    @aside
    def loss(self, step: int, value: Any) -> None:
        start = self.budget.clock()
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        if value.numel() == 1:
            self._read(Reading(step, value.detach().reshape(1)))
        self.budget.charge(self.budget.clock() - start)

    @property
    def counts(self) -> dict[str, int]:
        return {"losses_read": self.losses_read, "gradients_read": self.gradients_read}

    def norms_of(self, step: int) -> torch.Tensor | None:
        """Of the gradients of the last step, if they were looked at."""
        return self._latest[1] if self._latest is not None and self._latest[0] == step else None

    def kept(self, after: int, before: int) -> list[dict[str, Any]]:
        """Rows of the last steps between these two that were not sampled."""
        self.catch_up()
        return [row for step, row in self._kept.items() if after < step < before]

    def catch_up(self) -> None:
        """Judge all that is on the host."""
        calm, self._calm = self._calm, []
        highest: dict[bool, float] = {}
        for reading, values in calm:
            size, of_loss = self._judge(reading, values), reading.names is None
            highest[of_loss] = max(size, highest.get(of_loss, -math.inf))
        self._highest |= highest

    @aside
    def finish(self) -> None:
        """Wait for what is still on a device: training is over."""
        self.catch_up()
        if self._landing is not None:
            readings, _, _ = self._landing
            self._waiting.extendleft(reversed(readings))
            self._landing = None
        while self._waiting:
            reading = self._waiting.popleft()
            self._judge(reading, reading.value.double().cpu().numpy())

    def _read(self, reading: Reading) -> None:
        if reading.value.device.type in HOST and not self._waiting and self._landing is None:
            values = reading.value.numpy() if reading.names is not None else np.array([reading.value.item()])  # it may change
            self._calm.append((reading, values))
            size = math.sqrt(values @ values) if reading.names is not None else values[0]
            calm = size <= self._highest.get(reading.names is None, -math.inf)
            if not calm or len(self._calm) >= CALM or self.budget.dense_now:
                self.catch_up()
            return
        self.catch_up()
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
        together = torch.cat([reading.value.to(device=device, dtype=torch.float32) for reading in readings])
        copied = torch.empty(together.shape, dtype=torch.float32, pin_memory=device.type == "cuda")
        copied.copy_(together, non_blocking=True)
        event = torch.Event(device=device)
        event.record()
        self._landing = readings, copied, event

    def _judge(self, reading: Reading, values: np.ndarray) -> float:
        """The loss, or the norm of all gradients."""
        if reading.skippable and np.isnan(values).any():
            return -math.inf
        row: dict[str, Any] = {"step": reading.step}
        if reading.names is None:
            self.losses_read += 1
            size = float(values[0])
            row |= {"loss": size, "loss_given": True}
        else:
            self.gradients_read += 1
            row |= self._of_gradients(reading.names, np.asarray(values, np.float64))
            row["learning_rate"], size = reading.learning_rate, row["total_gradient_norm"]
        kept = self._kept.get(reading.step)
        if kept is None:
            kept = self._kept[reading.step] = {"time": reading.time}
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        kept.update(row, **self.counts)
        for finding in self.chronicle.look(row):
            self.said(finding)
        return size

    def _of_gradients(self, names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
        if names != self._names:  # seldom: the same parameters have gradients in every step
            known = [index for index, name in enumerate(names) if name in self.places]
            self._names, self._known, self._at = names, known, [self.places[names[index]] for index in known]
        held, seen = np.full(self.layers, np.nan), np.zeros(self.layers, bool)
        held[self._at], seen[self._at] = values[self._known], True
        with np.errstate(all="ignore"):
            total = math.sqrt(values @ values)
        return {"total_gradient_norm": total, "gradient_norm": held, "gradient_seen": seen}
