"""Where the columns of an Arrow record batch lie in a file, from the header of its message.

Who knows it takes one column out of a long stream by position and touches nothing else. No parser of pyarrow sees a byte of a
file: a damaged header makes it crash the process. Every number is checked against the size of its message and nothing is
decompressed, so a damaged or hostile file gives an error, never an allocation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from normscope.core.errors import InputError

MARKER = b"\xff\xff\xff\xff"
PREFIX = 8  # the marker and the length of the metadata that follow
MOST_METADATA = 1 << 24  # bytes; a schema of 10,000 layers has 200,000
MOST_COLUMNS, MOST_LAYERS, MOST_TEXT = 1_000, 50_000, 1_000
SCHEMA, RECORD_BATCH = 1, 3  # of the union MessageHeader of Arrow's Message.fbs
INTEGER, FLOATING, FIXED_SIZE_LIST = 2, 3, 16  # of the union Type of its Schema.fbs
INTEGERS = {(bits, signed): f"{'' if signed else 'u'}int{bits}" for bits in (8, 16, 32, 64) for signed in (0, 1)}
FLOATS = ("float16", "float32", "float64")  # by precision
NUMBERS: dict[str, pa.DataType] = {name: getattr(pa, name)() for name in (*INTEGERS.values(), *FLOATS)}
DTYPES = {kind: np.dtype(name) for name, kind in NUMBERS.items()}
MISPLACED = "a record batch is not laid out as its schema says"


@dataclass(frozen=True)
class MessageLayout:
    """header, size: bytes of the message before its body and in all. buffers: (start in the message, bytes)."""

    rows: int
    header: int
    size: int
    buffers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ColumnPlace:
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


def stream_schema(header: bytes) -> pa.Schema:
    """Of a schema whose prefix and metadata are `header` (Message.fbs and its Schema, read as flatbuffers)."""
    metadata = header[PREFIX:]
    try:
        schema, body = _message(metadata, SCHEMA, "a run's stream begins with a schema")
        endianness = _number(metadata, schema, 0, "<h")
        fields = [_read_field(metadata, place) for place in _tables(metadata, schema, 1, MOST_COLUMNS)]
        pairs = _tables(metadata, schema, 2, MOST_COLUMNS)
        said = {_text(metadata, pair, 0, MOST_TEXT): _text(metadata, pair, 1, MOST_METADATA) for pair in pairs}
    except (struct.error, UnicodeDecodeError) as error:
        raise InputError(f"not a run's stream: its schema is damaged ({error})") from error
    names = [field.name for field in fields]
    if body or endianness or len(set(names)) != len(names) or "step" not in names or fields[names.index("step")].type != pa.int64():
        raise InputError("not a run's stream: its columns are not those of a run")
    return pa.schema(fields, said)


def _read_field(data: bytes, field: int, listed: bool = False) -> pa.Field:
    """A column of numbers, or of lists of a fixed number of them; nothing else is in a run."""
    name, nullable = _text(data, field, 0, MOST_TEXT), bool(_number(data, field, 1, "<B"))
    kind, detail, children = _number(data, field, 2, "<B"), _child(data, field, 3), _tables(data, field, 5, 1)
    first, second = _number(data, detail, 0, "<h" if kind == FLOATING else "<i"), _number(data, detail, 1, "<B")
    if kind == FIXED_SIZE_LIST and len(children) == 1 and not listed and 0 <= first <= MOST_LAYERS:
        return pa.field(name, pa.list_(_read_field(data, children[0], listed=True), first), nullable)
    numbers = {INTEGER: INTEGERS.get((first, second)), FLOATING: dict(enumerate(FLOATS)).get(first)}.get(kind)
    if numbers is None or children or _slot(data, field, 4):
        raise InputError(f"not a run's stream: its column {name[:100]!r} holds no plain numbers")
    return pa.field(name, NUMBERS[numbers], nullable)


def batch_layout(header: bytes) -> MessageLayout:
    """Of a record batch whose prefix and metadata are `header` (Message.fbs and its RecordBatch, read as flatbuffers)."""
    metadata = header[PREFIX:]
    try:
        batch, body = _message(metadata, RECORD_BATCH, "a run's stream holds record batches only")
        rows = _number(metadata, batch, 0, "<q")
        if _slot(metadata, batch, 3):
            raise InputError("a run's stream is not compressed")
        if any(_pairs(metadata, batch, 1, 2 * MOST_COLUMNS)[1::2]):  # entries and nulls of each column, and of each list's content
            raise InputError("a record batch holds nulls, and a run has none")
        numbers = _pairs(metadata, batch, 2, 4 * MOST_COLUMNS)
    except struct.error as error:
        raise InputError(f"the header of a message is damaged: {error}") from error
    buffers = tuple(zip((len(header) + start for start in numbers[::2]), numbers[1::2], strict=True))
    size, end = len(header) + body, len(header)
    for start, length in buffers:  # one after another: what they hold together is no more than the message does
        if length < 0 or start < end:
            raise InputError(MISPLACED)
        end = start + length
    if rows < 0 or end > size:
        raise InputError(MISPLACED)
    return MessageLayout(rows, len(header), size, buffers)


def places(schema: pa.Schema) -> dict[str, ColumnPlace]:
    """Where each column of a run lies: plain numbers, and lists of a fixed number of them."""
    found: dict[str, ColumnPlace] = {}
    buffer = 0
    for field in schema:
        listed = pa.types.is_fixed_size_list(field.type)
        numbers = field.type.value_type if listed else field.type
        buffer += 2 if listed else 1  # past the validity bitmaps
        found[field.name] = ColumnPlace(buffer, field.type.list_size if listed else 1, DTYPES[numbers])
        buffer += 1
    return found


def most_header(columns: Iterable[ColumnPlace]) -> int:
    """Bytes of metadata that a batch of these columns can have: 16 per buffer and per field (fewer), and some more."""
    return 1024 + 32 * (1 + max((place.buffer for place in columns), default=0))


def check_batch(layout: MessageLayout, columns: Sequence[ColumnPlace]) -> None:
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


def _number(data: bytes, table: int, number: int, form: str) -> int:
    """A field of one number, 0 where it is absent."""
    place = _slot(data, table, number)
    return int(struct.unpack_from(form, data, place)[0]) if place else 0


def _message(data: bytes, kind: int, otherwise: str) -> tuple[int, int]:
    """Where the header of a message of this kind lies, and the bytes of its body."""
    message = _follow(data, 0)
    if _number(data, message, 1, "<B") != kind:
        raise InputError(otherwise)
    return _child(data, message, 2), _number(data, message, 3, "<q")


def _child(data: bytes, table: int, number: int) -> int:
    """Where the table lies that a field points to."""
    slot = _slot(data, table, number)
    if not slot:
        raise struct.error("a part is missing")
    return _follow(data, slot)


def _vector(data: bytes, table: int, number: int, most: int) -> tuple[int, int]:
    """Where the entries of a vector begin and how many there are."""
    slot = _slot(data, table, number)
    if not slot:
        return 0, 0
    place = _follow(data, slot)
    (count,) = struct.unpack_from("<I", data, place)
    if count > min(most, len(data)):
        raise struct.error(f"a vector of {count} entries")
    return place + 4, count


def _pairs(data: bytes, table: int, number: int, most: int) -> tuple[int, ...]:
    """The entries of a vector of pairs of numbers, one after another."""
    place, count = _vector(data, table, number, most)
    found: tuple[int, ...] = struct.unpack_from(f"<{2 * count}q", data, place)
    return found


def _tables(data: bytes, table: int, number: int, most: int) -> list[int]:
    place, count = _vector(data, table, number, most)
    return [_follow(data, place + 4 * entry) for entry in range(count)]


def _text(data: bytes, table: int, number: int, most: int) -> str:
    place, count = _vector(data, table, number, most)
    return data[place : place + count].decode()
