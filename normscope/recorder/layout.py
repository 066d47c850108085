"""Where the columns of an Arrow record batch lie in a file, from the header of its message.

Who knows it takes one column out of a long stream by position and touches nothing else. Every number of a header is checked
against the size of its message and nothing is decompressed, so a damaged or hostile file gives an error, never an allocation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from normscope.core.errors import InputError

MARKER = b"\xff\xff\xff\xff"
PREFIX = 8  # the marker and the length of the metadata that follow
MOST_METADATA = 1 << 24  # bytes; a schema of 10,000 layers has 200,000
RECORD_BATCH = 3  # of the union MessageHeader of Arrow's Message.fbs
MISPLACED = "a record batch is not laid out as its schema says"


@dataclass(frozen=True)
class Layout:
    """header, size: bytes of the message before its body and in all. buffers: (start in the message, bytes)."""

    rows: int
    header: int
    size: int
    buffers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """A column within every batch of a schema: which of the buffers holds its numbers, and how many a row has of what type."""

    buffer: int
    width: int
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def metadata_size(prefix: bytes) -> int:
    """The length that a message's first eight bytes give; 0 at the end of the stream."""
    if len(prefix) != PREFIX or prefix[:4] != MARKER:
        raise InputError("not an Arrow stream: a message does not begin with its marker")
    size: int = struct.unpack_from("<i", prefix, 4)[0]
    if not 0 <= size <= MOST_METADATA:
        raise InputError(f"not a run's stream: a message has {size} bytes of metadata")
    return size


def batch_layout(header: bytes) -> Layout:
    """Of a record batch whose prefix and metadata are `header` (Message.fbs and its RecordBatch, read as flatbuffers)."""
    try:
        metadata = header[PREFIX:]
        message = _follow(metadata, 0)
        (kind,) = _field(metadata, message, 1, "<B") or (0,)
        (body,) = _field(metadata, message, 3, "<q") or (0,)
        if kind != RECORD_BATCH:
            raise InputError("a run's stream holds record batches only")
        batch = _follow(metadata, _slot(metadata, message, 2))
        (rows,) = _field(metadata, batch, 0, "<q") or (0,)
        if _slot(metadata, batch, 3):
            raise InputError("a run's stream is not compressed")
        table = _follow(metadata, _slot(metadata, batch, 2))
        (count,) = struct.unpack_from("<I", metadata, table)
        numbers = struct.unpack_from(f"<{2 * count}q", metadata, table + 4) if count <= len(metadata) // 16 else ()
    except struct.error as error:
        raise InputError(f"the header of a message is damaged: {error}") from error
    buffers = tuple(zip((len(header) + start for start in numbers[::2]), numbers[1::2], strict=True))
    size = len(header) + body
    if rows < 0 or body < 0 or any(start < len(header) or length < 0 or start + length > size for start, length in buffers):
        raise InputError(MISPLACED)
    return Layout(rows, len(header), size, buffers)


def places(schema: pa.Schema) -> dict[str, Place]:
    """Where each column of a run lies: plain numbers, and lists of a fixed number of them."""
    found: dict[str, Place] = {}
    buffer = 0
    for field in schema:
        listed = pa.types.is_fixed_size_list(field.type)
        numbers = field.type.value_type if listed else field.type
        if not (pa.types.is_integer(numbers) or pa.types.is_floating(numbers)):
            raise InputError(f"not a run's stream: its column {field.name[:100]!r} is of type {str(field.type)[:100]}")
        buffer += 2 if listed else 1  # past the validity bitmaps
        found[field.name] = Place(buffer, field.type.list_size if listed else 1, np.dtype(numbers.to_pandas_dtype()))
        buffer += 1
    return found


def check_batch(layout: Layout, columns: Sequence[Place]) -> None:
    """Every column holds as many numbers as there are rows."""
    for place in columns:
        if place.buffer >= len(layout.buffers) or layout.buffers[place.buffer][1] < layout.rows * place.row_bytes:
            raise InputError(MISPLACED)


# flatbuffers: a table begins with the distance back to its vtable, which holds for every field the distance from the table's start


def _follow(data: bytes, place: int) -> int:
    """Where the offset at `place` points to."""
    target: int = place + struct.unpack_from("<I", data, place)[0]
    if target >= len(data):
        raise struct.error("an offset points outside of the message")
    return target


def _slot(data: bytes, table: int, number: int) -> int:
    """Where a table's field lies, 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if not 0 <= vtable <= len(data) - 4:
        raise struct.error("a table points outside of the message")
    (size,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else 0


def _field(data: bytes, table: int, number: int, form: str) -> tuple[int, ...] | None:
    place = _slot(data, table, number)
    return struct.unpack_from(form, data, place) if place else None
