"""The run directory, written by a background thread so that training never waits for a disk.

    manifest.json        configuration, layers, versions; replaced as a whole
    events.jsonl         findings, errors and notes, one JSON object a line
    metrics-0001.arrows  an Arrow IPC stream; a new segment after every restart
    rank-0/, rank-1/ …   the same again, one a process, where there are several

A row is one `write` of one complete message, so what was flushed is readable after `kill -9`, and a reader that meets a torn
last message knows that it is the end.
"""

from __future__ import annotations

import json
import math
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from normscope.core.errors import InputError
from normscope.recorder.columns import record_batch

MANIFEST, EVENTS, LOCK, SEGMENTS = "manifest.json", "events.jsonl", ".lock", "metrics-*.arrows"
MOST_WAITING = 1024  # rows, for a disk that does not keep up
MOST_AT_ONCE = 64

FLOCK = (  # C's struct flock
    ("qqihh", ("start", "length", "pid", "type", "whence"))
    if sys.platform == "darwin"
    else ("hhqqi", ("type", "whence", "start", "length", "pid"))
)

Complete = Callable[[dict[str, Any]], None]
Refused = (OSError, pa.ArrowException)


class Lock:
    """At most one writer a directory. The kernel drops the lock when its process ends, however it ends."""

    _here: set[Path] = set()  # a record lock does not hold within one process

    def __init__(self, directory: Path) -> None:
        import fcntl

        self.path = directory.resolve() / LOCK
        if self.path in Lock._here:
            raise InputError(f"{directory} is already being written by this process: close the other watch, or choose another run=")
        self.file = self.path.open("a+")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._owner()
            self.file.close()
            raise InputError(f"{directory} is being written by another process{owner}: choose another run=") from error
        Lock._here.add(self.path)
        self.file.truncate(0)
        self.file.write(str(os.getpid()))
        self.file.flush()

    def _owner(self) -> str:
        self.file.seek(0)
        number = self.file.read().strip()
        return f" ({number})" if number else ""

    def release(self) -> None:
        Lock._here.discard(self.path)
        self.file.close()


def is_being_written(directory: Path) -> bool | None:
    """Whether a process holds the directory's lock, asked without taking it; None where there is no lock to ask."""
    import fcntl

    path = directory.resolve() / LOCK
    if path in Lock._here:
        return True
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            asked = struct.pack(FLOCK[0], *(fcntl.F_RDLCK if name == "type" else 0 for name in FLOCK[1]))
            answer = dict(zip(FLOCK[1], struct.unpack(FLOCK[0], fcntl.fcntl(file, fcntl.F_GETLK, asked)), strict=True))
    except OSError:
        return None
    return bool(answer["type"] != fcntl.F_UNLCK)


class Writer:
    """One run directory. Every method returns at once; a thread does the writing and `cost` is the time it took.

    on_failure is called once, from that thread, with the error that ended the recording.
    """

    def __init__(
        self, directory: Path, on_failure: Callable[[Exception], None], observe: Callable[[dict[str, Any]], None] = lambda row: None
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.on_failure = directory, on_failure
        self.lock = Lock(directory)
        self.cost, self.failed, self.dropped, self.rows = 0.0, False, 0, 0
        self._schema: pa.Schema | None = None
        self._segment: BinaryIO | None = None
        self._events: BinaryIO | None = None
        self._waiting: queue.Queue[Callable[[], None] | dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="normscope-writer", daemon=True)
        self._thread.start()

    def begin(self, manifest: Mapping[str, Any], schema: pa.Schema, complete: Complete = lambda row: None) -> None:
        """Write the manifest and start a new segment. complete: adds to a row just before it is written, on the thread."""
        self._complete = complete
        self._waiting.put(lambda: self._begin(manifest, schema))

    def row(self, row: dict[str, Any]) -> None:
        if self._waiting.qsize() >= MOST_WAITING:
            self.dropped += 1
        else:
            self._waiting.put(row)

    def event(self, kind: str, **content: Any) -> None:
        line = json.dumps({"time": time.time(), "kind": kind, **plain(content)}, ensure_ascii=False) + "\n"
        if threading.current_thread() is self._thread:  # said of a row that is being written, perhaps the last one
            self._append(line)
        else:
            self._waiting.put(lambda: self._append(line))

    def close(self, timeout: float = 60.0) -> None:
        """Write what is waiting, then end the stream and let go of the directory."""
        if self.dropped:
            self.event("error", what="store", message=f"{self.dropped} rows were dropped because the disk did not keep up")
        self._waiting.put(None)
        self._thread.join(timeout)
        self.lock.release()

    # on the thread -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            items = self._next()
            start = time.thread_time()
            rows = [item for item in items if isinstance(item, dict)]
            if rows:
                self._try(partial(self._write, rows))
            for item in items:
                if callable(item):
                    self._try(item)
            self.cost += time.thread_time() - start
            if items[-1] is None:
                self._try(self._finish)
                return

    def _next(self) -> list[Callable[[], None] | dict[str, Any] | None]:
        """The next thing to do, or all rows that wait in a row."""
        items = [self._waiting.get()]
        while isinstance(items[-1], dict) and len(items) < MOST_AT_ONCE:
            try:
                items.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return items

    def _try(self, action: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            action()
        except Refused as error:
            self.failed = True
            self.on_failure(error)

    def _begin(self, manifest: Mapping[str, Any], schema: pa.Schema) -> None:
        replace_json(self.directory / MANIFEST, manifest)
        number = 1 + max((segment_number(path) for path in self.directory.glob(SEGMENTS)), default=0)
        self._schema = schema
        self._segment = (self.directory / f"metrics-{number:04d}.arrows").open("xb", buffering=0)
        write_all(self._segment, schema.serialize())

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        assert self._segment is not None and self._schema is not None, "begin comes before the first row"
        for row in rows:
            self._complete(row)
        write_all(self._segment, record_batch(rows, self._schema).serialize())
        self.rows += len(rows)

    def _append(self, line: str) -> None:
        if self._events is None:
            self._events = (self.directory / EVENTS).open("ab", buffering=0)
            if self._events.tell() and not _ends_with_newline(self.directory / EVENTS):
                line = "\n" + line  # the last writer was killed in the middle of a line
        write_all(self._events, line.encode())

    def _finish(self) -> None:
        if self._segment is not None:
            write_all(self._segment, b"\xff\xff\xff\xff\x00\x00\x00\x00")  # end of an Arrow IPC stream
            self._segment.close()
        if self._events is not None:
            self._events.close()


def segment_number(path: Path) -> int:
    """The number at the end of a segment's name, by which segments are in order."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def write_all(file: BinaryIO, content: Any) -> None:
    """Write all of it: an unbuffered file may take only a part, for instance when the disk is full."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(plain(content), indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, path)


def plain(content: Any) -> Any:
    """As a JSON file has it: numbers that JSON lacks become strings, what is unknown becomes text, text that UTF-8 lacks an escape.

    >>> plain({"half": "\\ud800", "none": math.nan})
    {'half': '\\\\ud800', 'none': 'nan'}
    """
    if isinstance(content, str):
        return content if content.isascii() else content.encode(errors="backslashreplace").decode()
    if isinstance(content, Mapping):
        return {plain(str(key)): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content if content is None or isinstance(content, (int, float, bool)) else plain(str(content))


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
