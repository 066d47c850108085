"""When to look: as often as a share of wall time allows, by measured cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from normscope.core.errors import InputError

GROWTH = 1.1
BESIDE = 1.25  # what training loses over what the recorder times of itself: caches grow cold, memory is asked for anew


class Budget:
    """Keeps BESIDE · Σ cost ≤ share · (wall time since the first step), by waiting until the next sample fits.

    every: a fixed cadence instead. The first sample (reading the graph, first power iterations) is the set-up and counts apart.
    dense: so many steps at the beginning are all sampled; that counts apart, too. After them there is a sample at least whenever
    the number of steps has grown by GROWTH, whatever it costs: 24 in a thousand steps' tenfold, and the last is never long ago.
    """

    def __init__(
        self,
        share: float = 0.01,
        every: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        dense: int = 0,
    ) -> None:
        if not 0 < share <= 1:
            raise InputError(f"budget must be a share of wall time above 0 and at most 1, got {share}")
        if every is not None and every < 1:
            raise InputError(f"every must be a number of steps, at least 1, got {every}")
        if dense < 0:
            raise InputError(f"dense must be a number of steps, at least 0, got {dense}")
        self.share, self.every, self.clock, self.dense = share, every, clock, dense
        self.begun, self.dense_now, self.dense_cost, self.dense_time = 0, dense > 0, 0.0, 0.0
        self._latest = math.inf if not dense else float(dense)  # number of steps at which a sample is taken in any case
        self.setup, self.spent, self.started = 0.0, 0.0, clock()
        self.elsewhere: Callable[[], float] = lambda: 0.0  # what other threads have spent for it
        self._elsewhere_before = 0.0
        self.expected = 0.0  # of the next sample
        self._of_sample = 0.0
        self._depth = 0

    @contextmanager
    def charged(self, once: bool = False) -> Iterator[None]:
        """Time spent inside counts as cost, once where charges nest. once: the next sample will not cost it again."""
        self._depth += 1
        start = self.clock()
        try:
            yield
        finally:
            self._depth -= 1
            seconds = self.clock() - start
            if once:
                self._of_sample -= seconds
            if self._depth == 0:
                self.charge(seconds)
                self._of_sample += seconds

    def measure(self, function: Callable[..., None], *args: Any) -> None:
        """Call it; its time counts as with `charged`, for what is called many times in a step."""
        self._depth += 1
        start = self.clock()
        try:
            function(*args)
        finally:
            self._depth -= 1
            if self._depth == 0:
                seconds = self.clock() - start
                self.charge(seconds)
                self._of_sample += seconds

    def charge(self, seconds: float) -> None:
        """Count time that is not part of a sample."""
        self.spent += seconds

    def end_setup(self) -> None:
        """What was spent so far was set-up; from now on the share counts."""
        self.setup, self.spent, self.started = self.setup + self.spent, 0.0, self.clock()
        self._elsewhere_before = self.elsewhere()
        self.expected, self._of_sample = self._of_sample, 0.0

    def end_sample(self) -> None:
        """A sample is complete: the next is expected to cost as much."""
        self.expected, self._of_sample = self._of_sample, 0.0

    def due(self, step: int) -> bool:
        """Whether the step of this number, about to begin, is to be sampled."""
        if self.every is not None and step - self.begun > self.dense:
            return step % self.every == 0
        number = step - self.begun
        affordable = BESIDE * (self.total + self.expected) <= self.share * self.elapsed
        due = number <= self.dense or number >= self._latest or affordable
        if due and self.dense:
            self._latest = max(number * GROWTH, self.dense)
        return due

    def fixed(self, step: int) -> bool:
        """Whether it is known beforehand, whatever a sample costs, that this step is sampled or not."""
        return self.every is not None or step - self.begun <= self.dense

    def end_dense(self) -> None:
        """The steps that are all sampled are over; from now on the share counts."""
        self.dense_now, self.dense_cost, self.dense_time = False, self.total, self.elapsed
        self.spent, self.started, self._elsewhere_before = 0.0, self.clock(), self.elsewhere()

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    @property
    def total(self) -> float:
        """Seconds spent since the set-up, on every thread."""
        return self.spent + self.elsewhere() - self._elsewhere_before

    @property
    def overhead(self) -> float:
        """Share of the wall time since the set-up that was spent here."""
        return self.total / self.elapsed if self.elapsed > 0 else 0.0
