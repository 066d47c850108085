"""Checksums of a stream's messages, in a file beside it: the stream stays plain Arrow for every other tool.

One record of 24 bytes per message, little-endian:

    offset   8 bytes   where the message begins in the stream
    length   4 bytes   of the message
    rows     4 bytes   that it holds; 0 for the schema
    crc      4 bytes   CRC-32 of the message
    own      4 bytes   CRC-32 of the 20 bytes before

A record is written before its message. So every complete message has one, and records beyond the end of a stream count the rows
that were lost with it. A record that is damaged itself is passed over, and its message is read without it.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from normscope._watch.directory import read_at
from normscope._watch.growing import Grown

RECORD = struct.Struct("<QIII")
OWN = struct.Struct("<I")
SIZE = RECORD.size + OWN.size
RECORDS_AT_ONCE = 200_000
MOST_MESSAGE = 1 << 28  # bytes; one row of 50,000 layers has 8 million


class Record(NamedTuple):
    offset: int
    length: int
    rows: int
    crc: int


def packed(offset: int, message: bytes | memoryview, rows: int) -> bytes:
    """The record of a message that will be written at `offset`."""
    record = RECORD.pack(offset, len(message), rows, crc32(message))
    return record + OWN.pack(crc32(record))


class FollowedChecksums(Grown):
    """The records that the reader of the stream has not passed yet, in order; `damaged` counts those that are none."""

    def forget(self) -> None:
        super().forget()
        self.records: deque[Record] = deque()
        self.damaged = self.rows = 0
        self._end = 0  # of the last message that has a record

    def _read(self, file: int, size: int) -> None:
        content = read_at(file, min(RECORDS_AT_ONCE * SIZE, size - self.offset), self.offset)
        whole = len(content) // SIZE * SIZE
        self.offset += whole
        before = len(self.records)
        for place in range(0, whole, SIZE):
            own = content[place : place + RECORD.size]
            record = Record(*RECORD.unpack(own))
            sound = OWN.pack(crc32(own)) == content[place + RECORD.size : place + SIZE]
            if not sound or record.offset < self._end or not 0 < record.length <= MOST_MESSAGE:
                self.damaged += 1
                continue
            self._end = record.offset + record.length
            self.rows += record.rows
            self.records.append(record)
        self.more = whole == RECORDS_AT_ONCE * SIZE and len(self.records) > before  # a file of nothing but noise is left alone

    def following(self, offset: int) -> Record | None:
        """The first record of a message at `offset` or after it."""
        while self.records and self.records[0].offset < offset:
            self.records.popleft()
        return self.records[0] if self.records else None


@dataclass(frozen=True)
class Damage:
    """Bytes of a file that were skipped. rows: lost with them, by its checksums if `counted`, else as many as usually fit."""

    file: str
    start: int
    bytes: int
    rows: int
    counted: bool
    why: str

    def __str__(self) -> str:
        lost = f"{'' if self.counted else 'about '}{self.rows} row{'' if self.rows == 1 else 's'} lost"
        return (
            f"{self.file}: {lost if self.rows else 'no row lost'}, {self.bytes:,} bytes skipped at byte {self.start:,} ({self.why})"
        )

    def joined(self, other: Damage) -> Damage:
        """Both as one."""
        counted = self.counted and other.counted
        return Damage(self.file, self.start, self.bytes + other.bytes, self.rows + other.rows, counted, self.why)
