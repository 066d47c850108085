"""A run's life: it records how it ended and its last step; one process writes it; what the disk does not take is said."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normscope as ns
from normscope._watch import store
from normscope._watch.life import STALE, STATES, Life, judged
from normscope._watch.lock import Lock, is_being_written
from tests.watch.fuzzing import check_rows
from tests.watch.loops import Loop, convolutional, mlp
from tests.watch.writing import flushed, opened, write

# how it ended --------------------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


ENDINGS: list[tuple[BaseException | None, str, str]] = [
    (None, "finished", ""),
    (ValueError("of two\nlines"), "failed", "ValueError: of two lines"),
    (AssertionError(), "failed", "AssertionError"),
    (Unprintable(), "failed", "Unprintable: an error that cannot be printed"),
    (KeyboardInterrupt(), "interrupted", ""),
    (SystemExit(), "finished", ""),
    (SystemExit(0), "finished", ""),
    (SystemExit(3), "failed", "SystemExit: 3"),
    (SystemExit(False), "finished", ""),
    (SystemExit("no data"), "failed", "SystemExit: no data"),
    (SystemExit(np.array([1, 2])), "failed", "SystemExit: [1 2]"),
    (SystemExit(np.array([0])), "failed", "SystemExit: [0]"),
    (SystemExit(0.0), "failed", "SystemExit: 0.0"),
    (SystemExit([]), "failed", "SystemExit: []"),
    (GeneratorExit(), "finished", ""),
]


@pytest.mark.parametrize("error, state, said", ENDINGS, ids=[repr(type(error)) + state for error, state, _ in ENDINGS])
def test_a_run_records_how_it_ended_and_its_last_step(error: BaseException | None, state: str, said: str, tmp_path: Path) -> None:
    loop = Loop(mlp)
    try:
        with loop.watch(tmp_path, every=30) as w:
            for _ in range(40):
                w.step(loss=loop.step())
            flushed(w.writer, 1)  # type: ignore[arg-type]
            assert ns.load_run(tmp_path).status == "running"
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    run = ns.load_run(tmp_path)
    assert run.life == Life(state, 40, said) and run.table(["loss"])["step"].to_pylist() == [1, 30]
    assert state in str(run) and said in " ".join(str(run).split())
    with Loop(mlp).watch(tmp_path) as again:
        assert again.step_number == 40


def test_an_uncaught_error_is_known_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for last, state in ((None, "finished"), (ValueError("x"), "failed"), (KeyboardInterrupt(), "interrupted")):
        monkeypatch.setattr(sys, "last_value", last, raising=False)
        Loop(mlp).watch(tmp_path / state)._left()
        assert ns.load_run(tmp_path / state).status == state


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("emptied", [False, True], ids=["directory", "files"])
def test_a_writer_whose_place_is_gone_says_nothing_of_the_next_one(begun: bool, emptied: bool, tmp_path: Path) -> None:
    path, failures = tmp_path / "run", []
    first = opened(path, on_failure=failures.append) if begun else store.Writer(path, failures.append)
    first.event("note")
    if begun:  # and at rest
        write(first, range(1))
        flushed(first, 1)
    while not (path / "events.jsonl").exists():
        time.sleep(0.001)
    for file in [*path.iterdir()]:
        file.unlink(missing_ok=True)
    if not emptied:
        path.rmdir()
    second = opened(path)
    write(second, range(3))
    flushed(second, 3)
    before = (path / "status.json").read_bytes()
    first.close()
    assert (path / "status.json").read_bytes() == before and ns.load_run(path).status == "running" and len(failures) == 1
    second.close()
    assert ns.load_run(path).status == "finished" and len(ns.load_run(path).table()) == 3


NOW = 1e9
CASES: list[tuple[dict[str, Any] | None, list[str], bool | None, float, str]] = [  # status, events, lock, last writing → state
    ({"state": "running", "step": 5, "beat": NOW}, [], True, NOW, "running"),
    ({"state": "running", "step": 5, "beat": NOW - 1e6}, [], True, NOW, "running"),
    ({"state": "running", "step": 5, "beat": NOW + 1e6}, [], True, NOW, "running"),
    ({"state": "running", "step": 5, "beat": NOW}, [], False, NOW, "killed"),
    ({"state": "running", "step": 5, "beat": NOW + 1e6}, [], False, NOW, "killed"),
    ({"state": "running", "step": 5, "beat": NOW - STALE / 2}, [], None, NOW, "running"),
    ({"state": "running", "step": 5, "beat": NOW + STALE / 2}, [], None, NOW, "running"),
    ({"state": "running", "step": 5, "beat": NOW - 2 * STALE}, [], None, NOW, "killed"),
    ({"state": "running", "step": 5, "beat": NOW}, ["started", "closed"], True, NOW, "running"),
    *(({"state": state, "step": 5, "beat": NOW}, [], False, NOW, state) for state in STATES[1:]),
    ({"state": "nonsense", "step": 5, "beat": NOW}, [], False, NOW, "killed"),
    (None, ["started", "closed"], False, NOW, "finished"),
    (None, ["started", "closed", "started"], False, NOW, "killed"),
    (None, ["started"], True, NOW, "running"),
    (None, [], None, NOW - 2 * STALE, "killed"),
]


@pytest.mark.parametrize("status, events, held, updated, state", CASES)
def test_the_state_follows_from_status_lock_and_events(
    status: dict[str, Any] | None, events: list[str], held: bool | None, updated: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert judged(status, [{"kind": kind} for kind in events], held, updated).state == state


def test_a_clock_that_goes_backwards_confuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    writer = opened(tmp_path)
    for number in range(5):
        writer.event("note", number=number)
    write(writer, range(5))
    flushed(writer, 5)
    assert ns.load_run(tmp_path).status == "running"
    writer.close()
    run = ns.load_run(tmp_path)
    assert run.status == "finished" and [event["number"] for event in run.events("note")] == list(range(5))
    check_rows(tmp_path, 5)


def test_a_status_that_cannot_be_read_leaves_lock_and_events(tmp_path: Path) -> None:
    for content in (
        b"",
        b"42",
        b"{}",
        b'{"state": 3}',
        b"\0" * 50,
        b'{"state": "running", "beat": 1, "step": -5}',
        b'{"state": "killed", "beat": 1' + b"0" * 400 + b', "step": 5}',
    ):
        writer = opened(tmp_path)
        write(writer, range(2))
        flushed(writer, 2)
        (tmp_path / "status.json").write_bytes(content)
        assert ns.load_run(tmp_path).status == "running"
        writer.event("closed")
        writer.close(None)
        (tmp_path / "status.json").write_bytes(content)
        assert ns.load_run(tmp_path).status == "finished"


def test_signs_of_life_are_synced_and_name_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(store, "BEAT", 0.01)
    monkeypatch.setattr(store.os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or None)
    steps = iter(range(10**9))
    writer = opened(tmp_path, progress=lambda: next(steps))
    write(writer, range(1))
    flushed(writer, 1)
    seen: set[int] = set()
    while len(seen) < 3:
        seen.add(json.loads((tmp_path / "status.json").read_text())["step"])
    writer.close()
    names = {Path(name).name for name in synced}
    assert {"metrics-0001.arrows", "metrics-0001.checksums", "events.jsonl", "manifest.partial", "status.partial"} <= names


# beginning again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"{", b"[]", b'{"layers": 3}'])
def test_a_damaged_manifest_is_written_anew(content: bytes, tmp_path: Path) -> None:
    list(Loop(mlp).watched(tmp_path, 3))
    (tmp_path / "manifest.json").write_bytes(content)
    list(Loop(mlp).watched(tmp_path, 2))
    run = ns.load_run(tmp_path)
    assert run.table(["loss"])["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert any("manifest.json" in event["message"] and "anew" in event["message"] for event in run.events("note"))


def test_a_damaged_manifest_does_not_hide_that_the_model_is_another(tmp_path: Path) -> None:
    list(Loop(mlp).watched(tmp_path, 2))
    (tmp_path / "manifest.json").write_bytes(b"")
    with pytest.warns(UserWarning, match="different layers"):
        list(Loop(convolutional).watched(tmp_path, 2))


def test_a_call_that_was_refused_keeps_no_lock(tmp_path: Path) -> None:
    list(Loop(mlp).watched(tmp_path, 1))
    for _ in range(2):
        with pytest.raises(ns.InputError, match="different model"):
            Loop(convolutional).watch(tmp_path)
    assert ns.load_run(tmp_path).status == "finished"
    list(Loop(mlp).watched(tmp_path, 1))


def test_a_writer_whose_thread_cannot_start_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gc.disable()  # the thread and its writer know one another
    try:
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", refused)
            Loop(mlp).watch(tmp_path).close()
        list(Loop(mlp).watched(tmp_path, 1))
    finally:
        gc.enable()
    assert len(ns.load_run(tmp_path).table()) == 1


def test_a_second_recording_under_the_same_name_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(Loop(mlp).watched(tmp_path / "run", 3, quiet=False))
    assert "earlier" not in capsys.readouterr().err
    list(Loop(mlp).watched(tmp_path / "run", 2, quiet=False))
    said = [line for line in capsys.readouterr().err.splitlines() if "earlier" in line]
    assert len(said) == 1 and "3 rows of an earlier recording (finished)" in said[0] and "after step 3" in said[0]
    assert any("earlier recording" in event["message"] for event in ns.load_run(tmp_path / "run").events("note"))


# one writer ----------------------------------------------------------------------------------------------------------


def test_copying_or_reading_a_run_does_not_drop_its_lock(tmp_path: Path) -> None:
    writer = opened(tmp_path / "run")
    write(writer, range(1))
    flushed(writer, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run" / ".lock").read_bytes()
    ns.load_run(tmp_path / "run").status  # noqa: B018
    assert is_being_written(tmp_path / "run") and not is_being_written(tmp_path / "copy")
    with pytest.raises(ns.InputError, match="written by this process"):
        Lock(tmp_path / "run")
    writer.close()
    assert not is_being_written(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory"])
def test_a_lock_that_is_no_file_is_refused_and_harms_nothing(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    if kind == "link":
        target.write_text("of value")
    path = tmp_path / "run"
    path.mkdir()
    {"fifo": os.mkfifo, "directory": os.mkdir}.get(kind, lambda place: os.symlink(target, place))(path / ".lock")
    with pytest.raises(ns.InputError, match="not a regular file"):
        Loop(mlp).watch(path)
    assert target.read_text() == "of value" if kind == "link" else not target.exists()
    assert is_being_written(path) is None


@pytest.mark.parametrize("name", ["events.jsonl", "manifest.partial", "status.partial"])
def test_links_are_not_written_through(name: str, tmp_path: Path) -> None:
    target, path = tmp_path / "precious", tmp_path / "run"
    target.write_text("of value")
    path.mkdir()
    (path / name).symlink_to(target)
    failures: list[BaseException] = []
    opened(path, on_failure=failures.append).close()
    assert target.read_text() == "of value" and len(failures) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock here")], ids=str)
def test_a_file_system_without_locks_is_named(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **options: Any) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr("fcntl.flock", none)
    else:  # of a system call that is missing, in words of filelock
        monkeypatch.setattr("filelock.FileLock.acquire", none)
    with pytest.warns(UserWarning, match=r"training continues.*cannot be locked.*"):
        loop = Loop(mlp)
        watch = loop.watch(tmp_path)
    loop.step()
    watch.close()
