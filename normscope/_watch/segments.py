"""Segments of a run by column: what is new of an Arrow IPC stream, of the columns that were asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from normscope._watch.directory import opened, read_at
from normscope._watch.layout import DTYPES, ColumnPlace
from normscope._watch.messages import Stream
from normscope.core.errors import InputError

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

    def get(self, path: Path, name: str, place: ColumnPlace) -> Column:
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


class FollowedSegment(Stream):
    """A stream by column. cache: for the columns of a run that is read again and again, within a limit; None reads them anew."""

    def __init__(
        self, path: Path, cache: ColumnCache | None = None, implied: Callable[[], pa.Schema | None] = lambda: None
    ) -> None:
        self.cache = cache
        super().__init__(path, implied)

    def forget(self) -> None:
        super().forget()
        if self.cache is not None:
            self.cache.forget(self.path)

    def column(self, name: str, first: int = 0) -> np.ndarray:
        """The rows of a column found so far, from row `first` on: (rows,), or (rows, layers) of a list."""
        place = self.places[name]
        if self.cache is None:
            values = np.empty((self.rows - first, place.width), place.dtype)
            self._fill(values, first, place)
        else:
            values = self._cached(self.cache, name, place)[first:]
        return values if _listed(self.schema, name) else values[:, 0]

    def _cached(self, cache: ColumnCache, name: str, place: ColumnPlace) -> np.ndarray:
        if self.rows * place.row_bytes > cache.limit:
            gigabytes = self.rows * place.row_bytes / 2**30
            raise InputError(f"{name} of this run has {gigabytes:.1f} GB, too much to show: read it with ns.load_run")
        column = cache.get(self.path, name, place)
        if column.rows < self.rows:
            self._fill(column.grow(self.rows)[column.rows :], column.rows, place)
            column.rows = self.rows
            cache.trim()
        return column.room[: self.rows]

    def _fill(self, values: np.ndarray, first: int, place: ColumnPlace) -> None:
        """Read the rows from `first` on, which begins a message."""
        room = values.data.cast("B") if values.size else memoryview(bytearray())  # without layers there is nothing to cast
        with opened(self.path) as (file, _):
            for row, start, layout in self.messages(first):
                wanted = room[(row - first) * place.row_bytes : (row - first + layout.rows) * place.row_bytes]
                content = read_at(file, len(wanted), start + layout.buffers[place.buffer][0])
                if len(content) != len(wanted):
                    raise InputError(f"{self.path.name} was truncated while it was read: reload")
                wanted[:] = content

    def lists(self) -> list[ColumnPlace]:
        """Where the columns are that have a value for each layer."""
        return [place for name, place in self.places.items() if _listed(self.schema, name)]

    def table(self, columns: Sequence[str] | None = None, first: int = 0) -> pa.Table | None:
        """The rows found so far, from row `first` on; None without a schema."""
        if self.schema is None:
            return None
        names = self.schema.names if columns is None else chosen(self.schema, columns)
        arrays = [_array(self.column(name, first), self.schema.field(name).type) for name in names]
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
            content = read_at(file, place.row_bytes, start + row * place.row_bytes)
        return np.frombuffer(content, place.dtype) if len(content) == place.row_bytes else None


def chosen(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """The columns asked for, `step` first."""
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise InputError(f"a run has no column {', '.join(missing)}: choose from {', '.join(schema.names)}")
    return ["step", *(name for name in dict.fromkeys(columns) if name != "step")]


def filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With the columns of a schema; those that it lacks hold NaN."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table[field.name])
            continue
        listed = pa.types.is_fixed_size_list(field.type)
        numbers = field.type.value_type if listed else field.type
        if not pa.types.is_floating(numbers):
            raise InputError(f"a segment has no column {field.name}, and {numbers} has no NaN to stand for it")
        shape = (len(table), field.type.list_size) if listed else (len(table),)
        columns.append(_array(np.full(shape, np.nan, DTYPES[numbers]), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _listed(schema: pa.Schema | None, name: str) -> bool:
    return schema is not None and pa.types.is_fixed_size_list(schema.field(name).type)


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    if values.ndim == 1:
        return pa.array(np.ascontiguousarray(values), kind)
    if not values.shape[1]:
        return pa.array([[]] * len(values), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind)
