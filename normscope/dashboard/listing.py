"""The runs below a directory, kept up to date: what did not change is not read again."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from normscope._watch.reading import Run, followed
from normscope._watch.segments import ColumnCache
from normscope.core.errors import InputError, NormscopeError
from normscope.dashboard.card import Card, card, status
from normscope.dashboard.discovery import Discovered, Discovery
from normscope.dashboard.results import result_card

AT_ONCE = 0.4  # seconds that one answer looks for runs, and then reads; what is left is done by the next one
MOST_LISTED = 200  # places in an answer
MOST_SHOWN = 12  # runs in one figure
MOST_KEPT = 1_000  # places whose cards and headers are kept
MOST_CACHED = 256 << 20  # bytes of columns
MOST_HELD = 256 << 20  # bytes of manifests and events; beyond it runs keep their cards, and are read again when they are asked for
OFTEN = 0.4  # seconds between refreshes
PATIENCE = 0.05  # seconds to wait for a run that a figure is made of
MOST_READERS = 2  # figures made at the same time: each may need several times the memory of its column

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass
class RunEntry:
    """A run in the catalogue. version: that of the catalogue when its card last changed. read: whether `run` holds what it read."""

    place: Discovered
    run: Run
    name: str
    card: Card
    signature: Signature | None = None
    version: int = 0
    unfinished: bool = True
    read: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Changes:
    """An answer about the list. cards: those that changed after a version, of ids. listed: what the list shows, newest first; ids
    also has the newest runs and those that were asked for. matching, total: how many there are to list, and in all. more: whether
    there is more to read.
    """

    version: int
    cards: tuple[Card, ...]
    ids: tuple[str, ...]
    listed: tuple[str, ...]
    matching: int
    total: int
    more: bool

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "cards": [card.to_dict() for card in self.cards]}


class Catalogue:
    """Reads when asked, on the asker's thread: a dashboard that nobody looks at costs nothing.

    All places are known by name and time; only those that a question lists are read, the newest first. `_lock` guards the list and
    is not held while a run is read, so one that takes long delays nobody who does not ask for it; each entry has a lock of its own.
    """

    def __init__(self, root: Path, cache: ColumnCache | None = None) -> None:
        self.root = root.resolve()
        self.cache = cache or ColumnCache(MOST_CACHED)
        self.version = 0
        self.discovery = Discovery(self.root)
        self._entries: OrderedDict[str, RunEntry] = OrderedDict()  # the one that was listed last is the last one
        self._held: dict[str, int] = {}  # bytes of manifests and events
        self._lock = threading.Lock()
        self._readers = threading.Semaphore(MOST_READERS)
        self._last = -OFTEN

    def changes(self, since: int = -1, find: str = "", also: Sequence[str] = ()) -> Changes:
        """What is new after version `since`, everything for −1, of the newest whose names have `find` in them, and of `also`."""
        with self._lock:
            if time.monotonic() - self._last >= OFTEN or not self.discovery.known_once:
                self.discovery.advance(AT_ONCE)
                self._last = time.monotonic()
            places, written = self.discovery.places, self.discovery.written
            matching = [id for id in places if find.lower() in self._name(id).lower()] if find else list(places)
            listed = heapq.nlargest(MOST_LISTED, matching, key=written.__getitem__)
            leading = listed if not find else heapq.nlargest(MOST_SHOWN, written, key=written.__getitem__)
            ids = list(dict.fromkeys([*(id for id in also[:MOST_SHOWN] if id in places), *leading[:MOST_SHOWN], *listed]))
            entered = self._enter(ids)
        self._refresh(entered)
        with self._lock:
            entries = [self._entries[id] for id in ids if id in self._entries]
            return Changes(
                self.version, tuple(entry.card for entry in entries if entry.version > since),
                tuple(entry.place.id for entry in entries), tuple(id for id in listed if id in self._entries),
                len(matching), len(places),
                not self.discovery.known_once or any(entry.unfinished for entry in entries),
            )  # fmt: skip

    @contextmanager
    def reading(self, ids: Sequence[str]) -> Iterator[list[Run]]:
        """The runs of these ids, which nobody refreshes meanwhile."""
        with self._lock:
            if not self.discovery.places:
                self.discovery.advance(AT_ONCE)
            unknown = [id for id in ids if id not in self.discovery.places or self.discovery.places[id].is_result]
            if unknown:
                raise InputError(f"no run {unknown[0][:200]!r} here: reload the list of runs")
            entries = {entry.place.id: entry for entry in self._enter(sorted(set(ids))[:MOST_SHOWN])}
        self._refresh(list(entries.values()))
        if not set(ids) <= entries.keys():
            raise InputError(f"choose between 1 and {MOST_SHOWN} runs")
        with self._readers, ExitStack() as held:
            for entry in entries.values():
                held.enter_context(entry.lock)
                if not entry.read:
                    self._renew(entry, needed=True)
                if entry.card.status == "error":
                    raise InputError(f"{entry.name} cannot be read: {entry.card.error}")
            yield [entries[id].run for id in ids]

    def result(self, id: str) -> Path:
        """The file of a result."""
        with self._lock:
            if not self.discovery.places:
                self.discovery.advance(AT_ONCE)
            place = self.discovery.places.get(id)
        if place is None or not place.is_result:
            raise InputError(f"no result {id[:200]!r} here: reload the list")
        return place.path

    def _enter(self, ids: Sequence[str]) -> list[RunEntry]:
        """The entries of these places, in this order; others beyond MOST_KEPT are forgotten."""
        for id in [id for id in self._entries if id not in self.discovery.places]:
            self._drop(id)
        for id in ids:
            place, entry = self.discovery.places[id], self._entries.get(id)
            if entry is None or entry.place != place:
                self._entries[id] = self._entry(place)
            self._entries.move_to_end(id)
        entered = [self._entries[id] for id in ids]
        while len(self._entries) > MOST_KEPT:
            self._drop(next(iter(self._entries)))
        return entered

    def _refresh(self, entries: Sequence[RunEntry]) -> None:
        """Renew these entries, in this order, for AT_ONCE seconds, and one of them in any case; what is left waits."""
        deadline, renewed = time.monotonic() + AT_ONCE, 0
        for entry in entries:
            in_time = time.monotonic() < deadline or not renewed
            if in_time and entry.lock.acquire(timeout=PATIENCE):
                try:
                    renewed += entry.unfinished
                    self._renew(entry)
                finally:
                    entry.lock.release()

    def _renew(self, entry: RunEntry, needed: bool = False) -> None:
        """Read what changed of an entry whose lock is held, and note what was made of it. needed: its run is, not only its card."""
        state, id = signature(entry.place), entry.place.id
        live = entry.card.status == "live"
        again = entry.signature != state or entry.unfinished or (not entry.read and (live or needed))
        made = self._read(entry, state, again) if state and (again or live) else entry.card
        with self._lock:
            if self._entries.get(id) is not entry:  # forgotten meanwhile
                return
            if not state:
                self.discovery.forget(id)
                self._drop(id)
                return
            if id in self.discovery.places:
                self.discovery.written[id] = _modified(state)
            self._let_go(entry)
            if made != entry.card:
                self.version += 1
                entry.card, entry.version = made, self.version

    def _let_go(self, latest: RunEntry) -> None:
        """Forget what the runs hold that were listed longest ago, all but `latest`, until the rest is within MOST_HELD."""
        self._held[latest.place.id] = sum(part.held for part in latest.run.parts)
        if sum(self._held.values()) <= MOST_HELD:
            return
        for id, entry in self._entries.items():
            if self._held.get(id) and entry is not latest and entry.lock.acquire(blocking=False):
                entry.run, entry.read = followed(entry.place.path, entry.place.ranks, self.cache), False
                entry.lock.release()
                del self._held[id]
                if sum(self._held.values()) <= MOST_HELD:
                    return

    def _drop(self, id: str) -> None:
        del self._entries[id]
        self._held.pop(id, None)
        self.version += 1

    def _name(self, id: str) -> str:
        name = unquote_to_bytes(id).decode(errors="replace")
        return self.root.name if name == "." else name

    def _entry(self, place: Discovered) -> RunEntry:
        name = self._name(place.id)
        run = followed(place.path, place.ranks, self.cache)
        self.version += 1
        return RunEntry(place, run, name, Card(place.id, name, "waiting"), version=self.version)

    def _read(self, entry: RunEntry, state: Signature, again: bool) -> Card:
        """Its card. again: not only whether it is still being written."""
        updated = _modified(state) / 1e9
        entry.signature, entry.unfinished, entry.read = state, False, True
        try:
            if not again:
                return replace(entry.card, status=status(entry.run.status))
            if entry.place.is_result:
                return result_card(entry.place.id, entry.name, entry.place.path, updated)
            for part in entry.run.parts:
                entry.unfinished |= part.refresh()
            return card(entry.place.id, entry.name, entry.run, updated)
        except Exception as error:  # whatever somebody's directory holds, the other runs are shown
            message = str(error) if isinstance(error, NormscopeError) else f"{type(error).__name__}: {error}"
            return Card(entry.place.id, entry.name, "error", message[:500], updated=updated)


def signature(place: Discovered) -> Signature:
    """Name, inode, size and time of every file of a run or a result: what changes when it is written; empty where it is gone."""
    if place.is_result:
        return tuple(state for state in _states(place.path.parent) if state[0] == place.path.name)
    return tuple(state for directory in (place.path, *place.ranks) for state in _states(directory))


def _states(directory: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        with os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not entry.is_dir(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    yield entry.name, state.st_ino, state.st_size, state.st_mtime_ns
    except OSError:
        return


def _modified(state: Signature) -> int:
    return max((time for _, _, _, time in state), default=0)
