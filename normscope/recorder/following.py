"""A run that is read again and again while it grows: only what is new is read, of the columns that were asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from normscope.core.errors import InputError
from normscope.recorder.growing import FollowedEvents, FollowedManifest, Grown
from normscope.recorder.reading import Part, Run
from normscope.recorder.segments import ColumnCache, FollowedSegment
from normscope.recorder.store import EVENTS, MANIFEST, segment_number


@dataclass(frozen=True)
class FollowedPart(Part):
    """What one process wrote, as of the last `refresh`."""

    cache: ColumnCache
    outline: FollowedManifest
    log: FollowedEvents
    streams: dict[Path, FollowedSegment] = field(default_factory=dict)

    @staticmethod
    def at(path: Path, cache: ColumnCache) -> FollowedPart:
        return FollowedPart(path, cache, FollowedManifest(path / MANIFEST), FollowedEvents(path / EVENTS))

    def refresh(self) -> bool:
        """Read what is new; whether there is more than one call reads."""
        segments = self.segments
        for gone in self.streams.keys() - set(segments):
            self.streams.pop(gone).forget()
        for new in [path for path in segments if path not in self.streams]:
            self.streams[new] = FollowedSegment(new, self.cache)
        files: list[Grown] = [*(file for file in (self.outline, self.log) if os.path.lexists(file.path)), *self.streams.values()]
        for file in files:
            file.refresh()
        self._check_widths()
        return any(file.more for file in files)

    def _check_widths(self) -> None:
        layers = len(self.manifest["layers"])
        for stream in self.streams.values():
            for place in stream.lists():
                if place.width != layers:
                    raise InputError(f"{MANIFEST} has {layers} layers, {stream.path.name} has {place.width}")

    @property
    def manifest(self) -> dict[str, Any]:
        return self.outline.content

    def events(self) -> list[dict[str, Any]]:
        return self.log.events

    def rows(self, segment: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
        return self.streams[segment].table(columns) if segment in self.streams else None

    def edge(self, name: str, last: bool = True) -> np.ndarray | None:
        """The newest row of a column, or the oldest."""
        paths = sorted(self.streams, key=segment_number, reverse=last)
        found = (self.streams[path].edge(name, last) for path in paths)
        return next((value for value in found if value is not None), None)

    @property
    def count(self) -> int:
        """Rows in all segments, repeated steps included."""
        return sum(stream.rows for stream in self.streams.values())


def followed(path: Path, ranks: Sequence[Path], cache: ColumnCache) -> Run:
    """A run whose parts are read by `refresh`, and then as of that moment."""
    return Run(path, tuple(FollowedPart.at(rank, cache) for rank in ranks or (path,)))
