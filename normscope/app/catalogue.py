"""The runs below a directory, kept up to date: what did not change is not read again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from normscope.app.card import Card, card, status
from normscope.app.discovery import MOST_RUNS, Place, discover
from normscope.core.errors import InputError, NormscopeError
from normscope.recorder.reading import Run, followed
from normscope.recorder.segments import ColumnCache

AT_ONCE = 0.5  # seconds that one refresh reads; what is left is read by the next one
OFTEN = 0.4  # seconds between refreshes
PATIENCE = 0.05  # seconds to wait for a run that a figure is made of
MOST_READERS = 2  # figures made at the same time: each may need several times the memory of its column

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass
class Entry:
    """A run in the catalogue. version: that of the catalogue when its card last changed."""

    place: Place
    run: Run
    name: str
    card: Card
    signature: Signature | None = None
    version: int = 0
    unfinished: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Changes:
    """Cards that changed after a version, all ids, and whether there is more to read."""

    version: int
    cards: tuple[Card, ...]
    ids: tuple[str, ...]
    more: bool

    def to_dict(self) -> dict[str, Any]:
        cards = [card.to_dict() for card in self.cards]
        return {"version": self.version, "cards": cards, "ids": self.ids, "more": self.more, "full": len(self.ids) >= MOST_RUNS}


class Catalogue:
    """Reads when asked, on the asker's thread: a dashboard that nobody looks at costs nothing."""

    def __init__(self, root: Path, cache: ColumnCache | None = None) -> None:
        self.root = root.resolve()
        self.cache = cache or ColumnCache()
        self.version = 0
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._readers = threading.Semaphore(MOST_READERS)
        self._last = -OFTEN

    def changes(self, since: int = -1) -> Changes:
        """What is new after version `since`; everything for −1."""
        with self._lock:
            if time.monotonic() - self._last >= OFTEN or self._more():
                self._refresh(time.monotonic() + AT_ONCE)
                self._last = time.monotonic()
            entries = list(self._entries.values())
            return Changes(
                self.version, tuple(entry.card for entry in entries if entry.version > since),
                tuple(entry.place.id for entry in entries), self._more(),
            )  # fmt: skip

    @contextmanager
    def reading(self, ids: Sequence[str]) -> Iterator[list[Run]]:
        """The runs of these ids, which nobody refreshes meanwhile."""
        with self._lock:
            if not self._entries:
                self._refresh(time.monotonic() + AT_ONCE)
            unknown = [id for id in ids if id not in self._entries]
            if unknown:
                raise InputError(f"no run {unknown[0][:200]!r} here: reload the list of runs")
            entries = {id: self._entries[id] for id in sorted(set(ids))}
        with self._readers, ExitStack() as held:
            for entry in entries.values():
                held.enter_context(entry.lock)
                if entry.card.status == "error":
                    raise InputError(f"{entry.name} cannot be read: {entry.card.error}")
            yield [entries[id].run for id in ids]

    def _more(self) -> bool:
        return any(entry.unfinished for entry in self._entries.values())

    def _refresh(self, deadline: float) -> None:
        places = {place.id: place for place in discover(self.root)}
        for id in self._entries.keys() - places.keys():
            del self._entries[id]
            self.version += 1
        states = {id: signature(place) for id, place in places.items()}
        for id in sorted(places, key=lambda id: -_modified(states[id])):  # what was written last is read first
            entry = self._entries.get(id)
            if entry is None or entry.place != places[id]:
                entry = self._entries[id] = self._entry(places[id])
            if time.monotonic() < deadline and entry.lock.acquire(timeout=PATIENCE):
                try:
                    self._renew(entry, states[id])
                finally:
                    entry.lock.release()
            elif entry.signature != states[id]:
                entry.unfinished = True

    def _entry(self, place: Place) -> Entry:
        name = unquote_to_bytes(place.id).decode(errors="replace")
        name = self.root.name if name == "." else name
        run = followed(place.path, place.ranks, self.cache)
        self.version += 1
        return Entry(place, run, name, Card(place.id, name, "waiting"), version=self.version)

    def _renew(self, entry: Entry, state: Signature) -> None:
        if entry.signature != state or entry.unfinished:
            made = self._read(entry, state)
        elif entry.card.status == "live":
            made = replace(entry.card, status=status(entry.run.status))
        else:
            return
        if made != entry.card:
            self.version += 1
            entry.card, entry.version = made, self.version

    def _read(self, entry: Entry, state: Signature) -> Card:
        updated = _modified(state) / 1e9
        entry.signature, entry.unfinished = state, False
        try:
            for part in entry.run.parts:
                entry.unfinished |= part.refresh()
            return card(entry.place.id, entry.name, entry.run, updated)
        except Exception as error:  # whatever somebody's directory holds, the other runs are shown
            message = str(error) if isinstance(error, NormscopeError) else f"{type(error).__name__}: {error}"
            return Card(entry.place.id, entry.name, "error", message[:500], updated=updated)


def signature(place: Place) -> Signature:
    """Name, inode, size and time of every file of a run: what changes when it is written."""
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
