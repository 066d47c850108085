"""Losses and gradients of loops that are not one pass, one loss, one step: what belongs to which step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns


class Training:
    """A small model, its optimizer, and batches of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        return nn.functional.cross_entropy((model or self.model)(torch.randn(5, 6)), torch.randint(0, 3, (5,)))

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad()


def column(path: Path, name: str) -> list[float]:
    return ns.load_run(path).table().column(name).to_pylist()


@pytest.mark.parametrize("given", [False, True])
def test_a_second_pass_before_the_step_moves_no_loss(given: bool, tmp_path: Path) -> None:
    """As sharpness-aware minimization makes it, with a GradScaler that skips nothing."""
    it, scaler, losses = Training(), torch.amp.GradScaler("cpu", init_scale=4.0), []
    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True, scaler=scaler if given else None) as watch:
        for _ in range(4):
            loss = it.loss()
            losses.append(loss.item())
            watch.step(loss=loss)
            torch.autograd.grad(loss, list(it.model.parameters()))
            scaler.scale(it.loss()).backward()
            it.step(scaler)
    assert np.allclose(column(tmp_path / "run", "loss"), losses)


def test_steps_that_a_scaler_skipped_before_the_recording_do_not_count(tmp_path: Path) -> None:
    it, scaler, losses = Training(), torch.amp.GradScaler("cpu", init_scale=64.0), []
    compiled = torch.compile(it.model, backend="eager")
    for _ in range(2):
        scaler.scale(it.loss(compiled) * math.inf).backward()
        it.step(scaler)
    with ns.watch(compiled, it.optimizer, run=tmp_path / "run", every=1, quiet=True, scaler=scaler) as watch:
        for _ in range(3):
            loss = it.loss(compiled)
            losses.append(loss.item())
            watch.step(loss=loss)
            scaler.scale(loss).backward()
            it.step(scaler)
    assert np.allclose(column(tmp_path / "run", "loss"), losses)


def test_where_an_optimizer_holds_copies_of_some_parameters_all_gradients_count(tmp_path: Path) -> None:
    it = Training()
    first = it.model[0].weight
    master, totals = first.detach().clone().requires_grad_(), []
    others = [parameter for parameter in it.model.parameters() if parameter is not first]
    it.optimizer = torch.optim.SGD([master, *others], lr=0.01)
    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True):
        for _ in range(3):
            it.model.zero_grad()
            it.loss().backward()
            assert first.grad is not None
            master.grad = first.grad.clone()
            totals.append(math.hypot(*(float(p.grad.norm()) for p in it.model.parameters() if p.grad is not None)))
            it.optimizer.step()
            first.data.copy_(master.data)
    assert np.allclose(column(tmp_path / "run", "total_gradient_norm"), totals)


def test_loss_and_accuracy_may_come_one_after_the_other(tmp_path: Path) -> None:
    it, losses = Training(), []
    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True) as watch:
        for _ in range(3):
            loss = it.loss()
            losses.append(loss.item())
            loss.backward()
            watch.step(loss=loss)
            watch.step(accuracy=0.5)
            it.step()
    assert np.allclose(column(tmp_path / "run", "loss"), losses)
    assert column(tmp_path / "run", "accuracy") == [0.5] * 3 and column(tmp_path / "run", "losses_read")[-1] == 3


@pytest.mark.parametrize("bad", [14, 15])
def test_a_loss_of_every_micro_batch_is_judged(bad: int, tmp_path: Path) -> None:
    it = Training()
    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True) as watch:
        for batch in range(20):
            loss = it.loss()
            loss.backward()
            if batch % 2:
                it.step()
            watch.step(loss=loss * math.nan if batch == bad else loss)
    (finding,) = [finding for finding in watch.findings if finding.rule == "NS501"]
    assert abs(finding.first_step - bad / 2) < 2  # near: which step a loss between two belongs to is not known


def test_a_closure_that_raised_leaves_no_copies(tmp_path: Path) -> None:
    it = Training()

    def closure() -> Tensor:
        raise ValueError

    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True):
        with pytest.raises(ValueError):
            it.optimizer.step(closure)
        with torch.no_grad():
            for parameter in it.model.parameters():
                parameter.mul_(10)
        used = float(it.model[0].weight.detach().norm())
        it.loss().backward()
        it.step()
    run = ns.load_run(tmp_path / "run")
    index = [layer["name"] for layer in run.layers].index("0")
    assert run.table().column("frobenius_norm").to_pylist()[0][index] == pytest.approx(used, rel=1e-5)


def test_one_float64_parameter_among_others_is_measured(tmp_path: Path) -> None:
    it = Training()
    it.model.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    it.optimizer.add_param_group({"params": [it.model.scale]})
    with ns.watch(it.model, it.optimizer, run=tmp_path / "run", every=1, quiet=True):
        (it.loss() * it.model.scale).backward()
        total = math.hypot(*(float(p.grad.norm()) for p in it.model.parameters() if p.grad is not None))
        it.step()
    assert column(tmp_path / "run", "total_gradient_norm")[0] == pytest.approx(total, rel=1e-5)
