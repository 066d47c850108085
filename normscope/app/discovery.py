"""Which directories below a root are runs. Links are not followed, so nothing outside of the root is ever reached."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes

from normscope.recorder.store import EVENTS, MANIFEST

RANK = re.compile(r"rank-(\d{1,6})")
STREAM = re.compile(r"metrics-\d+\.arrows")
MOST_RUNS, MOST_DIRECTORIES, DEEPEST = 2_000, 20_000, 8


@dataclass(frozen=True)
class Place:
    """A run on disk. id: its path below the root, percent-encoded, so that any name of a directory gives plain ASCII."""

    id: str
    path: Path
    ranks: tuple[Path, ...]


def discover(root: Path) -> list[Place]:
    """The runs in and below `root`, at most MOST_RUNS of them, in the order of their names."""
    found: list[Place] = []
    for path, files, directories in _walk(root):
        ranks = sorted((name for name in directories if RANK.fullmatch(name)), key=lambda name: int(name.removeprefix("rank-")))
        is_part = RANK.fullmatch(path.name) is not None and path != root
        if not is_part and (ranks or MANIFEST in files or EVENTS in files or any(STREAM.fullmatch(name) for name in files)):
            id = quote_from_bytes(os.fsencode(path.relative_to(root)), safe="/")
            found.append(Place(id, path, tuple(path / name for name in ranks)))
            if len(found) == MOST_RUNS:
                break
    return found


def _walk(root: Path) -> Iterator[tuple[Path, set[str], list[str]]]:
    """(directory, names of its files, names of its directories), top down; what cannot be listed is taken as empty."""
    waiting = [(root, 0)]
    for _ in range(MOST_DIRECTORIES):
        if not waiting:
            return
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            kinds = {}
        directories = sorted((name for name, is_directory in kinds.items() if is_directory), reverse=True)
        yield path, {name for name, is_directory in kinds.items() if not is_directory}, directories
        if depth < DEEPEST:
            waiting += [(path / name, depth + 1) for name in directories if not name.startswith(".")]
