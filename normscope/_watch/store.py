"""The writer of a run directory: a background thread, so that training never waits for a disk.

A row is one message, written whole and after its checksum, so what was flushed is readable after `kill -9`, and a reader that
meets a torn last message knows that it is the end. Every BEAT seconds what was written is synced to the disk and the status gets
a sign of life.
"""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from normscope._watch.checksums import packed
from normscope._watch.columns import row_messages
from normscope._watch.directory import (
    CHECKSUMS,
    EVENTS,
    MANIFEST,
    SEGMENTS,
    STATUS,
    opened,
    read_at,
    refuse_unless_regular,
    segment_number,
)
from normscope._watch.life import BEAT, FINISHED, Life
from normscope._watch.lock import Lock, owner

MOST_WAITING = 1024  # rows, for a disk that does not keep up
MOST_AT_ONCE = 64
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of Arrow IPC

Row = dict[str, Any]
OfRow = Callable[[Row], None]
Item = Callable[[], None] | Row | None


class Writer:
    """One run directory. Every method returns at once; a thread does the writing and `cost` is the time it took.

    on_failure is called once, from that thread, with the error that ended the recording; `failure` keeps its words. progress: the
    last step of the training, asked for with every sign of life.
    """

    def __init__(
        self, directory: Path, on_failure: Callable[[BaseException], None], progress: Callable[[], int] = lambda: 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.on_failure, self.progress = directory, on_failure, progress
        self.cost, self.failed, self.dropped, self.rows, self.failure = 0.0, False, 0, 0, ""
        self._schema: pa.Schema | None = None
        self._segment: BinaryIO | None = None
        self._checksums: BinaryIO | None = None
        self._events: BinaryIO | None = None
        self._offset = 0  # in the segment
        self._status: dict[str, Any] = {}
        self._life: Life | None = Life("running")
        self._next_beat = 0.0
        self._waiting: queue.Queue[Item] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="normscope-writer", daemon=True)
        self.lock = Lock(directory)
        try:
            self._thread.start()
        except BaseException:  # no more threads, or an interrupt
            self.lock.release()
            raise

    def begin(
        self, manifest: Mapping[str, Any], schema: pa.Schema, complete: OfRow = lambda row: None, written: OfRow = lambda row: None
    ) -> None:
        """Write the manifest and start a new segment. complete: adds to a row just before it is written, written: gets it after."""
        self._complete, self._written = complete, written
        self._waiting.put(lambda: self._begin(manifest, schema))

    def row(self, row: Row) -> None:
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

    def over(self) -> bool:
        """Whether it writes no more; that its thread has ended is noticed here."""
        if not self.failed and not self._thread.is_alive():
            self._fail(RuntimeError("the thread that writes has ended"))
        return self.failed

    def close(self, life: Life | None = FINISHED, last: Callable[[], None] | None = None, timeout: float = 60.0) -> None:
        """Write what is waiting, what `last` says, and how it ended (nothing if None); then let go of the directory."""
        if self.dropped:
            self.event("error", what="store", message=f"{self.dropped} rows were dropped because the disk did not keep up")
        self._life = life
        if last is not None:
            self._waiting.put(last)
        self._waiting.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():  # and keeps the lock: it may still write
            self._fail(TimeoutError(f"the disk did not take {self._waiting.qsize()} rows and events within {timeout:g} s"))
        else:
            self.lock.release()

    # on the thread -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            items = self._next()
            start = time.thread_time()
            if items and items[-1] is not None and not self._status:
                self._try(self._announce)
            rows = [item for item in items if isinstance(item, dict)]
            if rows:
                self._try(partial(self._write, rows))
            for item in items:
                if callable(item):
                    self._try(item)
            if self._status and time.monotonic() >= self._next_beat:
                self._try(self._beat)
            self.cost += time.thread_time() - start
            if items and items[-1] is None:
                for item in self._left():
                    self._try(item)
                self._try(self._finish)
                self._leave()
                return

    def _left(self) -> list[Callable[[], None]]:
        """Events that came while the last things were written."""
        return [item for _ in range(self._waiting.qsize()) if callable(item := self._waiting.get_nowait())]

    def _next(self) -> list[Item]:
        """The next thing to do, or all rows that wait in a row; nothing when a sign of life is due."""
        try:
            items = [self._waiting.get(timeout=BEAT)]
        except queue.Empty:
            return []
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
        except BaseException as error:  # whatever it is, it must not end the thread unseen
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failed = True
        self.failure = str(error) or type(error).__name__
        self.on_failure(error)

    def _announce(self) -> None:
        self._status = {"state": "running", **owner(), "started": time.time(), "segment": 0}
        self._beat()

    def _begin(self, manifest: Mapping[str, Any], schema: pa.Schema) -> None:
        replace_json(self.directory / MANIFEST, manifest, durable=True)
        number = 1 + max((segment_number(path) for path in self.directory.glob(SEGMENTS)), default=0)
        path = self.directory / f"metrics-{number:04d}.arrows"
        self._schema, self._offset = schema, 0
        self._segment = path.open("xb", buffering=0)
        self._checksums = path.with_suffix(CHECKSUMS).open("xb", buffering=0)
        self._store([schema.serialize()], 0)
        self._status["segment"] = number
        self._beat()

    def _write(self, rows: Sequence[Row]) -> None:
        assert self._schema is not None, "begin comes before the first row"
        for row in rows:
            self._complete(row)
        self._store(row_messages(rows, self._schema), 1)
        self.rows += len(rows)
        for row in rows:
            self._written(row)

    def _store(self, messages: Sequence[pa.Buffer], rows: int) -> None:
        """Messages of so many rows each, after their checksums."""
        assert self._segment is not None and self._checksums is not None
        records = b""
        for message in messages:
            records += packed(self._offset, memoryview(message), rows)
            self._offset += message.size
        write_all(self._checksums, records)
        write_all(self._segment, messages[0] if len(messages) == 1 else b"".join(messages))

    def _append(self, line: str) -> None:
        path = self.directory / EVENTS
        if self._events is None:
            self._events = open(path, "ab", buffering=0, opener=_without_links)  # noqa: SIM115
            refuse_unless_regular(path, os.fstat(self._events.fileno()).st_mode)
            if self._events.tell() and not _ends_with_newline(path):
                line = "\n" + line  # the last writer was killed in the middle of a line
        write_all(self._events, line.encode())

    def _beat(self) -> None:
        """Sync what was written, and say so."""
        self._next_beat = time.monotonic() + BEAT
        for file in (self._checksums, self._segment, self._events):
            if file is not None:
                _sync(file)
        self._say({})

    def _check_place(self) -> None:
        """Files that were deleted take rows that nobody will ever read; and their place may be another writer's by now."""
        files = {self.lock.path: self.lock.file, **({Path(self._segment.name): self._segment.fileno()} if self._segment else {})}
        for path, file in files.items():
            try:
                there = os.path.samestat(os.lstat(path), os.fstat(file))
            except FileNotFoundError:
                there = False
            if not there:
                raise FileNotFoundError(f"{path} was deleted or moved while it was written, {self.rows} rows with it")

    def _say(self, ended: Mapping[str, Any]) -> None:
        self._check_place()
        self._status |= {"step": self.progress(), "rows": self.rows, "beat": time.time(), **ended}
        replace_json(self.directory / STATUS, self._status, durable=bool(ended))

    def _finish(self) -> None:
        if self._segment is not None:
            write_all(self._segment, END_OF_STREAM)
        if self._status:
            self._beat()

    def _leave(self) -> None:
        """Say how it ended, as far as the disk lets it, and close the files."""
        if self._status and self._life is not None:
            ended = {"state": self._life.state, "error": self._life.error, "recording": self.failure}
            try:
                self._say(ended)
            except OSError as error:
                if not self.failed:
                    self._fail(error)
        for file in (self._segment, self._checksums, self._events):
            if file is not None:
                with suppress(OSError):
                    file.close()


def write_all(file: BinaryIO, content: Any) -> None:
    """Write all of it: an unbuffered file may take only a part, for instance when the disk is full."""
    left = memoryview(content).cast("B")
    while left:
        left = left[file.write(left) :]


def replace_json(path: Path, content: Mapping[str, Any], durable: bool = False) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part. durable: also after a power failure."""
    beside = path.with_suffix(".partial")
    with open(beside, "wb", buffering=0, opener=_without_links) as file:
        write_all(file, json.dumps(plain(content), indent=1, ensure_ascii=False).encode())
        if durable:
            _sync(file)
    os.replace(beside, path)


def _sync(file: BinaryIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # a file system that cannot is no failure
            raise


def _without_links(path: str, flags: int) -> int:
    """As `open` opens, but no link and no pipe that nobody reads."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


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
    with opened(path) as (file, state):
        return read_at(file, 1, state.st_size - 1) == b"\n"
