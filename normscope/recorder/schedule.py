"""Which steps are sampled, by one process or by several that agree without waiting for each other."""

from __future__ import annotations

from typing import Any, Protocol

from normscope.recorder.budget import Budget

LEAD = 3  # steps between the announcement and the sample: more than processes that train together can be apart


class Schedule(Protocol):
    def sampled(self, step: int) -> bool:
        """Whether the step of this number, about to begin, is sampled; asked once a step, in order."""


class OwnSchedule:
    """One process: whenever the budget allows."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def sampled(self, step: int) -> bool:
        return self.budget.due(step)


class SharedSchedule:
    """Rank 0 posts the next sampled step to the group's store; the others look whether one is there, and never wait.

    A process that comes late to an announcement lets that step pass.
    """

    def __init__(self, budget: Budget, rank: int, store: Any) -> None:
        self.budget, self.rank, self.store = budget, rank, store
        self.number, self.announced = 0, -1  # of announcements; the step of the last one

    def sampled(self, step: int) -> bool:
        if step > self.announced:
            self._announce(step) if self.rank == 0 else self._listen(step)
        return step == self.announced

    def _announce(self, step: int) -> None:
        if self.budget.due(step + LEAD):
            self.announced = step + LEAD
            self.store.set(f"sample/{self.number}", str(self.announced))
            self.number += 1

    def _listen(self, step: int) -> None:
        while self.announced < step and self.store.check([key := f"sample/{self.number}"]):
            self.announced = int(self.store.get(key))
            self.number += 1
