"""A GradScaler gives the same recording, whether it unscales gradients itself or leaves that to a fused optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import normscope as ns
from normscope._watch import scaling
from normscope.findings.finding import Finding
from normscope.findings.rows import replayed

OVERFLOW, STEPS = 25, 40
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def trained(path: Path, kind: Any, fused: bool, unscaled: bool = False, jump: int = -1, **options: Any) -> tuple[ns.Run, int]:
    """jump: a step whose loss is a million times too large."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    with ns.watch(model, optimizer, run=path, quiet=True, **options) as watch:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(X).square().mean() * (1e6 if step == jump else 1)
            scaler.scale(loss * (float("inf") if step == OVERFLOW else 1)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            watch.step(loss=loss)
    return ns.load_run(path), watch.steps


@pytest.mark.parametrize("unscaled", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_gives_the_same_numbers(kind: Any, unscaled: bool, tmp_path: Path) -> None:
    (plain, steps), (fused, fused_steps) = (
        trained(tmp_path / str(fused), kind, fused, unscaled, every=1) for fused in (False, True)
    )
    assert steps == fused_steps == STEPS - 1 and not plain.findings and not fused.findings
    for name in ("step", "loss", "loss_scale", "total_gradient_norm", "gradient_norm", "update_norm"):
        expected, found = (run.arrays(name)[name] for run in (plain, fused))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-12, err_msg=name)


def test_a_sample_that_no_schedule_asked_for_has_unscaled_gradients(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, torch.optim.SGD, True, every=1000, jump=30)
    columns = run.arrays("total_gradient_norm", "gradient_norm", "loss_scale")
    (row,) = np.flatnonzero(columns["step"] == 30)
    assert columns["loss_scale"][row] > 1 and 0 < columns["gradient_norm"][row, 0] <= columns["total_gradient_norm"][row] < 1e6


def test_on_an_accelerator_an_overflow_is_not_judged_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nobody asks whether the optimizer skips the step."""
    monkeypatch.setattr(scaling, "HOST", ())
    run, steps = trained(tmp_path, torch.optim.SGD, True, every=1)
    assert steps == STEPS and not run.findings
    norms = run.arrays("total_gradient_norm")["total_gradient_norm"]
    assert np.flatnonzero(np.isnan(norms)).tolist() == [OVERFLOW] and not replayed(run).findings


def test_a_gradient_that_is_not_finite_is_found_without_a_scaler(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True) as watch:
        (model(X).square().mean() * float("inf")).backward()
        optimizer.step()
    found: list[Finding] = watch.findings
    assert "exploding-gradient" in {finding.name for finding in found}


# losses of iterations that a scaler skips -----------------------------------------------------------------------------


def losses_given(
    path: Path,
    after: bool,
    scale: float,
    overflows: frozenset[int] = frozenset(),
    passes: str = "followed",
    loaded: bool = False,
    **options: Any,
) -> tuple[ns.Run, list[float]]:
    """Trained with a scaler that skips the first steps, if its scale is too large, and those that overflow; the steps' losses.

    passes: how they are made: "followed", "unseen" because no module is called, or "made again" in the backward pass.
    loaded: whether the scale is another than the scaler's initial one.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20 if loaded else scale, growth_interval=10**6)
    if loaded:
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
    layer: Any = model[0]
    forward: Callable[[torch.Tensor], torch.Tensor] = {
        "followed": model,
        "unseen": lambda x: x @ layer.weight.mT + layer.bias,
        "made again": lambda x: checkpoint(model, x, use_reentrant=False),
    }[passes]
    losses = []
    with ns.watch(model, optimizer, run=path, quiet=True, **options) as watch:
        for iteration in range(12):
            optimizer.zero_grad()
            loss = (forward(X * (math.inf if iteration in overflows else 1)) * 100).square().mean()
            if not after:
                watch.step(loss=loss)
            steps = watch.steps
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if after:
                watch.step(loss=loss)
            if watch.steps > steps:
                losses.append(float(loss.detach()))
    return ns.load_run(path), losses


@pytest.mark.parametrize("passes", ["followed", "unseen", "made again"])
@pytest.mark.parametrize("scale", [2.0, 2.0**120])
@pytest.mark.parametrize("after", [True, False])
def test_each_step_has_its_own_loss_although_the_first_ones_are_skipped(
    after: bool, scale: float, passes: str, tmp_path: Path
) -> None:
    run, losses = losses_given(tmp_path, after, scale, passes=passes, every=1)
    assert (len(losses) < 12) == (scale > 2)
    np.testing.assert_allclose(run.arrays("loss")["loss"], losses, rtol=1e-5)


@pytest.mark.parametrize("after", [True, False])
def test_a_scale_that_was_loaded_says_nothing_of_skipped_steps(after: bool, tmp_path: Path) -> None:
    """As in a training that goes on: the scale is far below the initial one, and the first step is not skipped."""
    run, losses = losses_given(tmp_path, after, 2.0, loaded=True, every=1)
    np.testing.assert_allclose(run.arrays("loss")["loss"], losses, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("after", [True, False])
def test_the_loss_of_a_skipped_iteration_is_no_steps(after: bool, every: int, tmp_path: Path) -> None:
    run, losses = losses_given(tmp_path, after, 2.0, frozenset({5, 11}), every=every)
    assert len(losses) == 10 and not run.findings
    table = run.table(["loss", "losses_read"])
    kept = dict(zip(table["step"].to_pylist(), table["loss"].to_pylist(), strict=True))
    assert kept == pytest.approx({step: losses[step - 1] for step in kept})
    assert run.events("closed")[-1]["losses_read"] == 10


def test_gradients_of_another_optimizer_do_not_count(tmp_path: Path) -> None:
    """A scaler has not unscaled them yet. A group that is added counts from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    watched, other = torch.optim.SGD(model[1].parameters(), lr=0.01), torch.optim.SGD(model[0].parameters(), lr=0.01)
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    with ns.watch(model, watched, run=tmp_path, every=1, quiet=True):
        for step in range(4):
            model.zero_grad()
            if step == 2:
                watched.add_param_group({"params": list(model[0].parameters())})
            scaler.scale(model(X).square().mean()).backward()
            held = model.parameters() if step >= 2 else model[1].parameters()
            expected.append(math.hypot(*(float(p.grad.norm()) / 2**10 for p in held if p.grad is not None)))
            scaler.step(watched)
            if step < 2:
                scaler.step(other)
            scaler.update()
    np.testing.assert_allclose(ns.load_run(tmp_path).arrays("total_gradient_norm")["total_gradient_norm"], expected, rtol=1e-5)


class Counting(TorchDispatchMode):
    """The operations that are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_does_not_see_that_a_fused_optimizer_is_asked_whether_it_skips(tmp_path: Path) -> None:
    seen = []
    for watched in (False, True):
        model = nn.Linear(4, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01, fused=True), torch.amp.GradScaler("cpu")
        with ns.watch(model, optimizer, run=tmp_path, every=2, quiet=True) if watched else nullcontext(), Counting() as mode:
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(model(X).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        seen.append(mode.seen)
    assert seen[0] == seen[1]
