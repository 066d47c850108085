"""Where one trial works: its directory, data, random streams, checkpoint and progress."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from normscope.core.errors import InputError
from normscope.lab.datasets import Split, load_data

CHECKPOINT, PROGRESS = "checkpoint.pt", "progress.json"

Buffer = bytes | memoryview
Report = Callable[[float], None]  # the part of a trial that is done, from 0 to 1


class Workspace:
    """The directory of a trial and what it may use there; everything written is whole or absent, whenever a kill comes."""

    def __init__(self, directory: Path, seed: int, data_directory: Path | None = None, report: Report | None = None) -> None:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.seed, self.data_directory = directory, seed, data_directory
        self._report = report
        self._last_report = -1.0

    @property
    def run(self) -> Path:
        """For `ns.watch`: the run directory that dashboards read."""
        return self.directory / "run"

    def data(self, name: str) -> Split:
        """A data set, loaded once per process."""
        return _data(name, self.data_directory)

    def generator(self, purpose: str) -> torch.Generator:
        """A random stream of its own for every purpose and seed, the same on every machine."""
        digest = hashlib.sha256(f"{self.seed} {purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def progress(self, done: float, total: float = 1.0) -> None:
        """Say how far the trial is."""
        part = done / total
        now = time.monotonic()
        if now - self._last_report < 0.5 and part < 1:
            return
        self._last_report = now
        if self._report is not None:
            self._report(part)
        write_atomically(self.directory / PROGRESS, json.dumps({"done": part}).encode(), durable=False)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint: tensors and plain values."""
        content = BytesIO()  # torch.save hides why a file cannot be written
        torch.save(state, content)
        write_atomically(self.directory / CHECKPOINT, content.getbuffer())

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, if there is one that can be read; without it the trial starts again."""
        path = self.directory / CHECKPOINT
        if not path.exists():
            return None
        try:
            state = torch.load(path, weights_only=True)
        except Exception:  # a damaged file raises errors of many kinds
            return None
        return state if isinstance(state, dict) else None


def write_atomically(path: Path, content: Buffer, durable: bool = True) -> None:
    """The file is the old one or the new one, never a part; durable: even where the machine loses its power."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with writing(path, temporary):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable and os.name == "posix":
            directory = os.open(path.parent, os.O_RDONLY)  # which holds the new name
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


@contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """A disk that is full or a place that may not be written to is one line; what was written of a temporary file goes."""
    try:
        yield
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}; make room there or choose another --out") from error


@lru_cache(2)
def _data(name: str, directory: Path | None) -> Split:
    return load_data(name, directory)
