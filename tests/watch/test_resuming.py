"""Runs that earlier code recorded go on, or are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import normscope as ns
from normscope._watch.columns import NEWER, schema
from normscope.report.run_page import COLUMNS, run_report
from normscope.report.snapshot import Snapshot
from tests.watch.loops import Loop, Transformer


def older(layers: Any) -> pa.Schema:
    """The columns of a run without those that came later."""
    full = schema(layers)
    return pa.schema([column for column in full if column.name not in NEWER], full.metadata)


def test_a_run_of_earlier_code_goes_on_without_what_it_lacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had no rows for blocks and attention, and fewer columns: both parts can be read, and the report is made."""
    with monkeypatch.context() as earlier:
        earlier.setattr("normscope._watch.forward.block_paths", lambda model: frozenset())
        earlier.setattr("normscope._watch.forward.attentions", lambda roots, calls: {})
        earlier.setattr("normscope._watch.recording.schema", older)
        for _ in Loop(Transformer).watched(tmp_path, 3):
            pass
    assert "write_ratio" not in ns.load_run(tmp_path).columns
    for _ in Loop(Transformer).watched(tmp_path, 3, resume=True):
        pass
    run = ns.load_run(tmp_path)
    assert run.table()["step"].to_pylist() == [1, 2, 3, 4, 5, 6] and not run.events("error")
    assert not [layer for layer in run.layers if layer["role"] in ("block", "attention")]
    assert any("continues without them" in event["message"] for event in run.events("note"))
    assert np.isfinite(run.matrix("spectral_norm")).any(1).all()
    moved = np.isfinite(run.matrix("update_rms")).any(1)
    assert moved.tolist() == [False] * 3 + [True] * 3 and np.isnan(run.arrays("samples")["samples"][:3]).all()
    assert "6 of 6 steps sampled" in " ".join(str(run).split()) or "all 6 steps" in str(run)
    assert run_report([Snapshot.of(run, COLUMNS)])


def test_a_run_with_layers_that_are_no_longer_recorded_is_refused_in_one_line(tmp_path: Path) -> None:
    for _ in Loop(Transformer).watched(tmp_path, 2):
        pass
    with pytest.warns(UserWarning, match=r"has different layers than this recording \(it has embed, .*choose another run="):
        for _ in Loop(Transformer).watched(tmp_path, 2, resume=True, layers="norm"):
            pass
    assert ns.load_run(tmp_path).table()["step"].to_pylist() == [1, 2]
