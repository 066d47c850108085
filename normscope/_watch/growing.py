"""Files that grow or are replaced while they are read: events, manifests and statuses, of which only what is new is read.

Whatever a directory holds, its reader stands: only regular files are opened, links are not followed, nothing is memory-mapped
(cutting a mapped file kills its reader), sizes are limited, and a file that was replaced or cut is read anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from normscope._watch.directory import MANIFEST, STATUS, opened, read_at
from normscope._watch.layout import MOST_LAYERS
from normscope.core.errors import InputError

MOST_MANIFEST, MOST_STATUS = 8 << 20, 1 << 16  # bytes; a manifest of 10,000 layers has 4 million
MOST_NAME, MOST_STEP = 4_000, 1 << 62
MOST_LINE, EVENTS_AT_ONCE = 1 << 16, 16 << 20  # bytes
MOST_EVENTS, MOST_HELD = 5_000, 8 << 20  # that are kept, and bytes that they take in memory
LIFE = ("started", "closed")  # the events that say whether a run is being written
FIELDS: dict[str, tuple[type, ...]] = {  # of a layer, where it has them
    "sharded": (bool,),
    "scale_free": (bool, type(None)),
    "in_product": (bool,),
    "replicas": (int,),
    "effective_power": (int, float, type(None)),
}
EVENT_FIELDS: dict[str, tuple[type, ...]] = {  # of an event, where it has them
    "rule": (str,),
    "layer": (str, type(None)),
    "step": (int, type(None)),
    "message": (str,),
    "fix": (str,),
    "evidence": (dict,),
}
EVIDENCE_FIELDS: dict[str, tuple[type, ...]] = {"layers": (list,), "affected": (int,)}


class Grown:
    """A file that grows: `offset` is how far it was read, `more` whether there was too much for one reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        """Begin anew, for a file that is no longer the one that was read."""
        self.identity: tuple[int, ...] | None = None
        self.offset = 0
        self.more = False

    def refresh(self) -> None:
        """Read what was completed since the last call."""
        with opened(self.path) as (file, state):
            identity = self._identity(state)
            if identity != self.identity or state.st_size < self.offset:
                self.forget()
                self.identity = identity
            self._read(file, state.st_size)

    def _identity(self, state: os.stat_result) -> tuple[int, ...]:
        return (state.st_dev, state.st_ino)

    def _read(self, file: int, size: int) -> None:
        raise NotImplementedError  # by those who follow a file


class FollowedEvents(Grown):
    """The complete lines of events.jsonl; `unread` counts those that are no event, and those beyond the limits. held: bytes."""

    def __init__(self, path: Path, most: int = MOST_EVENTS, most_held: int = MOST_HELD) -> None:
        self.most, self.most_held = most, most_held
        super().__init__(path)

    def forget(self) -> None:
        super().forget()
        self.events: list[dict[str, Any]] = []
        self.unread = self.held = 0
        self._endless = False  # in the middle of a line that is too long

    def _read(self, file: int, size: int) -> None:
        content = read_at(file, min(EVENTS_AT_ONCE, size - self.offset), self.offset)
        self.more = len(content) == EVENTS_AT_ONCE
        complete = content.rfind(b"\n") + 1
        lines = content[:complete].split(b"\n")[:-1]
        if self._endless and lines:
            self._endless = False
            lines = lines[1:]
        if len(content) - complete > MOST_LINE:
            self.unread += not self._endless
            self._endless, complete = True, len(content)
        self.offset += complete
        for line in lines:
            fits = len(self.events) < self.most and self.held + held(line) <= self.most_held
            read = len(line) <= MOST_LINE and (fits or any(kind.encode() in line for kind in LIFE))
            event = parsed(line) if read else None
            if event is not None and fits:
                self.events.append(event)
                self.held += held(line)
                continue
            self.unread += bool(line.strip())
            if event is not None and event["kind"] in LIFE:  # whether a run has ended is known however much it said
                self.events[-1:] = [event]


class Replaced(Grown):
    """A JSON file that is replaced as a whole. content: of the last reading; None where there was nothing to read. held: bytes."""

    most = MOST_STATUS

    def forget(self) -> None:
        super().forget()
        self.content: dict[str, Any] | None = None
        self.held = 0

    def refresh(self) -> None:
        if os.path.lexists(self.path):
            super().refresh()
        else:
            self.forget()

    def _identity(self, state: os.stat_result) -> tuple[int, ...]:
        return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    def _read(self, file: int, size: int) -> None:
        if size > self.most:
            raise InputError(f"{self.path.name} has {size >> 10} KB, more than a run's file may have")
        if self.content is None:
            content = read_at(file, size, 0)
            self.content, self.held = self.checked(content), held(content)

    @staticmethod
    def checked(content: bytes) -> dict[str, Any]:
        """Its content, if it has the form that it should have."""
        raise NotImplementedError  # by those who follow a file


class FollowedManifest(Replaced):
    most = MOST_MANIFEST

    @staticmethod
    def checked(content: bytes) -> dict[str, Any]:
        manifest = parsed_object(content, MANIFEST)
        layers = manifest.get("layers")
        if not isinstance(layers, list) or len(layers) > MOST_LAYERS:
            raise InputError(f"{MANIFEST} is not a run's: it has no list of at most {MOST_LAYERS} layers")
        if not all(isinstance(layer, dict) and _is_name(layer.get("name")) for layer in layers):
            raise InputError(f"{MANIFEST} is not a run's: every layer has a name of at most {MOST_NAME} characters")
        for name, kinds in FIELDS.items():
            if not all(_are(layer, {name: kinds}) for layer in layers):
                raise InputError(f"{MANIFEST} is not a run's: a layer's {name!r} has the wrong type")
        return manifest


class FollowedStatus(Replaced):
    """status.json, as `life` reads it."""

    @staticmethod
    def checked(content: bytes) -> dict[str, Any]:
        status = parsed_object(content, STATUS)
        step, beat = status.get("step"), status.get("beat")
        known = isinstance(status.get("state"), str) and _is(step, (int,)) and 0 <= step <= MOST_STEP  # type: ignore[operator]
        if not known or not _is(beat, (int, float)) or not abs(beat) < MOST_STEP:  # type: ignore[arg-type]
            raise InputError(f"{STATUS} is not a run's: it has no state, step and beat")
        return status


def parsed_object(content: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        cause = f"it has {len(content)} bytes" if not content.strip(b"\0 \n") else type(error).__name__
        raise InputError(f"{name} is not JSON ({cause}): restore it, or choose another run") from error
    if not isinstance(found, dict):
        raise InputError(f"{name} is not a run's: it is not a JSON object")
    return found


def parsed(line: bytes) -> dict[str, Any] | None:
    """An event, None where a line is none: an object with a kind and a time, whose known fields are of their types."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str) or not _is(event.get("time"), (int, float)):
        return None
    evidence = event.get("evidence", {})
    fits = _are(event, EVENT_FIELDS) and _are(evidence, EVIDENCE_FIELDS) and all(map(_is_name, evidence.get("layers", ())))
    numbers = (event["time"], event.get("step") or 0, evidence.get("affected", 0)) if fits else ()
    return event if fits and all(abs(number) < MOST_STEP for number in numbers) else None


def held(content: bytes) -> int:
    """About how many bytes JSON takes in memory: what nests or separates stands for an object of Python."""
    return len(content) + 64 * (content.count(b",") + content.count(b"[")) + 256 * content.count(b"{")


def _are(found: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> bool:
    """Whether the fields that are there are of these types."""
    return all(_is(found[name], kinds) for name, kinds in fields.items() if name in found)


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Of one of these types; True and False are no numbers."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MOST_NAME
