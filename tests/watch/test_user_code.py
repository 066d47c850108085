"""Your code runs as often as it did without the watch, in the same order, on the same tensors: training is bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from tests.watch.awkward import CASES, Counting, Loss, Net, Record, Spectral, plain_loss

STEPS = 6
NOTED = {"a parameter of a subclass": "second.weight"}


def train(
    case: str, run: Path | None, probe_of: Callable[[nn.Module, Loss], ns.Probe] | None = None, **options: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """Everything that training leaves: tensors, and what the user's code counted or drew."""
    record: Record = {}
    torch.manual_seed(0)
    Net.count = 0
    model, loss_of = CASES[case](record)
    data = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if probe_of is not None:
        options["probe"] = probe_of(model, loss_of)
    watch = None if run is None else ns.watch(model, optimizer, run=run, quiet=True, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(8, 6, generator=data))
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    moments = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    tensors = [*model.state_dict().values(), *moments, torch.get_rng_state()]
    return tensors, {"count": Net.count, **{name: value() for name, value in record.items() if callable(value)}}


@pytest.mark.parametrize("options", [{"every": 1}, {}], ids=["every step", "budget"])
@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_and_runs_the_code_as_often(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected, counted = train(case, None)
    tensors, found = train(case, tmp_path, **options)
    assert found == counted
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    run = ns.load_run(tmp_path)
    assert not run.events("error") and any(
        NOTED.get(case, "") in event["message"] for event in run.events("note") or [{"message": ""}]
    )
    if options:
        assert run.table()["step"].to_pylist() == list(range(2 if case == "lazy modules" else 1, STEPS + 1))
        assert np.isfinite(run.matrix("gradient_norm")[:, 0]).all() and np.isfinite(run.matrix("update_ratio")[:, 0]).all()


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", CASES)
def test_a_mode_around_the_loop_sees_the_operations_of_the_training_alone(case: str, tmp_path: Path) -> None:
    train(case, tmp_path / "first")  # what is imported late is not counted
    with Counting() as alone:
        train(case, None)
    with Counting() as watched:
        train(case, tmp_path / "second", every=1)
    assert watched.count == alone.count


def test_complex_weights_have_the_norms_of_their_real_and_imaginary_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True):
        plain_loss(model, torch.ones(8, 6)).backward()
        norm, gradient = (float(torch.linalg.vector_norm(t)) for t in (model.first.weight.detach(), model.first.weight.grad))
        optimizer.step()
    run = ns.load_run(tmp_path)
    assert run.matrix("frobenius_norm")[0, 0] == pytest.approx(norm, rel=1e-5)
    assert run.matrix("gradient_norm")[0, 0] == pytest.approx(gradient, rel=1e-5)
    assert np.isnan(run.matrix("spectral_norm")[0, 0])
