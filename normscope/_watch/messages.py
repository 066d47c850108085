"""The messages of a segment that may grow, be cut off, damaged or foreign: which are sound, and what was skipped between them.

A message is taken if its checksum holds, or, where it has none (older runs), if its header says exactly what the schema implies.
After damage reading goes on at the next message: the one that the checksums name, else the next that has the form of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import pyarrow as pa

from normscope._watch.checksums import Damage, FollowedChecksums, Record
from normscope._watch.directory import CHECKSUMS, MANIFEST, read_at
from normscope._watch.growing import Grown
from normscope._watch.layout import (
    MISPLACED,
    PREFIX,
    ColumnPlace,
    MessageLayout,
    batch_layout,
    check_batch,
    metadata_size,
    most_header,
    places,
    stream_schema,
)
from normscope.core.errors import InputError

BYTES_AT_ONCE = 1 << 25  # read by one refresh
TRIAL = 1 << 12  # bytes that a place which looks like a message counts for, however little of it is read
BEGINNING = re.compile(rb"\xff\xff\xff\xff[^\xff]..\0", re.DOTALL)  # of a message: its marker, and a multiple of 8 below 2²⁴
MOST_SEARCHED, SEARCHED_AT_ONCE, MOST_TRIED = (
    1 << 26,
    1 << 20,
    10_000,
)  # bytes of a stream, and places that only look like a message
MOST_DAMAGES = 1_000
CUT = "cut off at the end"


@dataclass
class MessageBlock:
    """Messages one after another with the same header, hence with the same layout."""

    start: int
    layout: MessageLayout
    messages: int = 0

    @property
    def end(self) -> int:
        return self.start + self.messages * self.layout.size


class Stream(Grown):
    """An Arrow IPC stream. implied: the schema by the manifest, for a stream whose own is damaged; `unchecked` counts rows.

    left: bytes that the last refresh could still have read. What is searched after damage is limited for the whole stream.
    """

    def __init__(self, path: Path, implied: Callable[[], pa.Schema | None] = lambda: None) -> None:
        self.implied = implied
        self.checksums = FollowedChecksums(path.with_suffix(CHECKSUMS))
        super().__init__(path)

    def forget(self) -> None:
        super().forget()
        self.checksums.forget()
        self.schema: pa.Schema | None = None
        self.places: dict[str, ColumnPlace] = {}
        self.blocks: list[MessageBlock] = []
        self.rows = self.unchecked = 0
        self.skipped: list[Damage] = []
        self._tail: Damage | None = None  # damage after which no message was found yet
        self._size = 0
        self._searched = self._next = self._begun = (
            0  # size that was searched, where to go on, first message that was not all there
        )
        self._searchable, self._triable = MOST_SEARCHED, MOST_TRIED
        self._known: tuple[bytes, MessageLayout] | None = None

    @property
    def damage(self) -> list[Damage]:
        """What was skipped, in the order of the file."""
        return [*self.skipped, *([self._tail] if self._tail is not None else [])]

    @property
    def cut(self) -> Damage | None:
        """The rows whose checksums were written but which are not all there: being written now, or lost with the writer."""
        rows = sum(record.rows for record in self.checksums.records if record.offset >= self.offset)
        return Damage(self.path.name, self.offset, self._size - self.offset, rows, True, CUT) if rows else None

    def refresh(self, most: int | None = None) -> None:
        """Read what was completed since the last call, up to about `most` bytes."""
        self.left = BYTES_AT_ONCE if most is None else most
        super().refresh()

    def _read(self, file: int, size: int) -> None:
        self._size = size
        if os.path.lexists(self.checksums.path):  # after the stream's size was read: its messages' records are there
            self.checksums.refresh()
        while self.left > 0 and self.offset < size and self._advance(file, size):
            pass
        self.more = self.left <= 0

    def _advance(self, file: int, size: int) -> bool:
        """Take in or skip the next message; False where no complete one follows."""
        record = self.checksums.following(self.offset)
        while record is None and self.checksums.more:
            self.checksums.refresh()
            record = self.checksums.following(self.offset)
        if record is not None and record.offset == self.offset:
            return self._advance_checked(file, size, record)
        return self._advance_framed(file, size, record)

    def _advance_checked(self, file: int, size: int, record: Record) -> bool:
        message = read_at(file, record.length, record.offset) if record.offset + record.length <= size else b""
        if len(message) < record.length:
            return False
        self.left -= record.length
        why = "another checksum"
        if crc32(message) == record.crc:
            try:
                header = message[: PREFIX + metadata_size(message[:PREFIX])]
                self._take(header, record.length)
                return True
            except InputError as error:
                why = str(error)
        self._skip(record.offset + record.length, record.rows, why)
        return True

    def _advance_framed(self, file: int, size: int, record: Record | None) -> bool:
        """Where no checksum is known: up to the next message that has one."""
        limit = size if record is None else min(size, record.offset)
        why = CUT
        try:
            if (found := self._message(file, self.offset, limit)) is not None:
                self.left -= len(found[0])
                self.unchecked += self._take(*found)
                return True
        except InputError as error:
            why = str(error)
        if limit < size:
            self._skip(limit, None, why)
            return True
        if self._searched == size:
            return False
        if (following := self._search(file, size)) is not None:
            self._skip(following, None, why)
            return True
        if self._searched != size:  # the next refresh goes on
            return False
        if self.offset == 0 and why != CUT:
            raise InputError(why)
        self._tail = None if why == CUT else self._damage(size, None, why)
        return False

    def _message(self, file: int, start: int, limit: int) -> tuple[bytes, int] | None:
        """Header and size of the message at `start`; None where it is not all there or the stream ends, an error if it is none."""
        prefix = read_at(file, PREFIX, start)
        if len(prefix) < PREFIX or start + PREFIX > limit:
            return None
        length = metadata_size(prefix)
        if length == 0 and start + PREFIX < limit:
            raise InputError("the stream ends before its file does")
        if start and length > most_header(self.places.values()):
            raise InputError(MISPLACED)
        if length == 0 or start + PREFIX + length > limit:
            return None
        header = prefix + read_at(file, length, start + PREFIX)
        size = self._layout(header).size if start else len(header)
        return (header, size) if start + size <= limit else None

    def _search(self, file: int, size: int) -> int | None:
        """Where the next message begins that is all there; None also where this refresh may not read more."""
        place = max(self.offset + 1, self._next) if self.places or self._imply() else size
        while place < size and self._searchable > 0 and self._triable > 0:
            if self.left <= 0:
                self._next = place
                return None
            content = read_at(file, SEARCHED_AT_ONCE + PREFIX - 1, place)
            self.left -= len(content)
            self._searchable -= len(content)
            start, place = place, place + SEARCHED_AT_ONCE
            for match in BEGINNING.finditer(content):
                found = start + match.start()
                if self.left <= 0 or self._triable <= 0:
                    place = found
                    break
                self.left -= TRIAL
                try:
                    if self._message(file, found, size) is not None:
                        self._begun = 0
                        return found
                    self._begun = self._begun or found
                except InputError:
                    self._triable -= 1
        self._searched, self._next, self._begun = size, self._begun or size - PREFIX, 0
        return None

    def _layout(self, header: bytes) -> MessageLayout:
        if self._known is None or self._known[0] != header:
            layout = batch_layout(header)
            check_batch(layout, list(self.places.values()))
            self._known = header, layout
        return self._known[1]

    def _take(self, header: bytes, size: int) -> int:
        """A sound message: the schema, or rows; the number of them."""
        start, rows = self.offset, 0
        if start == 0:
            self._begin(header, size)
        else:
            layout = self._layout(header)
            if layout.size != size:
                raise InputError("a message is not as long as its checksum says")
            if not self.blocks or self.blocks[-1].layout != layout or self.blocks[-1].end != start:
                self.blocks.append(MessageBlock(start, layout))
            self.blocks[-1].messages += 1
            rows = layout.rows
        self.rows += rows
        self.offset += size
        self._tail = None
        return rows

    def _begin(self, header: bytes, size: int) -> None:
        schema = stream_schema(header)
        if len(header) != size:
            raise InputError("a schema is not as long as its checksum says")
        self.schema, self.places = schema, places(schema)

    def _imply(self) -> bool:
        """Take the manifest's word for what the columns are."""
        implied = self.implied()
        if implied is not None:
            self.places = places(implied)
        return implied is not None

    def _skip(self, end: int, rows: int | None, why: str) -> None:
        """Go on at `end`."""
        if self.offset == 0:
            if not self._imply():
                raise InputError(
                    f"the schema of {self.path.name} is damaged, and there is no {MANIFEST} that says what it was: {why}"
                )
            self.schema = self.implied()
        damage = self._damage(end, rows, why)
        last = self.skipped[-1] if self.skipped else None
        if last is not None and (last.start + last.bytes == damage.start or len(self.skipped) >= MOST_DAMAGES):
            self.skipped[-1] = last.joined(damage)
        else:
            self.skipped.append(damage)
        self.offset = end
        self._tail = None

    def _damage(self, end: int, rows: int | None, why: str) -> Damage:
        size = end - self.offset
        usual = self._known[1] if self._known is not None else None
        guessed = round(size / usual.size) * usual.rows if usual is not None and self.offset else 0
        return Damage(self.path.name, self.offset, size, guessed if rows is None else rows, rows is not None, why)

    def messages(self, first: int) -> Iterator[tuple[int, int, MessageLayout]]:
        """(row, place in the file, layout) of every message from the one that begins with row `first`."""
        row = 0
        for block in self.blocks:
            rows = block.layout.rows
            skipped = min(block.messages, (first - row) // rows) if rows and first > row else 0
            for message in range(skipped, block.messages):
                yield row + message * rows, block.start + message * block.layout.size, block.layout
            row += block.messages * rows
