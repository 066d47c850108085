"""A run that is read again and again while it grows: only what is new is read, of the columns that were asked for.

For readers that must stand whatever a directory holds (the dashboard): only regular files are opened, links are not followed,
sizes are limited, and a file that was replaced or cut is read anew. Nothing is memory-mapped: cutting a mapped file kills its
reader.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from normscope.core.errors import InputError
from normscope.recorder.layout import PREFIX, Layout, Place, batch_layout, check_batch, metadata_size, places
from normscope.recorder.reading import Part, Run, chosen, parsed
from normscope.recorder.store import EVENTS, MANIFEST

MOST_MANIFEST = 8 << 20  # bytes; one of 10,000 layers has 4 million
MOST_LAYERS, MOST_NAME = 50_000, 1_000
MOST_LINE, MOST_EVENTS, EVENTS_AT_ONCE = 1 << 20, 5_000, 16 << 20
MESSAGES_AT_ONCE = 200_000
MOST_CACHED = 1 << 30  # bytes of all columns together
REGULAR_ONLY = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file and its state; a link, a pipe or a device is refused, not followed or waited for."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise InputError(f"{path.name} is not a regular file: links, pipes and devices are not read")
        descriptor = os.open(path, REGULAR_ONLY)
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path.name} is not a regular file: links, pipes and devices are not read")
        yield descriptor, state
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    finally:
        os.close(descriptor)


@dataclass
class Column:
    """Rows of a column, with room for more; rows are only added, so a view of the first ones stays true."""

    room: np.ndarray  # (capacity, width)
    rows: int = 0

    def grow(self, rows: int) -> np.ndarray:
        """The place of the rows up to `rows`, still to be filled."""
        if rows > len(self.room):
            larger = np.empty((rows + rows // 4, self.room.shape[1]), self.room.dtype)
            larger[: self.rows] = self.room[: self.rows]
            self.room = larger
        return self.room[:rows]


class ColumnCache:
    """Columns by (file, name), the least recently used forgotten first."""

    def __init__(self, limit: int = MOST_CACHED) -> None:
        self.limit = limit
        self._columns: OrderedDict[tuple[Path, str], Column] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, name: str, place: Place) -> Column:
        """The column, empty if it is new."""
        with self._lock:
            column = self._columns.setdefault((path, name), Column(np.empty((0, place.width), place.dtype)))
            self._columns.move_to_end((path, name))
            return column

    def trim(self) -> None:
        """Forget columns until the others are within the limit."""
        with self._lock:
            while len(self._columns) > 1 and self.bytes > self.limit:
                self._columns.popitem(last=False)

    def forget(self, path: Path) -> None:
        with self._lock:
            for key in [key for key in self._columns if key[0] == path]:
                del self._columns[key]

    @property
    def bytes(self) -> int:
        return sum(column.room.nbytes for column in self._columns.values())


@dataclass
class Block:
    """Messages one after another with the same header, hence with the same layout."""

    start: int
    layout: Layout
    messages: int = 1


class FollowedSegment:
    """An Arrow IPC stream that may still grow, by column."""

    def __init__(self, path: Path, cache: ColumnCache) -> None:
        self.path, self.cache = path, cache
        self._begin()

    def _begin(self) -> None:
        self.identity: tuple[int, int] | None = None
        self.schema: pa.Schema | None = None
        self.places: dict[str, Place] = {}
        self.blocks: list[Block] = []
        self.offset = self.rows = 0
        self.more = False
        self.cache.forget(self.path)

    def refresh(self) -> None:
        """Find the messages that were completed since the last call; `more` says that there are too many for one call."""
        with opened(self.path) as (file, state):
            identity = (state.st_dev, state.st_ino)
            if identity != self.identity or state.st_size < self.offset:
                self._begin()
                self.identity = identity
            left = MESSAGES_AT_ONCE
            while left > 0 and (found := self._next(file, state.st_size, left)):
                left -= found
            self.more = left <= 0

    def _next(self, file: int, size: int, most: int) -> int:
        """Take in the next message with those like it; the number of them, 0 where no complete one follows."""
        start = self.offset
        if size < start + PREFIX:
            return 0
        prefix = os.pread(file, PREFIX, start)
        length = metadata_size(prefix)
        if length == 0 or size < start + PREFIX + length:
            return 0  # the end of the stream, or a message that is not all there
        header = prefix + os.pread(file, length, start + PREFIX)
        if self.schema is None:
            self.schema = _schema(header)
            self.places = places(self.schema)
            self.offset += len(header)
            return 1
        layout = batch_layout(header)
        if size < start + layout.size:
            return 0
        check_batch(layout, list(self.places.values()))
        block = Block(start, layout)
        self.offset += layout.size
        while block.messages < most and size >= self.offset + layout.size and os.pread(file, len(header), self.offset) == header:
            block.messages += 1
            self.offset += layout.size
        self.blocks.append(block)
        self.rows += block.messages * layout.rows
        return block.messages

    def column(self, name: str) -> np.ndarray:
        """All rows of a column found so far: (rows,), or (rows, layers) of a list."""
        place = self.places[name]
        if self.rows * place.row_bytes > self.cache.limit:
            gigabytes = self.rows * place.row_bytes / 2**30
            raise InputError(f"{name} of this run has {gigabytes:.1f} GB, too much to show: read it with ns.load_run")
        column = self.cache.get(self.path, name, place)
        if column.rows < self.rows:
            self._fill(column, place)
            self.cache.trim()
        values = column.room[: self.rows]
        return values if self.schema is not None and _listed(self.schema, name) else values[:, 0]

    def _fill(self, column: Column, place: Place) -> None:
        """Read the rows that a column lacks."""
        values = column.grow(self.rows)
        with opened(self.path) as (file, _):
            for first, start, layout in self._messages(column.rows):
                wanted = memoryview(values[first : first + layout.rows]).cast("B") if place.row_bytes and layout.rows else b""
                if wanted and os.preadv(file, [wanted], start + layout.buffers[place.buffer][0]) != len(wanted):
                    raise InputError(f"{self.path.name} was cut while it was read: reload")
        column.rows = self.rows

    def _messages(self, first: int) -> Iterator[tuple[int, int, Layout]]:
        """(row, place in the file, layout) of every message from the one that begins with row `first`."""
        row = 0
        for block in self.blocks:
            rows = block.layout.rows
            skipped = min(block.messages, (first - row) // rows) if rows and first > row else 0
            for message in range(skipped, block.messages):
                yield row + message * rows, block.start + message * block.layout.size, block.layout
            row += block.messages * rows

    def table(self, columns: Sequence[str] | None) -> pa.Table | None:
        """The rows found so far; None without a schema."""
        if self.schema is None:
            return None
        names = self.schema.names if columns is None else chosen(self.schema, columns)
        arrays = [_array(self.column(name), self.schema.field(name).type) for name in names]
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema.field(name) for name in names], self.schema.metadata))

    def last(self, name: str) -> np.ndarray | None:
        """The last row of a column, read alone."""
        if not self.rows or name not in self.places:
            return None
        place = self.places[name]
        block = next(block for block in reversed(self.blocks) if block.layout.rows)
        start = block.start + (block.messages - 1) * block.layout.size + block.layout.buffers[place.buffer][0]
        with opened(self.path) as (file, _):
            content = os.pread(file, place.row_bytes, start + (block.layout.rows - 1) * place.row_bytes)
        return np.frombuffer(content, place.dtype) if len(content) == place.row_bytes else None


class FollowedEvents:
    """The lines of events.jsonl that are complete; `unread` counts those that are no event, or too many."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.identity: tuple[int, int] | None = None
        self.events: list[dict[str, Any]] = []
        self.offset = self.unread = 0
        self.more = False

    def refresh(self) -> None:
        with opened(self.path) as (file, state):
            identity = (state.st_dev, state.st_ino)
            if identity != self.identity or state.st_size < self.offset:
                self._begin()
                self.identity = identity
            content = os.pread(file, EVENTS_AT_ONCE, self.offset)
        complete = content.rfind(b"\n") + 1
        if not complete and len(content) > MOST_LINE:
            raise InputError(f"{EVENTS} has a line of more than {MOST_LINE >> 20} MB")
        self.offset += complete
        self.more = len(content) == EVENTS_AT_ONCE
        for line in content[:complete].splitlines():
            event = parsed(line) if len(line) <= MOST_LINE else None
            if _is_event(event) and len(self.events) < MOST_EVENTS:
                self.events.append(event)
            elif line.strip():
                self.unread += 1


@dataclass(frozen=True)
class FollowedPart(Part):
    """What one process wrote, as of the last `refresh`."""

    cache: ColumnCache = field(default_factory=ColumnCache)
    _known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def refresh(self) -> bool:
        """Read what is new; whether there is more than one call reads."""
        files = [entry.name for entry in os.scandir(self.path)]
        if MANIFEST in files:
            self._refresh_manifest()
        if EVENTS in files:
            self._events.refresh()
        segments = [self._segment(path) for path in self.segments]
        for segment in segments:
            segment.refresh()
        return self._events.more or any(segment.more for segment in segments)

    def _refresh_manifest(self) -> None:
        with opened(self.path / MANIFEST) as (file, state):
            signature = (state.st_ino, state.st_size, state.st_mtime_ns)
            if self._known.get("signature") == signature:
                return
            if state.st_size > MOST_MANIFEST:
                raise InputError(f"{MANIFEST} has {state.st_size >> 20} MB: more than a manifest can have")
            content = os.pread(file, MOST_MANIFEST, 0)
        self._known["manifest"] = checked_manifest(content)
        self._known["signature"] = signature

    @property
    def manifest(self) -> dict[str, Any]:
        return self._known.get("manifest", {"layers": []})

    @property
    def _events(self) -> FollowedEvents:
        return self._known.setdefault("events", FollowedEvents(self.path / EVENTS))

    def events(self) -> list[dict[str, Any]]:
        return self._events.events

    @property
    def unread(self) -> int:
        """Lines of events.jsonl that are no event."""
        return self._events.unread

    def _segment(self, path: Path) -> FollowedSegment:
        if path not in self._known:
            self._known[path] = FollowedSegment(path, self.cache)
        return self._known[path]

    def rows(self, segment: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
        return self._segment(segment).table(columns)

    def last(self, name: str) -> np.ndarray | None:
        """The newest row of a column."""
        found = (self._segment(path).last(name) for path in reversed(self.segments))
        return next((value for value in found if value is not None), None)

    @property
    def count(self) -> int:
        """Rows in all segments, repeated steps included."""
        return sum(self._segment(path).rows for path in self.segments)


def followed(path: Path, ranks: Sequence[Path], cache: ColumnCache) -> Run:
    """A run whose parts are read by `refresh`, and then as of that moment."""
    return Run(path, tuple(FollowedPart(rank, cache) for rank in ranks or (path,)))


def checked_manifest(content: bytes) -> dict[str, Any]:
    """A manifest, if it has the form of one."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{MANIFEST} is not JSON: {type(error).__name__}") from error
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or len(layers) > MOST_LAYERS:
        raise InputError(f"{MANIFEST} is not that of a run: it has no list of at most {MOST_LAYERS} layers")
    if not all(isinstance(layer, dict) and isinstance(layer.get("name"), str) and len(layer["name"]) <= MOST_NAME for layer in layers):
        raise InputError(f"{MANIFEST} is not that of a run: every layer has a name of at most {MOST_NAME} characters")
    return dict(manifest)


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("time"), (int, float))


def _schema(header: bytes) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.ipc.read_message(pa.py_buffer(header)))
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise InputError(f"not a run's stream: it does not begin with a schema ({str(error)[:200]})") from error


def _listed(schema: pa.Schema, name: str) -> bool:
    return pa.types.is_fixed_size_list(schema.field(name).type)


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if values.ndim == 1:
        return pa.array(np.ascontiguousarray(values), kind)
    if not values.shape[1]:
        return pa.array([[]] * len(values), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
