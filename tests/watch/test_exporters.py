"""Runs in the forms of other tools hold the same numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv, parquet
from typer.testing import CliRunner

import normscope as ns
from normscope._watch.columns import METRICS, matrix
from normscope._watch.exporters.tensorboard import TensorBoard, tagged
from normscope.cli import app
from tests.watch.loops import Loop, mlp


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ns.Run:
    path = tmp_path_factory.mktemp("runs") / "mlp"
    for _ in Loop(mlp).watched(path, 5):
        pass
    return ns.load_run(path)


def export(run: ns.Run, form: str, *words: str) -> list[Path]:
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", form, *words])
    assert result.exit_code == 0, result.stderr
    return [Path(line) for line in result.stdout.splitlines()]


def test_parquet_is_the_table(run: ns.Run, tmp_path: Path) -> None:
    (path,) = export(run, "parquet", "--out", str(tmp_path / "deep" / "run.parquet"))
    table = parquet.read_table(path)
    assert table.column_names == run.table().column_names and table.schema.metadata == run.table().schema.metadata
    for name in METRICS:
        assert np.array_equal(matrix(table[name]), run.matrix(name), equal_nan=True)


def test_csv_has_a_row_a_step_and_layer(run: ns.Run, tmp_path: Path) -> None:
    steps, layers = export(run, "csv", "--out", str(tmp_path))
    assert csv.read_csv(steps)["loss"].to_pylist() == pytest.approx(run.table()["loss"].to_pylist())
    table = csv.read_csv(layers)
    assert len(table) == 5 * len(run.layers) and [str(name) for name in table["layer"].to_pylist()] == run.layer_names * 5
    assert table["step"].to_pylist() == [step for step in range(1, 6) for _ in run.layers]
    np.testing.assert_allclose(table["angle"].to_numpy(), run.matrix("angle").ravel(), rtol=1e-6)


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_after_and_during_the_run(run: ns.Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (path,) = export(run, "tensorboard", "--out", str(tmp_path / "after"))
    after = events(path)
    live = TensorBoard(tmp_path / "live")
    for _ in Loop(mlp).watched(tmp_path / "run", 5, on_row=live):
        pass
    live.close()
    during = events(tmp_path / "live")
    timings = {"run/overhead"}
    assert {tag: v for tag, v in after.items() if tag not in timings} == {tag: v for tag, v in during.items() if tag not in timings}
    assert [step for step, _ in after["run/loss"]] == list(range(1, 6))
    expected = run.matrix("spectral_norm")[:, 0]
    np.testing.assert_allclose([value for _, value in after[f"spectral_norm/{run.layer_names[0]}"]], expected)


def test_tags_leave_nan_out_and_keep_infinity() -> None:
    row = {"step": 1, "loss": math.inf, "angle": [math.nan, 2.0], "overhead": math.nan}
    assert tagged(row, ["a", "b"], METRICS) == [("run/loss", math.inf), ("angle/b", 2.0)]
