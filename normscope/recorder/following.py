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
from normscope.recorder.reading import LIFE, Part, Run, chosen, parsed
from normscope.recorder.store import EVENTS, MANIFEST, segment_number

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
    messages: int = 0


class Grown:
    """A file that grows: `offset` is how far it was read, `more` whether there was too much for one reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        """Begin anew, for a file that is no longer the one that was read."""
        self.identity: tuple[int, int] | None = None
        self.offset = 0
        self.more = False

    def refresh(self) -> None:
        """Read what was completed since the last call."""
        with opened(self.path) as (file, state):
            identity = (state.st_dev, state.st_ino)
            if identity != self.identity or state.st_size < self.offset:
                self.forget()
                self.identity = identity
            self._read(file, state.st_size)

    def _read(self, file: int, size: int) -> None:
        raise NotImplementedError


class FollowedSegment(Grown):
    """An Arrow IPC stream, by column."""

    def __init__(self, path: Path, cache: ColumnCache) -> None:
        self.cache = cache
        super().__init__(path)

    def forget(self) -> None:
        super().forget()
        self.schema: pa.Schema | None = None
        self.places: dict[str, Place] = {}
        self.blocks: list[Block] = []
        self.rows = 0
        self.cache.forget(self.path)

    def _read(self, file: int, size: int) -> None:
        left = MESSAGES_AT_ONCE
        while left > 0 and (found := self._next(file, size, left)):
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
        found = 1
        self.offset += layout.size
        while found < most and size >= self.offset + layout.size and os.pread(file, len(header), self.offset) == header:
            found += 1
            self.offset += layout.size
        if not self.blocks or self.blocks[-1].layout != layout:
            self.blocks.append(Block(start, layout))
        self.blocks[-1].messages += found
        self.rows += found * layout.rows
        return found

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
        return values if _listed(self.schema, name) else values[:, 0]

    def _fill(self, column: Column, place: Place) -> None:
        """Read the rows that a column lacks."""
        values = column.grow(self.rows)
        room = values.data.cast("B") if values.size else memoryview(bytearray())  # without layers there is nothing to cast
        with opened(self.path) as (file, _):
            for first, start, layout in self._messages(column.rows):
                wanted = room[first * place.row_bytes : (first + layout.rows) * place.row_bytes]
                if os.preadv(file, [wanted], start + layout.buffers[place.buffer][0]) != len(wanted):
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

    def edge(self, name: str, last: bool = True) -> np.ndarray | None:
        """The last row of a column, or the first, read alone."""
        if not self.rows or name not in self.places:
            return None
        place = self.places[name]
        block = next(block for block in (reversed(self.blocks) if last else self.blocks) if block.layout.rows)
        message, row = (block.messages - 1, block.layout.rows - 1) if last else (0, 0)
        start = block.start + message * block.layout.size + block.layout.buffers[place.buffer][0]
        with opened(self.path) as (file, _):
            content = os.pread(file, place.row_bytes, start + row * place.row_bytes)
        return np.frombuffer(content, place.dtype) if len(content) == place.row_bytes else None


class FollowedEvents(Grown):
    """The complete lines of events.jsonl; `unread` counts those that are no event, and those beyond the limit."""

    def forget(self) -> None:
        super().forget()
        self.events: list[dict[str, Any]] = []
        self.unread = 0

    def _read(self, file: int, size: int) -> None:
        content = os.pread(file, EVENTS_AT_ONCE, self.offset)
        complete = content.rfind(b"\n") + 1
        if len(content) - complete > MOST_LINE:
            raise InputError(f"{EVENTS} has a line of more than {MOST_LINE >> 20} MB")
        self.offset += complete
        self.more = len(content) == EVENTS_AT_ONCE
        for line in content[:complete].splitlines():
            event = parsed(line) if len(line) <= MOST_LINE else None
            if event is None or not _is_event(event):
                self.unread += bool(line.strip())
            elif len(self.events) < MOST_EVENTS:
                self.events.append(event)
            else:
                self.unread += 1
                if event["kind"] in LIFE:  # whether a run has ended is known however much it said
                    self.events[-1] = event


class FollowedManifest(Grown):
    """manifest.json, which is replaced as a whole."""

    def forget(self) -> None:
        super().forget()
        self.content: dict[str, Any] = {"layers": []}
        self.offset = -1  # not read yet

    def _read(self, file: int, size: int) -> None:
        if size > MOST_MANIFEST:
            raise InputError(f"{MANIFEST} has {size >> 20} MB: more than a manifest can have")
        if size != self.offset:
            self.content = checked_manifest(os.pread(file, size, 0))
            self.offset = size


@dataclass(frozen=True)
class FollowedPart(Part):
    """What one process wrote, as of the last `refresh`."""

    cache: ColumnCache
    outline: FollowedManifest
    log: FollowedEvents
    streams: dict[Path, FollowedSegment] = field(default_factory=dict)

    @staticmethod
    def at(path: Path, cache: ColumnCache) -> FollowedPart:
        return FollowedPart(path, cache, FollowedManifest(path / MANIFEST), FollowedEvents(path / EVENTS))

    def refresh(self) -> bool:
        """Read what is new; whether there is more than one call reads."""
        segments = self.segments
        for gone in self.streams.keys() - set(segments):
            self.streams.pop(gone).forget()
        for new in [path for path in segments if path not in self.streams]:
            self.streams[new] = FollowedSegment(new, self.cache)
        files: list[Grown] = [*(file for file in (self.outline, self.log) if os.path.lexists(file.path)), *self.streams.values()]
        for file in files:
            file.refresh()
        self._check_widths()
        return any(file.more for file in files)

    def _check_widths(self) -> None:
        layers = len(self.manifest["layers"])
        for stream in self.streams.values():
            for name in stream.places:
                if _listed(stream.schema, name) and stream.places[name].width != layers:
                    raise InputError(f"{MANIFEST} has {layers} layers, {stream.path.name} has {stream.places[name].width}")

    @property
    def manifest(self) -> dict[str, Any]:
        return self.outline.content

    def events(self) -> list[dict[str, Any]]:
        return self.log.events

    def rows(self, segment: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
        return self.streams[segment].table(columns) if segment in self.streams else None

    def edge(self, name: str, last: bool = True) -> np.ndarray | None:
        """The newest row of a column, or the oldest."""
        paths = sorted(self.streams, key=segment_number, reverse=last)
        found = (self.streams[path].edge(name, last) for path in paths)
        return next((value for value in found if value is not None), None)

    @property
    def count(self) -> int:
        """Rows in all segments, repeated steps included."""
        return sum(stream.rows for stream in self.streams.values())


def followed(path: Path, ranks: Sequence[Path], cache: ColumnCache) -> Run:
    """A run whose parts are read by `refresh`, and then as of that moment."""
    return Run(path, tuple(FollowedPart.at(rank, cache) for rank in ranks or (path,)))


def checked_manifest(content: bytes) -> dict[str, Any]:
    """A manifest, if it has the form of one."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{MANIFEST} is not JSON: {type(error).__name__}") from error
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or len(layers) > MOST_LAYERS:
        raise InputError(f"{MANIFEST} is not that of a run: it has no list of at most {MOST_LAYERS} layers")
    if not all(isinstance(layer, dict) and _is_name(layer.get("name")) for layer in layers):
        raise InputError(f"{MANIFEST} is not that of a run: every layer has a name of at most {MOST_NAME} characters")
    return dict(manifest)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MOST_NAME


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("time"), (int, float))


def _schema(header: bytes) -> pa.Schema:
    try:
        schema = pa.ipc.read_schema(pa.ipc.read_message(pa.py_buffer(header)))
        if len(set(schema.names)) != len(schema.names) or "step" not in schema.names:
            raise ValueError("the names of its columns are not those of a run")
        return schema
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise InputError(f"not a run's stream: it does not begin with a schema ({str(error)[:200]})") from error


def _listed(schema: pa.Schema | None, name: str) -> bool:
    return schema is not None and pa.types.is_fixed_size_list(schema.field(name).type)


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if values.ndim == 1:
        return pa.array(np.ascontiguousarray(values), kind)
    if not values.shape[1]:
        return pa.array([[]] * len(values), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
