"""What a disk that is slow, full, gone or silent does to a recording: rows that were written stay, and training goes on."""

from __future__ import annotations

import errno
import multiprocessing
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import normscope as ns
from normscope._watch import store
from normscope._watch.columns import schema
from normscope._watch.lock import is_being_written
from tests.watch.fuzzing import LAYERS, check_rows, row
from tests.watch.loops import Loop, mlp
from tests.watch.writing import MANIFEST, flushed, opened, write


def test_on_row_gets_a_copy_after_the_write(tmp_path: Path) -> None:
    def on_row(found: Any, layers: list[str]) -> None:
        assert found["step"] in ns.load_run(tmp_path).table(["loss"])["step"].to_pylist()
        found["angle"][:] = 0
        found.pop("step")
        found.clear()
        layers.clear()

    list(Loop(mlp).watched(tmp_path, 4, on_row=on_row))
    run = ns.load_run(tmp_path)
    assert run.table(["loss"])["step"].to_pylist() == [1, 2, 3, 4] and not run.events("error") and run.matrix("angle").any()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError("no network")], ids=repr)
def test_on_row_cannot_end_the_recording(error: BaseException, tmp_path: Path) -> None:
    def on_row(row: Any, layers: list[str]) -> None:
        raise error

    with pytest.warns(UserWarning, match="no longer records on_row"):
        list(Loop(mlp).watched(tmp_path, 4, on_row=on_row))
    run = ns.load_run(tmp_path)
    assert len(run.table()) == 4 and run.status == "finished" and type(error).__name__ in run.events("error")[0]["message"]


def test_an_interrupted_close_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, loop = threading.Event(), Loop(mlp)
    watch = loop.watch(tmp_path, on_row=lambda row, layers: answer.wait(60))
    loop.step()
    writer = watch.writer
    assert writer is not None

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(writer._thread, "join", interrupted)
        watch.close(ValueError("x"))
    assert is_being_written(tmp_path)
    answer.set()
    watch.close()
    run = ns.load_run(tmp_path)
    assert not is_being_written(tmp_path) and run.status == "failed" and len(run.events("closed")) == 1


@pytest.mark.parametrize("gone", ["deleted", "moved", "replaced"])
def test_a_directory_that_is_gone_is_noticed(gone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(mlp)
    with pytest.warns(UserWarning, match="was deleted or moved"), loop.watch(tmp_path / "run", quiet=False) as w:
        for number in range(4):
            w.step(loss=loop.step())
            if number == 1:
                flushed(w.writer, 1)  # type: ignore[arg-type]
                shutil.move(tmp_path / "run", tmp_path / "elsewhere")
                if gone == "deleted":
                    shutil.rmtree(tmp_path / "elsewhere")
                if gone == "replaced":
                    (tmp_path / "run").mkdir()
    assert "not all of it is recorded" in capsys.readouterr().err


CALLS = {"write": "write_all", "sync": "_sync", "status": "replace_json"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8, 13])
def test_an_error_at_any_call_ends_the_recording_once_and_loses_nothing_flushed(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = set(threading.enumerate())
    real, failures = getattr(store, CALLS[call]), list[BaseException]()
    calls = 0

    def failing(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.EIO, "Input/output error")
        real(*args, **options)

    monkeypatch.setattr(store, CALLS[call], failing)
    monkeypatch.setattr(store, "BEAT", 0.0)
    writer = store.Writer(tmp_path, failures.append)
    writer.event("started")
    writer.begin(MANIFEST, schema(LAYERS))
    write(writer, range(6))
    writer.close()
    assert len(failures) == writer.failed == (calls > number) and ("Input/output error" in writer.failure) == writer.failed
    assert not is_being_written(tmp_path) and not any(
        thread.name == "normscope-writer" for thread in set(threading.enumerate()) - earlier
    )
    if writer.rows:
        assert ns.load_run(tmp_path).table()["step"].to_pylist() == list(range(writer.rows))


def test_a_slow_disk_loses_nothing_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.write_all

    def slow(file: Any, content: Any) -> None:
        time.sleep(0.01)
        real(file, bytes(content)[:5])
        time.sleep(0.01)
        real(file, bytes(content)[5:])

    monkeypatch.setattr(store, "write_all", slow)
    writer = opened(tmp_path)
    while not (tmp_path / "manifest.json").exists():
        time.sleep(0.001)
    for step in range(20):
        writer.row(row(step))
        with_rows = ns.load_run(tmp_path).parts[0].table(["loss"])  # whatever is half written
        assert with_rows is None or with_rows["step"].to_pylist() == list(range(len(with_rows)))
    writer.close()
    check_rows(tmp_path, 20)


def test_a_disk_that_never_answers_is_said_and_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, answer = list[BaseException](), threading.Event()
    writer = opened(tmp_path, on_failure=failures.append)
    flushed(writer, 0)
    real = store.write_all
    monkeypatch.setattr(store, "write_all", lambda *args: (answer.wait(60), real(*args))[1])
    write(writer, range(1))
    writer.close(timeout=0.05)
    assert "did not take" in str(failures[0]) and is_being_written(tmp_path)
    answer.set()
    writer._thread.join()


def write_on_a_small_disk(path: Path, most: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    failures: list[BaseException] = []
    writer = opened(path, on_failure=failures.append)
    for step in range(100):
        writer.row(row(step))
        flushed(writer, step + 1)
    writer.close()
    assert len(failures) == 1 and 0 < writer.rows < 100
    (path / "rows").write_text(str(writer.rows))


def test_a_disk_of_64_kilobytes_keeps_what_it_took(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.watch.fuzzing"])
    process = context.Process(target=write_on_a_small_disk, args=(tmp_path, 64 << 10))
    process.start()
    process.join()
    assert process.exitcode == 0
    run, rows = ns.load_run(tmp_path), int((tmp_path / "rows").read_text())
    assert run.table(["loss"])["step"].to_pylist()[:rows] == list(range(rows))
    assert "ended before the training" in " ".join(run.notes) and "File too large" in " ".join(run.notes)
    assert run.damage[-1].why == "cut off at the end" and run.damage[-1].rows > 0
