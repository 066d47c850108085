"""Every step is looked at: what happens between samples is found, kept and told, and nothing waits for an accelerator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope._watch import every_step
from normscope._watch.account import in_words
from normscope._watch.budget import Budget
from normscope._watch.every_step import CALM, KEPT, EveryStep
from normscope._watch.layers import WatchedLayer
from normscope.findings.finding import Finding
from tests.watch.loops import Loop, mlp

RARELY = {"every": 1000}  # no sample falls on what is planted
Plant = Callable[[Loop, int, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of every step are read, however little of a busy machine is left for it."""
    monkeypatch.setattr(every_step, "FREE", math.inf)


def trained(
    path: Path, steps: int, plant: Plant, before: Callable[[ns.Watch], None] = lambda w: None, after: bool = True, **options: Any
) -> ns.Watch:
    """Plain training in which `plant` sees every loss before its backward pass. after: the loss is given after the step."""
    loop = Loop()
    with loop.watch(path, **{**RARELY, **options}) as watch:
        before(watch)
        for step in range(1, steps + 1):
            loop.optimizer.zero_grad()
            x, y = loop.batch()
            loss = plant(loop, step, nn.functional.cross_entropy(loop.model(x), y))
            loss.backward()
            if not after:
                watch.step(loss=loss)
            loop.optimizer.step()
            if after:
                watch.step(loss=loss)
    return watch


def nan_from(first: int) -> Plant:
    return lambda loop, step, loss: loss * (float("nan") if step >= first else 1.0)


def jump_at(place: int) -> Plant:
    return lambda loop, step, loss: loss * (1e6 if step == place else 1.0)


def names(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in reversed(found)}


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("last", [True, False], ids=["the last step", "between samples"])
def test_a_loss_that_is_not_finite_is_found_at_its_step(tmp_path: Path, last: bool, after: bool) -> None:
    watch = trained(tmp_path, 40, nan_from(40 if last else 33), after=after)
    run = ns.load_run(tmp_path)
    for found in (names(watch.findings), names(run.findings)):
        loss = found["loss-not-finite"]
        assert (loss.first_step, loss.last_step, loss.state) == (40 if last else 33, 40, "now")
    assert "The loss is not finite" in str(run) and "stayed finite" not in str(run)


def test_a_loss_after_which_the_loop_makes_no_step_is_found(tmp_path: Path) -> None:
    loop = Loop()
    with loop.watch(tmp_path) as watch:
        for loss in (1.0, float("nan")):
            watch.step(loss=loss)
            if math.isfinite(loss):
                loop.step()
    assert names(watch.findings)["loss-not-finite"].first_step == 2


def test_the_last_steps_before_it_are_kept(tmp_path: Path) -> None:
    trained(tmp_path, 70, nan_from(65))
    table = ns.load_run(tmp_path).table(["loss", "total_gradient_norm", "samples", "gradient_norm"])
    steps = table["step"].to_pylist()
    assert steps == sorted(set(steps)) and set(range(65 - KEPT + 1, 66)) <= set(steps)
    dense = [steps.index(step) for step in range(65 - KEPT + 2, 65)]
    for name in ("loss", "total_gradient_norm"):
        assert np.isfinite(table[name].to_numpy()[dense]).all()


def test_a_jump_calls_the_users_action_once_and_samples_the_steps_after_it(tmp_path: Path) -> None:
    seen: list[Finding] = []
    watch = trained(tmp_path, 60, jump_at(45), lambda w: w.on("spike", seen.append))
    assert {finding.first_step for finding in seen} == {45} and "exploding-gradient" in names(seen)
    assert names(watch.findings)["exploding-gradient"].where
    table = ns.load_run(tmp_path).table(["overhead", "spectral_norm"])
    sampled = table["step"].to_numpy()[np.isfinite(table["overhead"].to_numpy())]
    assert {45, 46, 47, 48} <= set(sampled.tolist())


@pytest.mark.parametrize("error", [RuntimeError("mine"), ValueError("mine")])
def test_an_action_that_raises_is_noted_and_training_goes_on(tmp_path: Path, error: Exception) -> None:
    def action(finding: Finding) -> None:
        raise error

    with pytest.warns(UserWarning, match="no longer records action"):
        watch = trained(tmp_path, 60, jump_at(45), lambda w: w.on("spike", action))
    assert watch.steps == 60 and any(event["what"].startswith("action") for event in ns.load_run(tmp_path).events("error"))


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with Loop().watch(tmp_path) as watch, pytest.raises(ns.InputError, match="choose from spike, not-finite, finding"):
        watch.on("loss", print)  # type: ignore[arg-type]


def test_training_is_the_same_when_something_happens(tmp_path: Path) -> None:
    """A sample that no schedule asked for changes nothing either."""
    weights = []
    for options in ({}, {"every": 1}):
        torch.manual_seed(0)
        loop = Loop()
        with loop.watch(tmp_path / str(len(weights)), **{**RARELY, **options}):
            for step in range(50):
                loop.optimizer.zero_grad()
                x, y = loop.batch()
                (nn.functional.cross_entropy(loop.model(x), y) * (1e4 if step == 40 else 1)).backward()
                loop.optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in loop.model.parameters()]))
    alone = Loop()
    for step in range(50):
        alone.optimizer.zero_grad()
        x, y = alone.batch()
        (nn.functional.cross_entropy(alone.model(x), y) * (1e4 if step == 40 else 1)).backward()
        alone.optimizer.step()
    weights.append(torch.cat([p.detach().flatten() for p in alone.model.parameters()]))
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[2])


def test_nothing_is_read_by_the_host(tmp_path: Path) -> None:
    """On the meta device there is nothing to read: whoever tries gets an error."""
    layer = nn.Linear(3, 3, device="meta")
    for parameter in layer.parameters():
        parameter.grad = torch.empty_like(parameter)
    every = EveryStep(
        (WatchedLayer("0", "Linear", "weight", "", parameter="weight"),), [{"name": "0"}], Budget(), lambda finding: None
    )
    with pytest.raises(RuntimeError):
        float(torch.zeros((), device="meta"))
    optimizer = torch.optim.SGD(layer.parameters())
    optimizer.param_groups[0]["lr"] = torch.zeros((), device="meta")
    for step in range(1, 14):
        every.gradients(step, dict(layer.named_parameters()), optimizer)
        every.loss(step, torch.zeros((), device="meta"))
    assert len(every._waiting) == 26 and every.losses_read == 0


class Arrival:
    """Of a copy that takes as long as it is told."""

    here = False

    def __init__(self, device: Any = None) -> None: ...
    def record(self) -> None: ...
    def query(self) -> bool:
        return Arrival.here


def test_what_comes_late_is_judged_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope._watch.every_step.HOST", ())
    monkeypatch.setattr(torch, "Event", Arrival)
    said: list[Finding] = []
    every = EveryStep((), [], Budget(), said.append)
    Arrival.here = False
    for step in range(1, 101):
        every.loss(step, torch.tensor(float("nan") if step == 20 else 1.0))
    assert every.losses_read == 0 and not said
    Arrival.here = True
    every.loss(101, torch.tensor(1.0))
    assert [(finding.first_step, finding.state) for finding in said] == [(20, "now"), (20, "was")] and every.losses_read == 32
    every.finish()
    assert every.losses_read == 101


def test_what_is_judged_later_is_what_was_read(tmp_path: Path) -> None:
    """A loss that the loop writes into afterwards, or uses again, is judged as it was given; a jump is judged at once."""
    said: list[Finding] = []
    every = EveryStep((), [], Budget(), said.append)
    loss = torch.ones(())
    for step in range(1, 61):
        every.loss(step, loss.fill_(1.0 + 0.01 * (step % 7)))
        loss.fill_(float("nan"))
        assert every.losses_read >= step - CALM
    assert not said
    every.loss(61, torch.tensor(50.0))
    assert every.losses_read == 61 and [(one.name, one.first_step) for one in said] == [("loss-spike", 61)]
    for step in range(62, 70):
        every.loss(step, 1.0)
    every.finish()
    assert every.losses_read == 69 and [one.state for one in said] == ["now", "was"]


def test_a_jump_between_samples_and_nan_at_the_end_are_both_named(tmp_path: Path) -> None:
    """400 steps, a gradient a million times too large at step 150, NaN from step 390 on."""
    watch = trained(
        tmp_path, 400, lambda loop, step, loss: loss * (float("nan") if step >= 390 else 1e6 if step == 150 else 1.0),
        every=None,
    )  # fmt: skip
    run, found = ns.load_run(tmp_path), names(watch.findings)
    assert found["exploding-gradient"].first_step == 150 and found["loss-not-finite"].first_step == 390
    said = " ".join(str(run).split())
    assert "The loss is not finite (since step 390)" in said and run.arrays("samples")["samples"].max() >= 70
    for line in ("The loss stayed finite", "The loss did not jump", "No gradient exploded"):
        assert line not in said


def test_a_scale_that_bfloat16_freezes_is_named(tmp_path: Path) -> None:
    loop = Loop(lambda: mlp().bfloat16(), optimizer_of=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    with loop.watch(tmp_path) as watch:
        for _ in range(30):
            loop.optimizer.zero_grad()
            x, y = loop.batch()
            nn.functional.cross_entropy(loop.model(x.bfloat16()), y).backward()
            loop.optimizer.step()
    frozen = [one for one in watch.findings if one.name == "unmoved-scale"]
    assert {one.where for one in frozen} == {"2", "5"} and all(one.severity == "error" for one in frozen)


def test_the_first_steps_are_all_sampled_and_later_ones_never_stop(tmp_path: Path) -> None:
    now = 0.0
    budget = Budget(0.01, clock=lambda: now, dense=50)
    sampled = []
    for step in range(1, 2001):
        if budget.due(step):
            sampled.append(step)
            with budget.charged():
                now += 10.0  # a sample that no budget allows
            budget.end_sample()
        now += 0.001
        if step == 50:
            budget.end_dense()
    assert sampled[:50] == list(range(1, 51)) and len(sampled) >= 80
    assert all(later <= 1.1 * earlier + 1 for earlier, later in itertools.pairwise(sampled[49:]))
    assert budget.overhead > 0.5  # and it says what that cost


def test_gradients_are_read_within_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of it in any case; then as much as half of the budget allows."""
    monkeypatch.setattr(every_step, "FREE", 1.0)
    now, read = 0.0, []

    def clock() -> float:
        nonlocal now
        now += 0.05  # whatever is timed takes as long
        return now

    budget = Budget(0.01, clock=clock, dense=0)
    every = EveryStep([], [], budget, lambda finding: None)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(1, 2001):
        now += 1.0
        if every.affordable():
            read.append(step)
            every.gradients(step, {"weight": parameter}, optimizer)
    at_once = next(step for step in read if step + 1 not in read)
    spent = 0.05 * len(read)
    assert 10 <= at_once <= 20 and spent <= 1.0 + every_step.SHARE * 0.01 * now and len(read) > 1.5 * at_once


def test_dense_is_stated_and_can_be_switched_off(tmp_path: Path) -> None:
    loop = Loop()
    with loop.watch(tmp_path / "a", every=None) as dense:
        for _ in range(12):
            dense.step(loss=loop.step())
    assert dense.sampled_steps == 12 and "of the first 12 steps" in in_words(dense)
    assert ns.load_run(tmp_path / "a").manifest["config"]["dense"] == 50
    loop = Loop()
    with loop.watch(tmp_path / "b", every=None, budget=1e-6, dense=0) as sparse:
        for _ in range(12):
            sparse.step(loss=loop.step())
    assert sparse.sampled_steps == 1 and "of the first" not in in_words(sparse)


# runs ----------------------------------------------------------------------------------------------------------------


def test_the_same_run_twice_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for _ in Loop().watched(tmp_path, 3):
        pass
    with pytest.raises(ns.InputError, match=r"3 rows, finished.*resume=True.*overwrite=True.*run=\"auto\""):
        Loop().watch(tmp_path, resume=False)
    for _ in Loop().watched(tmp_path, 2, resume=True):
        pass
    assert ns.load_run(tmp_path).table()["step"].to_pylist() == [1, 2, 3, 4, 5]
    (tmp_path / "mine.txt").write_text("kept")
    for _ in Loop().watched(tmp_path, 2, overwrite=True):
        pass
    run = ns.load_run(tmp_path)
    assert run.table()["step"].to_pylist() == [1, 2] and (tmp_path / "mine.txt").exists()
    assert [event["kind"] for event in run.events()].count("started") == 1
    with pytest.raises(ns.InputError, match="pass only one of them"):
        Loop().watch(tmp_path, resume=True, overwrite=True)


def test_overwriting_replaces_the_run_of_another_model(tmp_path: Path) -> None:
    for _ in Loop().watched(tmp_path, 1):
        pass
    for _ in Loop(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 5))).watched(tmp_path, 1, overwrite=True):
        pass
    assert len(ns.load_run(tmp_path).layers) == 1


def test_auto_numbers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("sequential", "sequential-2", "sequential-3"):
        with Loop().watch("auto") as watch:  # type: ignore[arg-type]
            pass
        assert watch.run == Path("runs") / expected and watch.run.is_dir()


@pytest.mark.parametrize("run", ["./auto", Path("auto")])
def test_a_directory_may_be_called_auto(run: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Loop().watch(run) as watch:  # type: ignore[arg-type]
        pass
    assert watch.run == Path("auto") and [path.name for path in tmp_path.iterdir()] == ["auto"]
