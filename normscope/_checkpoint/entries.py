"""One stored tensor: where it lies, and its values, exactly, in float64.

Every format of floating-point numbers up to 64 bits converts to float64 without rounding; blocks of quantized numbers are what
their reference dequantization gives in float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from normscope.core.errors import InputError

BLOCK_BYTES = 64 << 20  # of float64 at a time, where a tensor is walked
HASHED = 16 << 20  # bytes at a time
LARGEST_SIZE = 1 << 62

DTYPES: dict[str, torch.dtype] = {  # by the names of safetensors
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "C32": torch.complex32, "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
COMPLEX = tuple(name for name, kind in DTYPES.items() if kind.is_complex)
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8}  # known by their sizes alone


class Entry(Protocol):
    """A tensor of a checkpoint, not yet read."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def tensor(self) -> torch.Tensor:
        """Its values as they are stored, or as float32 where they are quantized; read now, kept by nobody."""
        ...


@dataclass(frozen=True)
class Plain:
    """Numbers in a row in a file, little-endian, as safetensors and GGUF keep them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int

    def tensor(self) -> torch.Tensor:
        kind = DTYPES.get(self.dtype)
        if kind is None:
            raise InputError(
                f"{self.name} in {self.path} is stored as {self.dtype}, which normscope cannot read: convert it to BF16 or F32"
            )
        if not self.nbytes:
            return torch.empty(self.shape, dtype=kind)
        return torch.frombuffer(read_bytes(self.path, self.offset, self.nbytes), dtype=kind).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that a module holds."""

    name: str
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.value.dtype)

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    def tensor(self) -> torch.Tensor:
        return self.value.detach().cpu()


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'BF16'
    """
    return next((name for name, kind in DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))


def size_in_bytes(shape: tuple[int, ...], dtype: str) -> int | None:
    """How many bytes a tensor takes; None for a type that is not known, or a size beyond any file."""
    count = math.prod(shape)
    if count >= LARGEST_SIZE:
        return None
    if dtype in DTYPES:
        return count * DTYPES[dtype].itemsize
    return -(-count * BITS[dtype] // 8) if dtype in BITS else None


def read_bytes(path: Path, offset: int, count: int) -> bytearray:
    """A part of a file in memory of its own, so that a file that is cut meanwhile is an error and never a signal."""
    content = bytearray(count)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            found = file.readinto(content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError:
        raise InputError(f"{path} holds a tensor of {count:,} bytes, which does not fit in the memory of this machine") from None
    if found != count:
        raise InputError(f"{path} is {count - (found or 0):,} bytes shorter than its header says: it is truncated; fetch it again")
    return content


def is_number(tensor: torch.Tensor) -> bool:
    """Whether norms of it mean anything: floating-point numbers, not ids, masks or codes."""
    return tensor.is_floating_point()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; NaN in place of complex numbers, so that nothing is concluded from one half of them."""
    return torch.full(tensor.shape, math.nan, dtype=torch.float64) if tensor.is_complex() else tensor.to(torch.float64)


def rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """(rows, everything else) of a tensor in float64, some rows at a time."""
    flat = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    step = max(1, BLOCK_BYTES // max(1, 8 * flat.shape[1]))
    for start in range(0, len(flat), step):
        yield flat[start : start + step].to(torch.float64)


def content_hash(tensor: torch.Tensor) -> str:
    """Of its bytes, shape and type."""
    made = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    for start in range(0, len(flat), HASHED):
        made.update(flat[start : start + HASHED].data)
    return made.hexdigest()
