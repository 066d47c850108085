"""Segments of a run by column: what is new of an Arrow IPC stream, of the columns that were asked for.

Nothing is memory-mapped: cutting a mapped file kills its reader.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from normscope.core.errors import InputError
from normscope.recorder.growing import Grown, opened
from normscope.recorder.layout import PREFIX, Layout, Place, batch_layout, check_batch, metadata_size, places
from normscope.recorder.reading import chosen

MESSAGES_AT_ONCE = 200_000
MOST_CACHED = 1 << 30  # bytes of all columns together


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

    def lists(self) -> list[Place]:
        """Where the columns are that have a value for each layer."""
        return [place for name, place in self.places.items() if _listed(self.schema, name)]

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
