"""What one process wrote of a run, however often it is read: only what is new is read, of the columns that were asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from normscope._watch import messages
from normscope._watch.checksums import Damage
from normscope._watch.columns import schema
from normscope._watch.directory import EVENTS, MANIFEST, SEGMENTS, STATUS, segment_number
from normscope._watch.growing import MOST_EVENTS, MOST_HELD, FollowedEvents, FollowedManifest, FollowedStatus
from normscope._watch.life import Life, judged
from normscope._watch.lock import is_being_written
from normscope._watch.segments import ColumnCache, FollowedSegment, chosen, filled
from normscope.core.errors import InputError


@dataclass(frozen=True)
class FollowedPart:
    """The directory of one process. anew: every question reads what is new; otherwise all answers are as of the last `refresh`."""

    path: Path
    cache: ColumnCache | None
    anew: bool
    outline: FollowedManifest
    status: FollowedStatus
    log: FollowedEvents
    streams: dict[Path, FollowedSegment] = field(default_factory=dict)

    @staticmethod
    def at(
        path: Path, cache: ColumnCache | None = None, anew: bool = False, most_events: int = MOST_EVENTS, most_held: int = MOST_HELD
    ) -> FollowedPart:
        log = FollowedEvents(path / EVENTS, most_events, most_held)
        return FollowedPart(path, cache, anew, FollowedManifest(path / MANIFEST), FollowedStatus(path / STATUS), log)

    def refresh(self) -> bool:
        """Read what is new; whether there is more than one call reads."""
        more = self._refresh_log() | self._refresh_streams()
        self.outline.refresh()
        self._refresh_status()
        self._check_widths()
        return more

    def _refresh_log(self) -> bool:
        if os.path.lexists(self.log.path):
            self.log.refresh()
        return self.log.more

    def _refresh_streams(self) -> bool:
        segments = self.segments
        for gone in self.streams.keys() - set(segments):
            self.streams.pop(gone).forget()
        for new in [path for path in segments if path not in self.streams]:
            self.streams[new] = FollowedSegment(new, self.cache, self._implied)
        left = messages.BYTES_AT_ONCE  # for all of them together
        for stream in self.streams.values():
            stream.refresh(left)
            left = stream.left
            if left <= 0:
                return True
        return False

    def _refresh_status(self) -> None:
        try:
            self.status.refresh()
        except InputError:  # what it would say, the lock and the events say in part
            self.status.content = None

    def _read_streams(self) -> None:
        while self.anew and self._refresh_streams():
            pass

    def _implied(self) -> pa.Schema | None:
        """The schema by the manifest."""
        self.outline.refresh()
        return None if self.outline.content is None else schema(self.outline.content["layers"])

    def _check_widths(self) -> None:
        layers = len(self.manifest["layers"])
        for stream in self.streams.values():
            for place in stream.lists():
                if place.width != layers:
                    raise InputError(f"{MANIFEST} has {layers} layers, {stream.path.name} has {place.width}")

    @property
    def segments(self) -> list[Path]:
        return sorted(self.path.glob(SEGMENTS), key=segment_number)

    @property
    def manifest(self) -> dict[str, Any]:
        if self.anew:
            self.outline.refresh()
        if self.outline.content is None:
            return {"layers": [{"name": name} for name in self.named_layers()]}
        return self.outline.content

    def events(self) -> list[dict[str, Any]]:
        """Every complete line of events.jsonl that is one."""
        while self.anew and self._refresh_log():
            pass
        return self.log.events

    def table(self, columns: Sequence[str] | None = None) -> pa.Table | None:
        """All rows. A restart from an earlier checkpoint repeats steps: the later segment's rows are kept.

        What a segment of an older version lacks is NaN.
        """
        self._read_streams()
        self._check_widths()
        whole = self._schema()
        names = chosen(whole, columns) if columns is not None and whole.names else whole.names
        tables: list[pa.Table] = []
        first: int | None = None  # step of the segments after the one at hand
        for segment in sorted(self.streams, key=segment_number, reverse=True):
            stream = self.streams[segment]
            if stream.schema is None:
                continue
            wanted = pa.schema([whole.field(name) for name in names], whole.metadata)
            rows = filled(stream.table([name for name in names if name in stream.schema.names]), wanted)
            if first is not None and len(rows) and rows["step"][-1].as_py() >= first:
                rows = rows.slice(0, int(np.searchsorted(rows["step"].to_numpy(), first)))
            if len(rows):
                first = rows["step"][0].as_py()
            tables.append(rows)
        return pa.concat_tables(reversed(tables)) if tables else None

    def _schema(self) -> pa.Schema:
        """The columns of all segments, as the newest that has them has them."""
        fields: dict[str, pa.Field] = {}
        newest_first = sorted(self.streams, key=segment_number, reverse=True)
        schemas = [found for segment in newest_first if (found := self.streams[segment].schema) is not None]
        for column in (column for found in schemas for column in found):
            known = fields.setdefault(column.name, column).type
            if known != column.type:
                raise InputError(f"the segments of {self.path} have different columns: {column.name} is {known} and {column.type}")
        return pa.schema(list(fields.values()), schemas[0].metadata if schemas else None)

    def columns(self) -> list[str]:
        """Those that some segment has: what others lack is NaN."""
        self._read_streams()
        return list(self._schema().names)

    def edge(self, name: str, last: bool = True) -> np.ndarray | None:
        """The newest row of a column, or the oldest."""
        self._read_streams()
        paths = sorted(self.streams, key=segment_number, reverse=last)
        found = (self.streams[path].edge(name, last) for path in paths)
        return next((value for value in found if value is not None), None)

    @property
    def held(self) -> int:
        """About how many bytes its manifest and its events take."""
        return self.outline.held + self.log.held

    @property
    def count(self) -> int:
        """Rows in all segments, repeated steps included."""
        return sum(stream.rows for stream in self.streams.values())

    def named_layers(self) -> list[str]:
        """The layers that the newest segment names, for a directory without a manifest that can be read."""
        self._read_streams()
        for path in sorted(self.streams, key=segment_number, reverse=True):
            found = self.streams[path].schema
            try:
                names = json.loads((found.metadata or {}).get(b"layers", b"[]")) if found is not None else []
            except (ValueError, RecursionError):
                continue
            if names and isinstance(names, list):
                return list(map(str, names))
        return []

    def life(self) -> Life:
        """How it goes, or how it ended, and its last step: the one in its status, or on record after that."""
        if self.anew:
            self._refresh_status()
        held = is_being_written(self.path)
        found = judged(self.status.content, self.events(), held, self._written())
        step = self.edge("step")
        newest = max(map(segment_number, self.streams), default=0)
        if step is None or (self.status.content is not None and self.status.content.get("segment") != newest):
            return found
        return Life(found.state, max(int(step[0]), found.step or 0), found.error)

    def _written(self) -> float:
        """When something was last written, for runs without a status."""
        files = [self.log.path, *self.segments]
        return max((path.lstat().st_mtime for path in files if os.path.lexists(path)), default=0.0)

    def damage(self) -> list[Damage]:
        """What was skipped. The end of a stream that is not being written counts, too."""
        self._read_streams()
        streams = [self.streams[path] for path in sorted(self.streams, key=segment_number)]
        cut = [stream.cut for stream in (streams if self.life().state != "running" else streams[:-1])]
        return [*(damage for stream in streams for damage in stream.damage), *filter(None, cut)]

    def notes(self) -> list[str]:
        """What a reader must know of how complete it is."""
        said = [str(damage) for damage in self.damage()]
        if self.status.content is not None and self.status.content.get("recording"):
            said.append(f"the recording ended before the training: {str(self.status.content['recording'])[:200]}")
        unchecked = sum(stream.unchecked for stream in self.streams.values())
        if unchecked:
            said.append(f"{unchecked:,} rows have no checksum: damage among their numbers would not be noticed")
        if self.log.unread:
            said.append(f"{self.log.unread:,} lines of {EVENTS} are not shown: damaged, or too many")
        return said
