"""Never in the way: what fails inside the recorder is noted and switched off; training goes on, bit for bit."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope._watch import forward, gradients, stepping
from tests.watch.loops import Loop, convolutional, filling, mlp
from tests.watch.test_identity import same, state


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


def plain(steps: int = 8, **options: Any) -> list[Any]:
    loop = Loop(**options)
    for _ in range(steps):
        loop.step()
    return state(loop)


PARTS: dict[str, tuple[Any, str, str, str]] = {  # what → module, name to break, columns that go, a column that stays
    "input statistics": (forward, "input_statistics", "input_variance", "gradient_norm"),
    "gradients": (gradients, "norms", "gradient_norm", "input_variance"),
    "updates": (stepping, "dots", "update_norm", "frobenius_norm"),
    "learning rates": (stepping, "group_rate", "effective_lr", "update_norm"),
}


@pytest.mark.parametrize("what", PARTS)
def test_only_the_part_that_fails_is_switched_off(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    module, name, gone, stays = PARTS[what]
    monkeypatch.setattr(module, name, broken)
    loop = Loop()
    with pytest.warns(UserWarning, match=f"no longer records {what}") as caught:
        for _ in loop.watched(tmp_path, 8):
            pass
    assert len([w for w in caught if "normscope" in str(w.message)]) == 1
    assert same(state(loop), expected)
    run = ns.load_run(tmp_path)
    (error,) = run.events("error")
    assert error["what"] == what and "broken on purpose" in error["message"] and len(run.table()) == 8
    assert np.isnan(run.matrix(gone)).all() and np.isfinite(run.matrix(stays)).any()


def test_warnings_as_errors_do_not_reach_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "input_statistics", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in Loop().watched(tmp_path, 3):
            pass


def test_a_hook_of_the_user_that_fails_is_switched_off(tmp_path: Path) -> None:
    seen = []

    def on_row(row: Any, layers: list[str]) -> None:
        seen.append(row["step"])
        assert len(row["angle"]) == len(layers)
        if len(seen) == 3:
            raise ValueError("no network")

    with pytest.warns(UserWarning, match="on_row"):
        for _ in Loop().watched(tmp_path, 8, on_row=on_row):
            pass
    assert seen == [1, 2, 3] and len(ns.load_run(tmp_path).table()) == 8


@pytest.mark.parametrize("place", ["file", "read-only"])
def test_a_directory_that_cannot_be_written_ends_recording_only(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, loop = plain(), Loop()
    target = tmp_path / "run"
    if place == "file":
        target.write_text("in the way")
    else:  # the tests may run as root, for whom nothing is read-only
        monkeypatch.setattr(Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.warns(UserWarning, match="training continues"):
        for _ in loop.watched(target, 8):
            pass
    assert same(state(loop), expected)


def test_a_full_disk_ends_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope._watch import store

    expected, loop = plain(), Loop()
    monkeypatch.setattr(store, "write_all", filling(store.write_all))
    with pytest.warns(UserWarning, match="No space left"):
        for _ in loop.watched(tmp_path, 8):
            pass
    assert same(state(loop), expected) and len(ns.load_run(tmp_path).table()) < 8


def test_nan_and_infinity_are_recorded(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    for number, _ in enumerate(loop.watched(tmp_path, 6)):
        if number == 3:
            with torch.no_grad():
                loop.model[0].weight[0] = torch.nan
        if number == 5:
            with torch.no_grad():
                loop.model[4].weight.fill_(torch.inf)
    run = ns.load_run(tmp_path)
    loss, norm = run.table()["loss"].to_numpy(), run.matrix("frobenius_norm")[:, 0]
    assert np.isfinite(loss[:3]).all() and np.isnan(loss[3:]).all() and np.isnan(norm[3:]).all()
    assert not run.events("error") and len(run.table()) == 6


@pytest.mark.parametrize("batch", [0, 1])
def test_odd_batches(batch: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True):
        for _ in range(3):
            model(torch.ones(batch, 3, 4, 4)).sum().backward()
            optimizer.step()
    run = ns.load_run(tmp_path)
    assert not run.events("error") and len(run.table()) == 3


def test_models_with_nothing_to_record(tmp_path: Path) -> None:
    for name, model in {"none": nn.Tanh(), "frozen": nn.Linear(3, 2).requires_grad_(False), "bias": nn.PReLU()}.items():
        loose = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([loose], lr=0.1)
        with ns.watch(model, optimizer, run=tmp_path / name, every=1, quiet=True):
            for _ in range(2):
                (model(torch.ones(4, 3)).sum() * loose).backward()
                optimizer.step()
        run = ns.load_run(tmp_path / name)
        assert not run.events("error") and len(run.table()) == 2, name


def test_sparse_gradients_and_half_precision(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x).mean(1).bfloat16())

    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[1, 2], [3, 1]])).float().square().sum().backward()
            expected = [model.table.weight.grad.to_dense().norm(), model.head.weight.grad.float().norm()]
            optimizer.step()
    run = ns.load_run(tmp_path)
    assert not run.events("error")
    np.testing.assert_allclose(run.matrix("gradient_norm")[-1], [float(value) for value in expected], rtol=1e-5)


def test_mistakes_in_the_call(tmp_path: Path) -> None:
    loop = Loop(mlp)
    for wrong in (
        {"budget": 2.0}, {"every": -1}, {"sinks": None}, {"sinks": "wandb"}, {"sinks": 3}, {"probe": 7}, {"layers": "("}, {"layers": 3},
        {"layers": b"0"}, {"layers": re.compile(b"0")}, {"budget": "a"}, {"every": "a"}, {"dense": "a"}, {"start_step": "a"},
        {"start_step": math.nan}, {"start_step": 2**70}, {"every": 1.5}, {"every": math.nan}, {"every": 2**70},
        {"dense": math.nan}, {"scaler": 3}, {"on_row": 3},
    ):  # fmt: skip
        with pytest.raises(ns.InputError, match=f"{next(iter(wrong))} must be"):
            loop.watch(tmp_path, **{"every": None, **wrong})
    for wrong in (
        {"every": "5"},
        {"every": None},
        {"every": math.nan},
        {"iterations": 2.5},
        {"inputs": "x"},
        {"targets": 3},
        {"loss": None},
    ):
        with pytest.raises(ns.InputError, match=r"must be whole numbers|a probe needs a tensor"):
            ns.Probe(**{"inputs": torch.zeros(1), "targets": torch.zeros(1), "loss": nn.functional.mse_loss, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ns.InputError, match=r"torch\.nn\.Module"):
        ns.watch(len, loop.optimizer, run=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ns.InputError, match=r"torch\.optim\.Optimizer"):
        ns.watch(loop.model, loop.model, run=tmp_path)  # type: ignore[arg-type]
    with loop.watch(tmp_path / "run"), pytest.raises(ns.InputError, match="choose another run"):
        Loop(mlp).watch(tmp_path / "run")
    loop = Loop(mlp)
    for _ in loop.watched(tmp_path / "run", 1):
        pass
    with pytest.raises(ns.InputError, match="different model"):
        Loop(convolutional).watch(tmp_path / "run")


def test_a_restart_continues_the_steps(tmp_path: Path) -> None:
    for start, steps in ((None, 4), (None, 3), (5, 2)):
        for _ in Loop(mlp).watched(tmp_path, steps, start_step=start):
            pass
    assert ns.load_run(tmp_path).table(["loss"])["step"].to_pylist() == [1, 2, 3, 4, 5, 6, 7]
    assert len(list(tmp_path.glob("metrics-*.arrows"))) == 3


def test_some_layers_only(tmp_path: Path) -> None:
    for _ in Loop(mlp).watched(tmp_path, 2, layers=r"^[12]$"):
        pass
    assert ns.load_run(tmp_path).layer_names == ["1", "2"]


def test_the_cost_is_printed_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in Loop(mlp).watched(tmp_path, 5, quiet=False):
        pass
    printed = capsys.readouterr()
    assert "5 of 5 steps sampled, 5 losses and 5 gradient norms read; overhead" in printed.err and printed.out == ""
    (closed,) = ns.load_run(tmp_path).events("closed")
    assert closed["sampled_steps"] == 5 and closed["overhead"] > 0 and closed["setup_seconds"] > 0
    assert np.isfinite(ns.load_run(tmp_path).table()["overhead"].to_numpy()).all()


TRAINING = """
    import sys, torch, normscope as ns
    sys.path.insert(0, {root!r})
    from tests.watch.loops import Loop
    loop = Loop()
    watch = loop.watch({run!r})
    while True:
        watch.step(loss=loop.step())
        print(watch.writer.rows, flush=True)
"""


def test_a_killed_training_keeps_its_rows_and_can_go_on(tmp_path: Path) -> None:
    script = textwrap.dedent(TRAINING).format(root=str(Path(__file__).parents[2]), run=str(tmp_path))
    done = 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [int(process.stdout.readline()) for _ in range(12)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        table = ns.load_run(tmp_path).table()
        assert len(table) >= done + lines[-1] and table["step"].to_pylist() == list(range(1, len(table) + 1))
        done = len(table)
        assert ns.load_run(tmp_path).status == "killed"
    assert np.isfinite(ns.load_run(tmp_path).matrix("spectral_norm")[:, 0]).all()


def test_leaving_without_closing_writes_what_is_there(tmp_path: Path) -> None:
    script = textwrap.dedent(TRAINING).replace("while True", "for _ in range(5)")
    script = script.format(root=str(Path(__file__).parents[2]), run=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = ns.load_run(tmp_path)
    assert len(run.table()) == 5 and run.events("closed")


def test_a_name_that_no_file_can_hold_is_escaped_and_training_can_go_on(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            OrderedDict([("flat", nn.Flatten()), ("half\ud800", nn.Linear(48, 5)), ("half\udc00", nn.LayerNorm(5))])
        )

    for _ in range(2):  # the second time into the same directory
        list(Loop(make=make).watched(tmp_path, 2))
    run = ns.load_run(tmp_path)
    assert len(run.table()) == 4
    assert run.layer_names == json.loads(run.table().schema.metadata[b"layers"]) == ["half\\ud800", "half\\udc00"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_default_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with ns.watch(model, optimizer, run=tmp_path, every=1, quiet=True):
            for _ in range(3):
                model(torch.randn(4, 6)).sum().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(default)
    run = ns.load_run(tmp_path)
    assert len(run.table()) == 3 and not run.events("error") and np.isfinite(run.matrix("spectral_norm")[:, 0]).all()


@pytest.mark.parametrize("told", [True, False])
def test_a_parameter_that_was_replaced_is_noticed(told: bool, tmp_path: Path) -> None:
    loop = Loop(mlp)
    with loop.watch(tmp_path) as w:
        for number in range(4):
            if number == 2:
                loop.model[1].weight = nn.Parameter(loop.model[1].weight.detach().clone())
                if told:
                    loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
            w.step(loss=loop.step())
    run = ns.load_run(tmp_path)
    index = run.layer_names.index("1")
    for metric in ("frobenius_norm", "spectral_norm", "gradient_norm"):
        recorded = np.isfinite(run.matrix(metric))
        assert recorded[:, index].tolist() == [True, True, False, False] and recorded[:, run.layer_names.index("7")].all()
    assert "1.weight" in run.events("note")[-1]["message"] and not run.events("error")


def test_samples_do_not_ask_the_model_for_its_parameters(tmp_path: Path) -> None:
    """A model may name them in its own way, and count how often it is asked."""

    class Own(nn.Sequential):
        asked = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            Own.asked += 1
            yield from (
                (name.replace("1.bias", "mine"), parameter) for name, parameter in super().named_parameters(*args, **kwargs)
            )

    loop, asked = Loop(lambda: Own(nn.Flatten(), nn.Linear(48, 5))), []
    with loop.watch(tmp_path) as w:
        for _ in range(4):
            w.step(loss=loop.step())
            asked.append(Own.asked)
    run = ns.load_run(tmp_path)
    assert asked[0] == asked[-1] and not run.events("error")
    assert not any("replaced" in event["message"] for event in run.events("note"))
