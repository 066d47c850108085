"""GGUF files: the header is read here, with every length checked against the file; blocks of quantized numbers are what the
package `gguf` makes of them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from normscope._checkpoint.entries import DTYPES, LARGEST_SIZE, Plain, read_bytes
from normscope._checkpoint.headers import AGAIN, MOST_NAME, file_size
from normscope.core.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_AXES = 4
MOST_KEPT = 1 << 16  # bytes of a value that is kept; tables of tokens are walked over
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
LEAST = {**{kind: struct.calcsize(how) for kind, how in SCALARS.items()}, STRING: 8, ARRAY: 12}  # bytes of a value
MOST_DEPTH = 4  # of arrays of arrays
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
BLOCKS = {  # of quantized numbers: the type's name, numbers per block, bytes per block
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class Quantized:
    """A tensor in blocks of quantized numbers; its values are those of the reference dequantization, in float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int
    kind: int

    def tensor(self) -> torch.Tensor:
        try:
            import gguf
        except ImportError:
            raise InputError(f"{self.name} is stored as {self.dtype}, which needs gguf: pip install 'normscope[gguf]'") from None
        raw = np.frombuffer(read_bytes(self.path, self.offset, self.nbytes), np.uint8)
        *lead, last = self.shape
        _, per_block, block_bytes = BLOCKS[self.kind]
        raw = raw.reshape(math.prod(lead), last // per_block * block_bytes)
        made = np.empty((len(raw), last), np.float32)
        with np.errstate(all="ignore"):  # scales may be any number
            for start in range(0, len(raw), 4096):
                made[start : start + 4096] = gguf.quants.dequantize(raw[start : start + 4096], gguf.GGMLQuantizationType(self.kind))
        return torch.from_numpy(made).reshape(self.shape)


class Cursor:
    """Reads a header from front to back and never beyond the file."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size, self.place = file, path, size, 0

    def take(self, count: int) -> bytes:
        self.check(count)
        content = self.file.read(count)
        if len(content) != count:
            raise InputError(f"{self.path} was truncated while it was being read; {AGAIN}")
        self.place += count
        return content

    def skip(self, count: int) -> None:
        self.check(count)
        self.file.seek(count, 1)
        self.place += count

    def check(self, count: int) -> None:
        if count > self.size - self.place:
            raise InputError(
                f"the header of {self.path} claims {count:,} bytes, but only {self.size - self.place:,} are left; {AGAIN}"
            )

    def number(self, how: str) -> Any:
        return struct.unpack(how, self.take(struct.calcsize(how)))[0]

    def text(self) -> str:
        length = self.number("<Q")
        if length > MOST_KEPT:
            self.skip(length)
            return ""
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of a type; of a long array or text nothing is kept."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth >= MOST_DEPTH:
            raise InputError(f"the header of {self.path} has a value of the unknown type {kind}; {AGAIN}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner not in LEAST:
            raise InputError(f"the header of {self.path} has an array of the unknown type {inner}; {AGAIN}")
        self.check(count * LEAST[inner])
        if inner in SCALARS and count * LEAST[inner] > MOST_KEPT:
            return self.skip(count * LEAST[inner])
        kept: list[Any] | None = [] if count * LEAST[inner] <= MOST_KEPT else None
        for _ in range(count):
            item = self.value(inner, depth + 1)
            if kept is not None:
                kept.append(item)
        return kept


def read_gguf(path: Path) -> tuple[list[Plain | Quantized], dict[str, Any]]:
    """The tensors that a file lists and its keys and values; shapes are PyTorch's, the last axis the fastest."""
    size = file_size(path)
    with path.open("rb") as file:
        cursor = Cursor(file, path, size)
        if size < 24 or cursor.take(4) != MAGIC:
            raise InputError(f"{path} is not a GGUF file; {AGAIN}")
        version, tensors, keys = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
        if version not in VERSIONS:
            raise InputError(f"{path} is GGUF version {version}; normscope reads versions {VERSIONS[0]} and {VERSIONS[1]}")
        cursor.check(keys * 13 + tensors * 24)  # what each takes at least
        about: dict[str, Any] = {}
        for _ in range(keys):
            name = cursor.text()
            value = cursor.value(cursor.number("<I"))
            if name in about:
                raise InputError(f"{name[:80]!r} appears twice in the header of {path}; {AGAIN}")
            about[name] = value
        listed = [_listed(cursor) for _ in range(tensors)]
    if len({name for name, *_ in listed}) < len(listed):
        raise InputError(f"a tensor appears twice in the header of {path}; {AGAIN}")
    alignment = about.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise InputError(f"{path} has alignment {alignment!r}, which is not a power of two; {AGAIN}")
    start = -(-cursor.place // alignment) * alignment
    return _placed(listed, path, start, size), about


def _listed(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, axes = cursor.text(), cursor.number("<I")
    if not name or len(name) > MOST_NAME or axes > MOST_AXES:
        raise InputError(f"the header of {cursor.path} has a tensor without a name or with {axes:,} axes; {AGAIN}")
    shape = tuple(reversed([cursor.number("<Q") for _ in range(axes)]))
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _placed(listed: list[tuple[str, tuple[int, ...], int, int]], path: Path, start: int, size: int) -> list[Plain | Quantized]:
    found: list[Plain | Quantized] = []
    end = start
    for name, shape, kind, offset in sorted(listed, key=lambda row: row[3]):
        where = f"{name[:80]!r} in {path}"
        count = math.prod(shape)
        if kind not in PLAIN and kind not in BLOCKS:
            raise InputError(f"{where} has the unknown type {kind}; convert it to F16 or BF16")
        label, per_block, block_bytes = (PLAIN[kind], 1, DTYPES[PLAIN[kind]].itemsize) if kind in PLAIN else BLOCKS[kind]
        if count >= LARGEST_SIZE or (shape[-1] if shape else 1) % per_block:
            raise InputError(f"{where} has the shape {list(shape)}, which is impossible for {label}; {AGAIN}")
        nbytes = count // per_block * block_bytes
        if start + offset < end:
            raise InputError(f"{where} overlaps the tensor before it; {AGAIN}")
        if start + offset + nbytes > size:
            raise InputError(
                f"{where} ends {start + offset + nbytes - size:,} bytes past the end of the file: the file is truncated; {AGAIN}"
            )
        end = start + offset + nbytes
        if kind in PLAIN:
            found.append(Plain(name, shape, label, path, start + offset, nbytes))
        else:
            found.append(Quantized(name, shape, label, path, start + offset, nbytes, kind))
    return found
