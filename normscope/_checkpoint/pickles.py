"""State dicts in .pt, .pth and .bin files: `torch.load` with weights_only=True, mapped where the file allows it."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from normscope._checkpoint.entries import dtype_name
from normscope._checkpoint.headers import file_size
from normscope.core.errors import InputError, NormscopeError

STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")  # where checkpoints of a training loop keep it
NO_STATE = "holds no plain state dict: save model.state_dict(), or use safetensors"
MOST_LEVELS = 3


@dataclass(frozen=True)
class Pickled:
    """A tensor of a state dict that torch saved."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    nbytes: int

    def tensor(self) -> torch.Tensor:
        return _state(self.path, self.path.stat().st_mtime_ns)[self.name]


def read_pickled(path: Path) -> list[Pickled]:
    """The tensors of a state dict, by name; what else it holds is left aside."""
    file_size(path)
    state = _state(path, path.stat().st_mtime_ns)
    return [Pickled(name, tuple(t.shape), dtype_name(t.dtype), path, t.numel() * t.element_size()) for name, t in state.items()]


@lru_cache(maxsize=1)
def _state(path: Path, changed: int) -> dict[str, torch.Tensor]:
    """The state dict of a file; the tensors of one that is mapped are read when they are used. changed: when it was written."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_mappable(path))
    except NormscopeError:
        raise
    except Exception as error:  # each format has its own errors, pickle's among them
        raise InputError(f"{path} {NO_STATE}") from error
    for _ in range(MOST_LEVELS):
        inner = next((state[key] for key in STATE_KEYS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)), None)
        state = state if inner is None else inner
    found = {name: value.detach() for name, value in state.items() if _is_dense(value)} if isinstance(state, Mapping) else {}
    if not found or not all(isinstance(name, str) for name in found):
        raise InputError(f"{path} {NO_STATE}")
    for name, value in found.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise InputError(f"{name[:80]!r} in {path} is larger than the data stored for it: save a contiguous copy")
    return found


def _is_mappable(path: Path) -> bool:
    """Whether it is an archive as torch.save writes it; one with compressed members could unfold to any size and is refused."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise InputError(f"{path} has compressed members, which torch.save never writes: save it again")
    return True


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_nested
        and not value.is_meta
    )
