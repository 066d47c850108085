"""Which steps are sampled, by one process or by several that agree without waiting for each other."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from normscope._watch.budget import Budget

NO_MORE = -1  # in place of a step
LEAD = 3  # steps between the announcement and the sample: more than processes that train together can be apart


class Schedule(Protocol):
    """Decides step by step."""

    def sampled(self, step: int) -> bool:
        """Whether the step of this number, about to begin, is sampled; asked once per step, in order."""

    def end(self) -> None:
        """This process records no more."""


class OwnSchedule:
    """One process: whenever the budget allows."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def sampled(self, step: int) -> bool:
        return self.budget.due(step)

    def end(self) -> None:
        pass


class SharedSchedule:
    """Rank 0 posts the next sampled step to the group's store; the others look whether one is there, and never wait.

    A process that comes late to an announcement lets that step pass. When rank 0 records no more, each goes by its own budget.
    """

    def __init__(self, budget: Budget, rank: int, store: Any) -> None:
        self.budget, self.rank, self.store = budget, rank, store
        self.number = 0  # of announcements
        self.announced: deque[int] = deque()  # steps, the next first
        self.own: OwnSchedule | None = None

    def sampled(self, step: int) -> bool:
        while self.announced and self.announced[0] < step:
            self.announced.popleft()
        self._announce(step + LEAD) if self.rank == 0 else self._listen(step)
        if self.own is not None and not self.announced:
            return self.own.sampled(step)
        return bool(self.announced) and self.announced[0] == step

    def _announce(self, step: int) -> None:
        """A sample that is announced has not been paid for yet, so under a budget there is one at a time."""
        if (self.budget.fixed(step) or not self.announced) and self.budget.due(step):
            self.announced.append(step)
            self.store.set(f"sample/{self.number}", str(step))
            self.number += 1

    def end(self) -> None:
        """Rank 0 records no more: the others need not wait for its announcements."""
        if self.rank == 0:
            self.store.set(f"sample/{self.number}", str(NO_MORE))

    def _listen(self, step: int) -> None:
        while self.store.check([key := f"sample/{self.number}"]):
            announced = int(self.store.get(key))
            self.number += 1
            if announced == NO_MORE:
                self.own = OwnSchedule(self.budget)
            elif announced >= step:
                self.announced.append(announced)
