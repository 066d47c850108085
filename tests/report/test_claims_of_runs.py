"""No clean line claims what was not looked at: each states its basis, and what happened between samples or after the last is not denied.

For every clean line a failure is planted that its rule finds when all steps are sampled. Then the same training is sampled so that
the failure lies between two samples, or after the last one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.findings.over_time import Judged, last_judged
from normscope.findings.rows import RULES, STEP_RULES
from normscope.report.run_page import COLUMNS as PAGE_COLUMNS
from normscope.report.run_page import run_report
from normscope.report.snapshot import Snapshot
from normscope.report.summary import CLEAN, COLUMNS, Summary, summarize
from normscope.symmetry.report import SymmetryReport
from tests.watch.loops import Loop, Transformer, mlp

STEPS, CADENCE = 119, 40  # sampled: 1, 40 and 80
WINDOWS = {"between samples": (41, 79), "after the last": (81, 119)}


@cache
def known() -> SymmetryReport:
    loop = Loop(mlp)
    return ns.symmetries(loop.model, loop.batch()[0])


def told(path: Path) -> Summary:
    run = ns.load_run(path)
    return summarize(Snapshot.of(run, COLUMNS), steps=run.life.step)


class Training:
    """Its weights are put back after every step that is bad, so that nothing of the failure is left at the next sample."""

    def __init__(self, rule: str = "") -> None:
        self.loop, self.factor, self.grow = Loop(MODELS.get(rule, mlp)), 1.0, 1.0
        self.plant = PLANTS.get(rule, lambda training: None)
        self.symmetries = None if rule in MODELS else known()
        self.loop.optimizer = torch.optim.SGD(self.loop.model.parameters(), lr=1e-3)

    def run(self, path: Path, bad: tuple[int, int], give_loss: bool = True, steps: int = STEPS, **options: int) -> Summary:
        loop = self.loop
        with loop.watch(path, symmetries=self.symmetries, **options) as watch:
            for step in range(1, steps + 1):
                self.factor, self.grow, self.samples = 1.0, 1.05 ** (step - bad[0]), 8
                with self.failing() if bad[0] <= step <= bad[1] else _as_it_is():
                    loop.optimizer.zero_grad()
                    x, y = (part[: self.samples] for part in loop.batch())
                    loss = nn.functional.cross_entropy(loop.model(x), y) * self.factor
                    loss.backward()
                    loop.optimizer.step()
                if give_loss:
                    watch.step(loss=loss)
        return told(path)

    @contextmanager
    def failing(self) -> Iterator[None]:
        model, kept = self.loop.model, {name: value.clone() for name, value in self.loop.model.state_dict().items()}
        rates = [group["lr"] for group in self.loop.optimizer.param_groups]
        with torch.no_grad():
            self.plant(self)
        yield
        model.load_state_dict(kept)
        for group, rate in zip(self.loop.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _loss(factor: float) -> Callable[[Training], None]:
    def plant(training: Training) -> None:
        training.factor = factor

    return plant


def _scaled(place: int, factor: float, name: str = "weight") -> Callable[[Training], None]:
    return lambda training: getattr(training.loop.model[place], name).mul_(factor)


def _grown(training: Training) -> None:
    training.loop.model[7].weight.mul_(training.grow)


def _dead(training: Training) -> None:
    training.loop.model[2].bias.fill_(-100.0)


def _shifted(training: Training) -> None:
    training.loop.model[5].running_var.fill_(1e4)


def _off(training: Training) -> None:
    """No gradient reaches what lies before the last layer."""
    training.loop.model[7].weight.zero_()


def _rounded(training: Training) -> None:
    """γ so large that no step changes it."""
    training.loop.model[2].weight.fill_(1e6)


def _faster(training: Training) -> None:
    for group in training.loop.optimizer.param_groups:
        group["lr"] = 10.0


def _few(training: Training) -> None:
    training.samples = 7


PLANTS: dict[str, Callable[[Training], None]] = {
    "NS501": _loss(math.nan),
    "NS502": _loss(1e4),
    "NS503": _loss(5.0),
    "NS504": _loss(1e6),
    "NS505": _off,
    "NS506": _scaled(4, 1e-6),
    "NS507": _dead,
    "NS508": _shifted,
    "NS509": _scaled(7, math.nan),
    "NS510": _rounded,
    "NS511": _scaled(1, 1e5),
    "NS309": _scaled(4, 20.0),
    "NS403": _grown,
    "NS512": lambda training: training.loop.model.blocks[0].self_attn.in_proj_weight.mul_(100.0),
    "NS513": _loss(1e3),
    "NS514": lambda training: training.loop.model[2][0].weight.zero_(),
    "NS516": _scaled(7, 20.0),
    "NS517": _scaled(1, 1e4, "bias"),
    "NS518": _faster,
    "NS519": _few,
}
ELSEWHERE = {"NS515"}  # takes several processes: tests/watch/test_distributed.py


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def residual() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 24), Residual(nn.Linear(24, 24, bias=False)), nn.Linear(24, 5))


MODELS = {"NS512": Transformer, "NS514": residual}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have 20 steps to begin, not 200."""
    monkeypatch.setattr("normscope.findings.streams.IDLE_AFTER", 20)


def test_there_is_a_failure_for_every_clean_line() -> None:
    assert set(PLANTS) | ELSEWHERE == set(CLEAN) == {id for id, rule in RULES.items() if rule.clean is not None}


@pytest.mark.quick(8)
@pytest.mark.parametrize("rule", PLANTS)
def test_the_failure_is_found_where_it_is_looked_for(rule: str, tmp_path: Path) -> None:
    bad = (50, STEPS) if rule == "NS403" else WINDOWS["after the last"]  # a trend takes a while
    summary = Training(rule).run(tmp_path, bad)
    found = {problem.rule: problem for problem in summary.problems}
    assert rule in found and bad[0] <= (found[rule].step or 0) <= bad[1]
    assert not any(CLEAN[rule].sentence in sentence for sentence in (*summary.fine, *summary.not_judged))


@pytest.mark.quick(14)
@pytest.mark.parametrize("where", WINDOWS)
@pytest.mark.parametrize("rule", PLANTS)
def test_a_failure_that_no_sample_saw_is_not_denied(rule: str, where: str, tmp_path: Path) -> None:
    """What is read on every step is found; of the rest no line counts a step that was bad."""
    bad = WINDOWS[where]
    summary = Training(rule).run(tmp_path, bad, every=CADENCE)
    run = ns.load_run(tmp_path)
    if rule in STEP_RULES:
        assert rule in {problem.rule for problem in summary.problems}
        return
    page, sentence = run_report([Snapshot.of(run, PAGE_COLUMNS)]), CLEAN[rule].sentence
    if rule in {problem.rule for problem in summary.problems}:
        return  # another rule noticed something, so that the step was sampled and the failure found
    columns = run.arrays(CLEAN[rule].column)
    read = columns["step"][(~np.isnan(columns[CLEAN[rule].column])).reshape(len(columns["step"]), -1).any(1)]
    judged = run.judged[rule]
    assert judged.steps <= len(read) < STEPS and judged.last <= max(read)
    (line,) = [line for line in (*summary.fine, *summary.not_judged) if sentence in line]
    assert f"{judged.steps} of {STEPS} steps" in line and (judged.steps < 10) == (f"{sentence}: not judged, " in line)
    assert line.split(" (")[0] in " ".join(str(run).split()) and line in html.unescape(page)
    if not summary.problems:  # then nothing but the three samples was looked at
        assert judged.steps <= 3 and judged.last in (0, 1, 40, 80) and not set(read) - {1, 40, 80}


def test_every_clean_line_says_what_it_rests_on(tmp_path: Path) -> None:
    summary = Training().run(tmp_path, (999, 999), every=7)
    judged = ns.load_run(tmp_path).judged
    assert summary.fine and not summary.problems
    for rule, clean in CLEAN.items():
        said = [sentence for sentence in (*summary.fine, *summary.not_judged) if clean.sentence in sentence]
        assert [judged[rule].of(STEPS) in sentence for sentence in said] == [True] * (rule in judged)
        assert rule not in judged or (judged[rule].last <= STEPS and (rule in STEP_RULES or judged[rule].last <= summary.last_step))


def test_a_measurement_that_was_switched_off_is_not_said_to_be_fine_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input statistics fail from the sixth sample on: what rests on them was judged five times, not forty."""
    from normscope._watch import forward

    measure, calls = forward.input_statistics, iter(range(10**6))

    def failing(*args: object) -> Tensor:
        if next(calls) >= 5 * 4:
            raise RuntimeError("planted")
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "input_statistics", failing)
    with pytest.warns(UserWarning, match="no longer records input statistics"):
        summary = Training().run(tmp_path, (999, 999), steps=40)
    for rule in ("NS506", "NS507"):
        line = next(line for line in summary.not_judged if CLEAN[rule].sentence in line)
        assert "5 of 40 steps, the last at step 5" in line
    assert any(CLEAN["NS505"].sentence in line and "39 of 40 steps" in line for line in summary.fine)


def test_what_needs_a_window_is_not_judged_before_it_has_one(tmp_path: Path) -> None:
    """In 30 steps running statistics have not run in, and no product has a trend."""
    summary = Training().run(tmp_path, (999, 999), steps=30)
    lines = {
        rule: next(line for line in summary.not_judged if CLEAN[rule].sentence in line) for rule in ("NS508", "NS403", "NS503")
    }
    assert all("not judged, " in line and "0 of 30 steps" in line for line in lines.values())


def test_a_killed_run_claims_no_step_after_the_last_that_was_told(tmp_path: Path) -> None:
    """Its last line on what was judged may be old: then fewer steps are claimed, never more."""
    training = Training()
    watch = training.loop.watch(tmp_path)
    for _ in range(57):
        watch.step(loss=training.loop.step())
    told_before = last_judged(ns.load_run(tmp_path).events())
    assert all(one.steps <= one.last <= 57 for one in told_before.values())
    watch.close()
    assert ns.load_run(tmp_path).judged["NS501"] == Judged(0, 57, 57, 0)


def test_a_resumed_run_speaks_of_its_last_recording(tmp_path: Path) -> None:
    for steps in (30, 20):
        Training().run(tmp_path, (999, 999), steps=steps)
    line = next(line for line in told(tmp_path).fine if CLEAN["NS501"].sentence in line)
    assert "all 20 steps since step 30" in line


def test_older_runs_are_not_said_to_be_fine(tmp_path: Path) -> None:
    Training().run(tmp_path, (999, 999), steps=20)
    events = tmp_path / "events.jsonl"
    events.write_text("".join(line for line in events.read_text().splitlines(True) if '"judged"' not in line))
    summary = told(tmp_path)
    assert not summary.fine and all("not on record" in line for line in summary.not_judged)


def test_too_few_samples_are_not_judged(tmp_path: Path) -> None:
    summary = Training().run(tmp_path, (999, 999), steps=90, every=1000)
    assert summary.samples == 1 and "1 of 90 steps sampled" in summary.headline
    assert {line.split(" (")[0] for line in summary.fine} == {CLEAN[rule].sentence for rule in STEP_RULES}
    assert summary.not_judged and all("of 90 steps" in line for line in summary.not_judged)


def test_without_losses_nothing_is_said_of_the_loss(tmp_path: Path) -> None:
    summary = Training().run(tmp_path, (999, 999), steps=30, give_loss=False)
    assert not any("loss" in line for line in (*summary.fine, *summary.not_judged)) and summary.basis == "all 30 steps"


def test_the_doctor_says_what_its_answers_on_a_run_rest_on(tmp_path: Path) -> None:
    training = Training()
    training.run(tmp_path, (999, 999), every=CADENCE)
    found = ns.doctor(training.loop.model, training.loop.batch()[0], run=tmp_path)
    assert found.basis["NS501"] == "all 119 steps" and "on the run, NS501" in str(found)
    assert "too little on record" in found.not_checked["NS507"] and "NS507" not in found.checked


def test_a_run_that_ended_in_nan_says_so_first_and_where_it_began(tmp_path: Path) -> None:
    loop = Loop()
    with loop.watch(tmp_path, every=1000) as watch:
        for step in range(1, 61):
            loop.optimizer.zero_grad()
            x, y = loop.batch()
            loss = nn.functional.cross_entropy(loop.model(x), y) * (1e30 if step == 50 else 1)
            loss.backward()
            loop.optimizer.step()
            watch.step(loss=loss)
    headline = told(tmp_path).headline
    assert "step 50" in headline and "gradient" in headline
