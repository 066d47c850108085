"""The files of a run directory, as their writer names them and their readers find them.

manifest.json            configuration, layers, versions; replaced as a whole
status.json              how the recording goes, or how it ended; replaced as a whole
events.jsonl             findings, errors and notes, one JSON object per line
metrics-0001.arrows      an Arrow IPC stream, one message per row; a new segment after every restart
metrics-0001.checksums   a checksum of every message of that stream
.lock                    held by the process that writes
rank-0/, rank-1/ …       the same again, one per process, where there are several
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscope.core.errors import InputError

MANIFEST, STATUS, EVENTS, LOCK, SEGMENTS = "manifest.json", "status.json", "events.jsonl", ".lock", "metrics-*.arrows"
CHECKSUMS = ".checksums"  # in the place of .arrows
REGULAR_ONLY = os.O_RDONLY
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # as far as the system has them
    REGULAR_ONLY |= getattr(os, _flag, 0)


def segment_number(path: Path) -> int:
    """The number at the end of a segment's name, by which segments are in order."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def refuse_unless_regular(path: Path, mode: int) -> None:
    """A link, a pipe or a device is refused, not followed or waited for."""
    if not stat.S_ISREG(mode):
        raise InputError(f"{path.name} is not a regular file: links, pipes and devices are not used as files of a run")


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file, for reading, and its state."""
    try:
        refuse_unless_regular(path, os.lstat(path).st_mode)
        descriptor = os.open(path, REGULAR_ONLY)
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    try:
        state = os.fstat(descriptor)
        refuse_unless_regular(path, state.st_mode)
        yield descriptor, state
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_at(file: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes; fewer where the file ends."""
    if hasattr(os, "pread"):
        return os.pread(file, length, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, length)
