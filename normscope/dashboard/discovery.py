"""What lies below a root: runs, and results that commands wrote as JSON. Links are not followed, so nothing outside is reached.

A tree may be large or slow, so it is looked through a little at a time, directories that changed last first. Times are asked for in
the order of falling file numbers: most file systems number files as they are made, so the newest are likely to be known first, and
the order is right once all are known.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes

from normscope._watch.growing import opened
from normscope._watch.store import EVENTS, MANIFEST
from normscope.core.errors import InputError
from normscope.report.result_sections import SECTIONS

RANK = re.compile(r"rank-(\d{1,6})")
STREAM = re.compile(r"metrics-\d+\.arrows")
SCHEMA = re.compile(rb'^\s*(?:\[\s*)?\{\s*"schema":\s*"([^"\\]{1,100})"')  # how every result begins
MOST_PLACES, MOST_DIRECTORIES, DEEPEST = 200_000, 1_000_000, 8
MOST_RESULTS = 200  # in one directory
AT_LEAST = 16  # directories that every call lists, however slow they are: the end is reached
AT_FIRST = 1.0  # seconds until something is found: only when all names of a directory are timed is it known which are the newest
PAUSE = 10  # times as long as it took, until all is looked through again
WATCHED = 50  # directories without a run of their own that are looked at in between, for new runs


@dataclass(frozen=True)
class Discovered:
    """A run or a result on disk. id: its path below the root, percent-encoded, so that any name gives plain ASCII."""

    id: str
    path: Path
    ranks: tuple[Path, ...] = ()
    is_result: bool = False


class Discovery:
    """Looks through a tree again and again. places: what was found; written: when each was written last, in nanoseconds."""

    def __init__(self, root: Path) -> None:
        self.root = os.fspath(root)
        self.places: dict[str, Discovered] = {}
        self.written: dict[str, int] = {}
        self.known_once = False  # whether all was looked through at least once
        self._watched: dict[str, int] = {}  # directory → when it had changed last, as of its listing
        self._begin()

    def _begin(self) -> None:
        self._named: deque[tuple[str, int]] = deque([(self.root, 0)])  # (path, depth): time not known yet
        self._timed: list[tuple[int, int, str, int]] = []  # a heap: (−time, how many were timed before, path, depth)
        self._seen: set[str] = set()
        self._left = MOST_DIRECTORIES
        self._order = itertools.count()
        self._spent = 0.0
        self._next = 0.0

    def advance(self, seconds: float) -> None:
        """Look for so long, and at AT_LEAST directories in any case."""
        begun = time.monotonic()
        if not self._waiting:
            self._begin() if begun >= self._next else self._look_for_new()
        timed = listed = 0
        while self._waiting:
            in_time = time.monotonic() < begun + (seconds if self.places else max(seconds, AT_FIRST))
            if self._named and (in_time or timed < AT_LEAST):
                timed += self._time()
            elif self._timed and (in_time or listed < AT_LEAST):
                _, _, path, depth = heapq.heappop(self._timed)
                self._list(path, depth)
                listed += 1
            else:
                break
        now = time.monotonic()
        self._spent += now - begun
        if not self._waiting and self._next == 0:
            self.known_once = True
            self._next = now + PAUSE * self._spent
            for id in self.places.keys() - self._seen:
                self.forget(id)

    def forget(self, id: str) -> None:
        """For a place that is gone."""
        self.places.pop(id, None)
        self.written.pop(id, None)

    @property
    def _waiting(self) -> bool:
        return bool(self._named or self._timed)

    def _look_for_new(self) -> None:
        """List again what changed since it was listed, of the directories that changed last."""
        for path in heapq.nlargest(WATCHED, self._watched, key=lambda path: self._watched[path]):
            try:
                changed = os.stat(path, follow_symlinks=False).st_mtime_ns != self._watched[path]
            except OSError:
                del self._watched[path]
                continue
            if changed:
                self._list(path, path.count(os.sep) - self.root.count(os.sep), again=True)

    def _time(self) -> int:
        """Ask when some directories changed; how many."""
        count = min(len(self._named), AT_LEAST)
        for _ in range(count):
            path, depth = self._named.popleft()
            with suppress(OSError):
                changed = os.stat(path, follow_symlinks=False).st_mtime_ns
                heapq.heappush(self._timed, (-changed, next(self._order), path, depth))
        return count

    def _list(self, path: str, depth: int, again: bool = False) -> None:
        """Take in a directory; what cannot be listed is taken as empty. again: only what is new in it is looked at further."""
        try:
            changed = os.stat(path, follow_symlinks=False).st_mtime_ns
            with os.scandir(path) as found:
                entries = list(found)
            directories = {entry.name: entry for entry in entries if entry.is_dir(follow_symlinks=False)}
        except OSError:
            return
        files = {entry.name: entry for entry in entries if entry.name not in directories}
        ranks = sorted(filter(RANK.fullmatch, directories), key=lambda name: int(name.removeprefix("rank-")))
        is_part = RANK.fullmatch(os.path.basename(path)) is not None and path != self.root
        is_run = not is_part and bool(ranks or MANIFEST in files or EVENTS in files or any(map(STREAM.fullmatch, files)))
        if is_run:
            self._take(Discovered(self._id(path), Path(path), tuple(Path(path, name) for name in ranks)), list(files.values()))
        if not is_run and not is_part:
            self._watched[path] = changed
            for name in [name for name in files if name.endswith(".json")][:MOST_RESULTS]:
                if is_result(Path(path, name)):
                    self._take(Discovered(self._id(os.path.join(path, name)), Path(path, name), is_result=True), [files[name]])
        if depth < DEEPEST:
            deeper = [entry for name, entry in directories.items() if not name.startswith(".") and name not in ranks]
            deeper.sort(key=os.DirEntry.inode, reverse=True)
            fresh = [each.path for each in deeper if not again or self._is_new(each.path)]
            self._named += [(each, depth + 1) for each in fresh[: self._left]]
            self._left -= len(fresh)

    def _is_new(self, path: str) -> bool:
        return path not in self._watched and self._id(path) not in self.places

    def _take(self, place: Discovered, files: list[os.DirEntry[str]]) -> None:
        """files: whose times count."""
        if len(self.places) >= MOST_PLACES and place.id not in self.places:
            return
        self.places[place.id] = place
        self.written[place.id] = newest(files)
        self._seen.add(place.id)

    def _id(self, path: str) -> str:
        return quote_from_bytes(os.fsencode(path[len(self.root) :].lstrip(os.sep) or "."), safe="/")


def newest(files: list[os.DirEntry[str]]) -> int:
    """When the last one of some files was written, in nanoseconds."""
    times = [0]
    for file in files:
        with suppress(OSError):
            times.append(file.stat(follow_symlinks=False).st_mtime_ns)
    return max(times)


def is_result(path: Path) -> bool:
    """Whether a file begins as the results do that a report can show."""
    try:
        with opened(path) as (file, _):
            begins = SCHEMA.match(os.pread(file, 300, 0))
    except InputError:
        return False
    return begins is not None and begins[1].decode(errors="replace") in SECTIONS
