"""No clean line claims what was not looked at: each states its basis, and what happened between samples or after the last is not denied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.report.snapshot import Snapshot
from normscope.report.summary import CLEAN, COLUMNS, Summary, summarize
from tests.watch.loops import Loop


def told(path: Path) -> Summary:
    run = ns.load_run(path)
    return summarize(Snapshot.of(run, COLUMNS), steps=run.life.step)


def trained(path: Path, steps: int, every: int, bad: set[int], give_loss: bool = True) -> Summary:
    """A training in which some steps have a forward pass, and then weights, that no sample sees."""
    loop = Loop()
    kept = [parameter.detach().clone() for parameter in loop.model.parameters()]
    with loop.watch(path, every=every) as watch:
        for step in range(1, steps + 1):
            if step in bad:
                with torch.no_grad():
                    loop.model[1].weight.mul_(1e6)
            loss = loop.step()
            if step in bad:
                with torch.no_grad():
                    for parameter, value in zip(loop.model.parameters(), kept, strict=True):
                        parameter.copy_(value)
            if give_loss:
                watch.step(loss=loss)
    return told(path)


@pytest.mark.parametrize("bad", [{33}, {79}], ids=["between samples", "after the last"])
def test_every_clean_line_says_what_it_rests_on(bad: set[int], tmp_path: Path) -> None:
    summary = trained(tmp_path, 80, 7, bad)
    assert summary.samples < 80 and summary.fine
    for sentence in summary.fine:
        assert f"{summary.samples} of 80 steps sampled, the last at step {summary.last_step}" in sentence
    sentences = " ".join((*summary.fine, *summary.not_judged))
    assert all(clean.sentence in sentences or rule in {p.rule for p in summary.problems} or not _recorded(tmp_path, clean.column)
               for rule, clean in CLEAN.items())  # fmt: skip


def _recorded(path: Path, column: str) -> bool:
    values = ns.load_run(path).arrays(column)[column]
    return bool((values == values).any())


def test_too_few_samples_are_not_judged(tmp_path: Path) -> None:
    summary = trained(tmp_path, 60, 1000, set())
    assert summary.samples == 1 and "1 of 60 steps sampled" in summary.headline
    assert all("60 losses read" in sentence or "60 gradient norms read" in sentence for sentence in summary.fine)
    assert summary.not_judged and all("not judged, 1 of 60 steps sampled" in sentence for sentence in summary.not_judged)


def test_without_losses_nothing_is_said_of_the_loss(tmp_path: Path) -> None:
    summary = trained(tmp_path, 30, 1, set(), give_loss=False)
    assert not any("loss" in sentence for sentence in summary.fine) and summary.basis == "all 30 steps"


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
