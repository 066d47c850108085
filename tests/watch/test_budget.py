"""The budget: what it counts, and that it is kept. Time is a number here, so that a slow machine changes nothing."""

from __future__ import annotations

import pytest

import normscope as ns
from normscope._watch.budget import BESIDE, Budget
from normscope._watch.schedule import LEAD, OwnSchedule, SharedSchedule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def trained(budget: Budget, clock: Clock, steps: int, step_time: float, cost: float) -> list[int]:
    """Steps of a training in which a sample costs `cost`; the first is the set-up, ten times as expensive."""
    sampled = [1]
    with budget.charged():
        clock.now += cost
        with budget.charged(once=True):
            clock.now += 9 * cost
    budget.end_setup()
    for step in range(2, steps):
        clock.now += step_time
        if budget.due(step):
            with budget.charged(), budget.charged():  # nested: counted once
                clock.now += cost
            budget.end_sample()
            sampled.append(step)
    return sampled


@pytest.mark.parametrize(
    ("share", "step_time", "cost"), [(0.01, 1.0, 0.1), (0.01, 0.001, 0.02), (0.5, 1.0, 0.1), (0.001, 1.0, 5.0)]
)
def test_the_share_is_kept_and_used(share: float, step_time: float, cost: float) -> None:
    clock = Clock()
    budget = Budget(share, clock=clock)
    sampled = trained(budget, clock, 40_000, step_time, cost)
    assert budget.overhead <= share / BESIDE
    possible = min(40_000, share / BESIDE * budget.elapsed / cost)
    assert len(sampled) >= 0.9 * possible - 1
    assert budget.setup == pytest.approx(10 * cost)


def test_the_share_is_kept_at_every_moment() -> None:
    clock = Clock()
    budget = Budget(0.02, clock=clock)
    budget.end_setup()
    for step in range(3000):
        clock.now += 0.01
        if budget.due(step):
            with budget.charged():
                clock.now += 0.05 if step else 0.3
            budget.end_sample()
            assert budget.overhead <= 0.02 * 1.01 or step == 0


def test_a_fixed_cadence() -> None:
    budget = Budget(every=7)
    assert [step for step in range(1, 30) if budget.due(step)] == [7, 14, 21, 28]


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"share": -1.0}, {"every": 0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ns.InputError, match="must be"):
        Budget(**wrong)  # type: ignore[arg-type]


class Store(dict[str, str]):
    """As torch.distributed's, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_processes_sample_the_same_steps() -> None:
    store = Store()
    schedules = [SharedSchedule(Budget(every=5), rank, store) for rank in range(3)]
    sampled: list[list[int]] = [[], [], []]
    for step in range(2, 60):
        for rank, schedule in enumerate(schedules):
            if schedule.sampled(step):
                sampled[rank].append(step)
    assert sampled[0] == sampled[1] == sampled[2] == list(range(5, 60, 5))


def test_a_late_process_lets_samples_pass_and_never_waits() -> None:
    store = Store()
    leader, follower = (SharedSchedule(Budget(every=4), rank, store) for rank in range(2))
    fast = [step for step in range(2, 40) if leader.sampled(step)]
    slow = [step for step in range(2, 40) if follower.sampled(step)]
    assert slow == fast  # it comes late and finds all announcements
    ahead = SharedSchedule(Budget(), 1, Store())
    assert not any(ahead.sampled(step) for step in range(2, 40))  # nothing announced, nothing awaited
    assert LEAD >= 1 and OwnSchedule(Budget(every=2)).sampled(4)
