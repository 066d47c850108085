"""A GradScaler gives the same recording, whether it unscales gradients itself or leaves that to a fused optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
