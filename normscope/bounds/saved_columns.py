"""Columns of numbers kept on disk while they grow, so that a pass that was killed goes on where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from normscope.core.errors import InputError

SECONDS = 10.0  # between two writes

Columns = Mapping[str, torch.Tensor]


def joined(parts: Sequence[Columns]) -> dict[str, torch.Tensor]:
    """The parts below each other; all have the same columns."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


class SavedColumns:
    """A file with the columns found so far, replaced as a whole: what is there is always complete, also after a crash.

    key: what the columns depend on; a file of another key is refused rather than mixed in.
    """

    def __init__(self, path: str | Path, key: str) -> None:
        self.path, self.key = Path(path), key
        self._written = time.monotonic()

    def load(self) -> list[Columns]:
        """The columns of the file as one part; none if there is no file."""
        if not self.path.exists():
            return []
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get("key") != self.key:
                    raise InputError(f"{self.path} is a checkpoint of another model, loss, partition or data: remove it")
                return [{name: file.get_tensor(name) for name in file.keys()}]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.path} is not a checkpoint of normscope ({error}): remove it") from error

    def keep(self, parts: Sequence[Columns], now: bool = False) -> None:
        """Write the parts, at most once in SECONDS unless `now`."""
        if not parts or (not now and time.monotonic() - self._written < SECONDS):
            return
        temporary = self.path.with_name(f"{self.path.name}.part")
        save_file(joined(parts), temporary, metadata={"key": self.key})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._written = time.monotonic()
