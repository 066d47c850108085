"""Headers of safetensors files and their indices, which nobody vouches for: what is not exactly right is an error of one line."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normscope._checkpoint.entries import BITS, DTYPES, Plain, read_bytes, size_in_bytes
from normscope.core.errors import InputError, first_line

MOST_HEADER = 100_000_000  # bytes, as the format itself demands
MOST_TIMES = 16  # a header may take this many times its size in memory; that of a model takes 5
MOST_AXES = 16
MOST_NAME = 4_096
AGAIN = "fetch or save it again"


def read_safetensors(path: Path) -> list[Plain]:
    """The tensors that a file lists, each checked against the file's size and the others."""
    size = file_size(path)
    if size < 8:
        raise InputError(f"{path} has {size} bytes, too few for a safetensors header: it is truncated; {AGAIN}")
    (length,) = struct.unpack("<Q", read_bytes(path, 0, 8))
    if length > min(MOST_HEADER, size - 8):
        what = f"a header of {length:,} bytes" + (f" in a file of {size:,}" if length > size - 8 else "")
        raise InputError(f"{path} claims {what}: it is truncated or not a safetensors file; {AGAIN}")
    header = parsed(bytes(read_bytes(path, 8, length)), path)
    start = 8 + length
    entries = [_entry(name, given, path, start, size) for name, given in header.items() if name != "__metadata__"]
    _check_in_a_row(sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)), path, start, size)
    return entries


def parsed(content: bytes, path: Path, times: int = MOST_TIMES) -> dict[str, Any]:
    """The JSON object in a text: every name once, and no more in memory than `times` its size."""
    nested = 64 * (content.count(b",") + content.count(b"[")) + 256 * content.count(b"{")  # bytes, about, as objects of Python
    if nested > times * len(content) + (1 << 16):
        raise InputError(
            f"the header of {path} is nested so deeply that it would take more than {times} times its size in memory; {AGAIN}"
        )
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header of {path} is not valid JSON ({first_line(error)[:80]}); {AGAIN}") from error
    if not isinstance(found, dict):
        raise InputError(f"the header of {path} is a {type(found).__name__}, not an object; {AGAIN}")
    return found


def file_size(path: Path) -> int:
    try:
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        return path.stat().st_size
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)[:200]!r}: {first_line(error)}") from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _entry(name: str, given: Any, path: Path, start: int, size: int) -> Plain:
    where = f"{name[:80]!r} in {path}"
    if len(name) > MOST_NAME:
        raise InputError(f"{where} has a name of {len(name):,} characters; {AGAIN}")
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where} must have dtype, shape and data_offsets, and nothing else; {AGAIN}")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in {*DTYPES, *BITS}:
        raise InputError(f"{where} has the unknown dtype {str(dtype)[:20]!r}; the known ones are {', '.join((*DTYPES, *BITS))}")
    if not _sizes(shape) or len(shape) > MOST_AXES:
        raise InputError(f"{where} has a shape that is not a list of at most {MOST_AXES} sizes; {AGAIN}")
    if not _sizes(offsets) or len(offsets) != 2:
        raise InputError(f"{where} has data_offsets that are not two whole numbers; {AGAIN}")
    begin, end = offsets
    expected = size_in_bytes(tuple(shape), dtype)
    if not begin <= end <= size - start:
        raise InputError(f"{where} occupies bytes {begin:,} to {end:,} of {size - start:,}: the file is truncated; {AGAIN}")
    if expected != end - begin:
        raise InputError(f"{where} has {end - begin:,} bytes, which does not fit {dtype} of shape {shape}; {AGAIN}")
    return Plain(name, tuple(shape), dtype, path, start + begin, end - begin)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_in_a_row(entries: Sequence[Plain], path: Path, start: int, size: int) -> None:
    """No byte belongs to two tensors, and none to nobody."""
    end, before = start, ""
    for entry in entries:
        if entry.offset < end:
            raise InputError(f"{entry.name!r} and {before!r} overlap in {path}; {AGAIN}")
        if entry.offset > end:
            raise InputError(f"{entry.offset - end:,} bytes before {entry.name!r} in {path} belong to no tensor; {AGAIN}")
        end, before = entry.offset + entry.nbytes, entry.name
    if end != size:
        raise InputError(f"the last {size - end:,} bytes of {path} belong to no tensor; {AGAIN}")
