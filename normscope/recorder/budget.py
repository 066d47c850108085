"""When to look: as often as a share of wall time allows, by measured cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from normscope.core.errors import InputError


class Budget:
    """Keeps Σ cost ≤ share · (wall time since the first step), by waiting until the next sample fits.

    every: a fixed cadence instead. The first sample (reading the graph, first power iterations) is the set-up and counts apart.
    """

    def __init__(self, share: float = 0.01, every: int | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0 < share <= 1:
            raise InputError(f"budget is a share of wall time, above 0 and at most 1, not {share}")
        if every is not None and every < 1:
            raise InputError(f"every is a number of steps, at least 1, not {every}")
        self.share, self.every, self.clock = share, every, clock
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
        if self.every is not None:
            return step % self.every == 0
        return self.total + self.expected <= self.share * self.elapsed

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
