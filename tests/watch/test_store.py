"""The run directory: what is flushed is never lost, a reader can follow, and there is one writer at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import normscope as ns
from normscope._watch.columns import METRICS, matrix, schema
from normscope._watch.following import FollowedPart
from normscope._watch.lock import Lock
from normscope._watch.segments import FollowedSegment
from normscope._watch.store import Writer, write_all
from tests.watch import fuzzing
from tests.watch.fuzzing import fail

LAYERS = [{"name": f"layer{i}"} for i in range(7)]
MANIFEST = {"layers": LAYERS}


def row(step: int, layers: int = len(LAYERS)) -> dict[str, Any]:
    return fuzzing.row(step, layers)


def is_row(table: pa.Table, index: int, step: int) -> bool:
    found = table.slice(index, 1)
    lists = all(np.array_equal(matrix(found[name])[0], row(step)[name].astype(np.float32)) for name in METRICS)
    return found["step"][0].as_py() == step and found["loss"][0].as_py() == step / 8 and lists


def opened(path: Path, **options: Any) -> Writer:
    writer = Writer(path, **{"on_failure": fail, **options})
    writer.begin(MANIFEST, schema(LAYERS))
    return writer


def written(path: Path, steps: range) -> None:
    writer = opened(path)
    for count, step in enumerate(steps, start=1):
        writer.row(row(step))
        while writer.rows < count:
            time.sleep(0)
    writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path, range(100))
    table = ns.load_run(tmp_path).table()
    assert len(table) == 100 and all(is_row(table, step, step) for step in range(100))
    assert json.loads(table.schema.metadata[b"layers"]) == [layer["name"] for layer in LAYERS]


def test_any_arrow_tool_reads_a_closed_segment(tmp_path: Path) -> None:
    written(tmp_path, range(5))
    with pa.ipc.open_stream(tmp_path / "metrics-0001.arrows") as stream:
        assert stream.read_all().equals(ns.load_run(tmp_path).table())


def test_what_a_row_lacks_is_nan(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.row({"step": 1, "time": 0.0})
    writer.close()
    run = ns.load_run(tmp_path)
    assert np.isnan(run.matrix("angle")).all() and np.isnan(run.table()["loss"][0].as_py())


def test_a_restart_begins_a_new_segment_and_replaces_repeated_steps(tmp_path: Path) -> None:
    written(tmp_path, range(10))
    written(tmp_path, range(6, 14))
    assert len(list(tmp_path.glob("metrics-*.arrows"))) == 2
    assert ns.load_run(tmp_path).table(["loss"])["step"].to_pylist() == list(range(14))


@pytest.mark.parametrize("columns", [["loss"], ["loss", "angle"], ["step", "angle"]])
def test_some_columns(columns: list[str], tmp_path: Path) -> None:
    written(tmp_path, range(3))
    assert set(ns.load_run(tmp_path).table(columns).column_names) == {"step", *columns}
    with pytest.raises(ns.InputError, match="no column nonsense"):
        ns.load_run(tmp_path).table(["nonsense"])


def test_every_cut_leaves_the_complete_rows(tmp_path: Path) -> None:
    """As if the process had been killed after any byte."""
    written(tmp_path / "whole", range(4))
    content = (tmp_path / "whole" / "metrics-0001.arrows").read_bytes()
    ends = []
    source = pa.BufferReader(content)
    for _ in range(5):
        pa.ipc.read_message(source)
        ends.append(source.tell())
    cut = tmp_path / "metrics-0001.arrows"
    for length in (*range(40), *range(ends[0] - 3, ends[0] + 4), *range(ends[1] - 9, len(content), 37), *ends):
        cut.write_bytes(content[:length])
        segment = FollowedSegment(cut)
        segment.refresh()
        table = segment.table()
        assert (0 if table is None else len(table)) == sum(length >= end for end in ends[1:])
        assert (table is None) == (length < ends[0])


def test_a_reader_follows_a_live_run(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    seen: list[int] = []
    writer.event("started")
    for rows in range(0, 12, 4):
        for step in range(rows, rows + 4):
            writer.row(row(step))
        if rows == 8:
            writer.event("closed")
            writer.close()
        else:
            while writer.rows < rows + 4:
                time.sleep(0.001)
        if rows == 0:
            following = ns.load_run(tmp_path).follow(poll=0.01, timeout=20)
        while len(seen) < rows + 4:
            seen += next(following)["step"].to_pylist()
    assert seen == list(range(12)) and list(following) == []


def test_events_survive_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"time": 1, "kind": "note"}\n{"time": 2, "ki')
    writer = opened(tmp_path)
    writer.event("note", value=float("nan"), nested=[{"x": float("inf")}])
    writer.close()
    events = ns.load_run(tmp_path).events()
    assert [event["kind"] for event in events] == ["note", "note"]
    assert events[1]["value"] == "nan" and events[1]["nested"] == [{"x": "inf"}]


def test_two_writers_in_one_process_are_refused(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with pytest.raises(ns.InputError, match="choose another run"):
        Lock(tmp_path)
    writer.close()
    written(tmp_path, range(1))


def test_no_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ns.InputError, match=r"ns\.watch"):
        ns.load_run(tmp_path / "nothing")
    writer = opened(tmp_path)
    writer.event("started")
    writer.close()
    assert len(ns.load_run(tmp_path).table()) == 0


def test_a_manifest_that_is_not_json(tmp_path: Path) -> None:
    written(tmp_path, range(1))
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ns.InputError, match="is not JSON"):
        ns.load_run(tmp_path).layers  # noqa: B018


def test_a_disk_that_fails_ends_the_recording_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = []
    writer = opened(tmp_path, on_failure=failures.append)
    writer.row(row(0))
    while writer.rows < 1:
        time.sleep(0.001)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normscope._watch.store.write_all", full)
    for step in range(1, 50):
        writer.row(row(step))
    writer.close()
    assert len(failures) == 1 and writer.failed
    assert ns.load_run(tmp_path).table()["step"].to_pylist() == [0]


def test_partial_writes_are_completed() -> None:
    class Slow:
        content = b""

        def write(self, part: memoryview) -> int:
            self.content += bytes(part[:3])
            return min(3, len(part))

    slow = Slow()
    write_all(slow, b"0123456789")  # type: ignore[arg-type]
    assert slow.content == b"0123456789"


# kill -9 -------------------------------------------------------------------------------------------------------------


def write_forever(path: Path, start: int, flushed: Connection) -> None:
    """Write rows until killed; report every number that has been flushed."""
    writer = opened(path)
    step = start
    while True:
        writer.row(row(step))
        step += 1
        while writer.rows < step - start:
            time.sleep(0)
        flushed.send(step)


def killed_at_random(path: Path, start: int, chance: random.Random) -> int:
    """Start a process that writes, kill it, and return what it had reported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["normscope._watch.store", __name__])
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=write_forever, args=(path, start, writing), daemon=True)
    process.start()
    writing.close()
    reading.poll(60)  # it has begun
    time.sleep(chance.uniform(0, 0.05))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    last = start
    try:
        while reading.poll():
            last = reading.recv()
    except EOFError:
        pass
    return last


def check_kills(path: Path, times: int) -> None:
    chance, done = random.Random(times), 0
    for count in range(times):
        flushed = killed_at_random(path, done, chance)
        table = FollowedPart.at(path, anew=True).table()
        assert table is not None and len(table) >= flushed > done
        assert table["step"].to_pylist() == list(range(len(table)))
        assert is_row(table, flushed - 1, flushed - 1) and is_row(table, len(table) - 1, len(table) - 1)
        run, done = ns.load_run(path), len(table)
        assert (
            run.status == "killed" and sum(damage.rows for damage in run.damage) <= 1 + count
        )  # at most the row in hand, each time
    written(path, range(done, done + 3))  # and a restart goes on
    assert ns.load_run(path).table(["loss"])["step"].to_pylist() == list(range(done + 3))


def test_nothing_flushed_is_lost_to_kill_9(tmp_path: Path) -> None:
    check_kills(tmp_path, 10)


@pytest.mark.full
def test_nothing_flushed_is_lost_to_kill_9_often(tmp_path: Path) -> None:
    check_kills(tmp_path, 200)


def hold(path: Path, ready: Connection) -> None:
    writer = opened(path)
    writer.event("started")
    while not (path / "status.json").exists():
        time.sleep(0.001)
    ready.send(True)
    time.sleep(60)


def test_two_processes_are_refused_until_the_first_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(tmp_path, writing), daemon=True)
    process.start()
    assert reading.poll(60)
    with pytest.raises(ns.InputError, match=f"another process \\({process.pid}\\)"):
        Writer(tmp_path, fail)
    process.kill()
    process.join()
    written(tmp_path, range(2))


# size ----------------------------------------------------------------------------------------------------------------


def check_size(path: Path, rows: int) -> None:
    layers = [{"name": f"layer{i}"} for i in range(500)]
    writer = Writer(path, fail)
    writer.begin({"layers": layers}, schema(layers))
    for step in range(rows):
        writer.row(row(step, 500))
        while writer.rows < step - 500:  # stay within the queue
            time.sleep(0.001)
    writer.close(timeout=300)
    assert writer.dropped == 0 and writer.rows == rows
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size / rows * 10_000 < 1e9
    assert ns.load_run(path).matrix("spectral_norm").shape == (rows, 500)


def test_ten_thousand_steps_of_five_hundred_layers_fit_in_a_gigabyte(tmp_path: Path) -> None:
    check_size(tmp_path, 300)


@pytest.mark.full
def test_all_ten_thousand_steps(tmp_path: Path) -> None:
    check_size(tmp_path, 10_000)


def test_what_is_said_of_the_last_row_is_kept(tmp_path: Path) -> None:
    """A finding about a row is an event from the writer's own thread, made while the run may be closing already."""
    writer = Writer(tmp_path, fail)
    writer.begin(MANIFEST, schema(LAYERS), lambda row: writer.event("finding", step=row["step"]))
    for step in range(20):
        writer.row(row(step))
    writer.event("closed")
    writer.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event.get("step") for event in events] == [*range(20), None]
