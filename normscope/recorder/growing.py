"""Files that grow while they are read: events and manifests, of which only what is new is read.

For readers that must stand whatever a directory holds (the dashboard): only regular files are opened, links are not followed,
sizes are limited, and a file that was replaced or cut is read anew.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normscope.core.errors import InputError
from normscope.recorder.reading import LIFE, parsed
from normscope.recorder.store import EVENTS, MANIFEST

MOST_MANIFEST = 8 << 20  # bytes; one of 10,000 layers has 4 million
MOST_LAYERS, MOST_NAME = 50_000, 1_000
MOST_LINE, MOST_EVENTS, EVENTS_AT_ONCE = 1 << 20, 5_000, 16 << 20
REGULAR_ONLY = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file and its state; a link, a pipe or a device is refused, not followed or waited for."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise InputError(f"{path.name} is not a regular file: links, pipes and devices are not read")
        descriptor = os.open(path, REGULAR_ONLY)
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InputError(f"{path.name} is not a regular file: links, pipes and devices are not read")
        yield descriptor, state
    except OSError as error:
        raise InputError(f"cannot read {path.name}: {error.strerror}") from error
    finally:
        os.close(descriptor)


class Grown:
    """A file that grows: `offset` is how far it was read, `more` whether there was too much for one reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forget()

    def forget(self) -> None:
        """Begin anew, for a file that is no longer the one that was read."""
        self.identity: tuple[int, int] | None = None
        self.offset = 0
        self.more = False

    def refresh(self) -> None:
        """Read what was completed since the last call."""
        with opened(self.path) as (file, state):
            identity = (state.st_dev, state.st_ino)
            if identity != self.identity or state.st_size < self.offset:
                self.forget()
                self.identity = identity
            self._read(file, state.st_size)

    def _read(self, file: int, size: int) -> None:
        raise NotImplementedError


class FollowedEvents(Grown):
    """The complete lines of events.jsonl; `unread` counts those that are no event, and those beyond the limit."""

    def forget(self) -> None:
        super().forget()
        self.events: list[dict[str, Any]] = []
        self.unread = 0

    def _read(self, file: int, size: int) -> None:
        content = os.pread(file, EVENTS_AT_ONCE, self.offset)
        complete = content.rfind(b"\n") + 1
        if len(content) - complete > MOST_LINE:
            raise InputError(f"{EVENTS} has a line of more than {MOST_LINE >> 20} MB")
        self.offset += complete
        self.more = len(content) == EVENTS_AT_ONCE
        for line in content[:complete].splitlines():
            event = parsed(line) if len(line) <= MOST_LINE else None
            if event is None or not _is_event(event):
                self.unread += bool(line.strip())
            elif len(self.events) < MOST_EVENTS:
                self.events.append(event)
            else:
                self.unread += 1
                if event["kind"] in LIFE:  # whether a run has ended is known however much it said
                    self.events[-1] = event


class FollowedManifest(Grown):
    """manifest.json, which is replaced as a whole."""

    def forget(self) -> None:
        super().forget()
        self.content: dict[str, Any] = {"layers": []}
        self.offset = -1  # not read yet

    def _read(self, file: int, size: int) -> None:
        if size > MOST_MANIFEST:
            raise InputError(f"{MANIFEST} has {size >> 20} MB: more than a manifest can have")
        if size != self.offset:
            self.content = checked_manifest(os.pread(file, size, 0))
            self.offset = size


def checked_manifest(content: bytes) -> dict[str, Any]:
    """A manifest, if it has the form of one."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{MANIFEST} is not JSON: {type(error).__name__}") from error
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list) or len(layers) > MOST_LAYERS:
        raise InputError(f"{MANIFEST} is not that of a run: it has no list of at most {MOST_LAYERS} layers")
    if not all(isinstance(layer, dict) and _is_name(layer.get("name")) for layer in layers):
        raise InputError(f"{MANIFEST} is not that of a run: every layer has a name of at most {MOST_NAME} characters")
    return dict(manifest)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MOST_NAME


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("time"), (int, float))
