"""`ns.load_run`: a run as a pyarrow table, finished, still being written, cut off by `kill -9`, or damaged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from normscope._watch.checksums import Damage
from normscope._watch.columns import METRICS, SCALARS, matrix
from normscope._watch.directory import EVENTS, MANIFEST, SEGMENTS
from normscope._watch.following import FollowedPart
from normscope._watch.life import Life
from normscope._watch.segments import ColumnCache
from normscope._watch.sharding import MERGED, merge_ranks
from normscope.core.errors import InputError
from normscope.core.rendering import RenderableType
from normscope.core.result import Result
from normscope.core.text import visible
from normscope.findings.finding import Finding
from normscope.findings.over_time import Judged, last_judged, last_states

RANK = re.compile(r"rank-(\d{1,6})")
MOST_EVENTS, MOST_HELD = 200_000, 256 << 20  # of each process, and bytes that they take


def load_run(path: str | Path) -> Run:
    """The run in a directory that `ns.watch` wrote, or is writing.

    path: what was given to `ns.watch(run=…)`.

    load_run(path).table() is a pyarrow table with one row per sampled step; .table().to_pandas() makes it a pandas frame. `damage`
    lists what could not be read.
    """
    path = Path(path)
    try:
        ranks = [found for found in path.glob("rank-*") if RANK.fullmatch(found.name) and found.is_dir()]
        parts = sorted(ranks, key=lambda rank: int(rank.name.removeprefix("rank-"))) or [path]
        there = path.is_dir() and (ranks or any((path / name).exists() for name in (MANIFEST, EVENTS)) or any(path.glob(SEGMENTS)))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not there:
        raise InputError(f"no run in {path}: pass the directory given to ns.watch(run=…)")
    return Run(path, tuple(FollowedPart.at(part, None, True, MOST_EVENTS, MOST_HELD) for part in parts))


def followed(path: Path, ranks: Sequence[Path], cache: ColumnCache) -> Run:
    """A run whose parts are read by `refresh`, and then as of that moment."""
    return Run(path, tuple(FollowedPart.at(rank, cache) for rank in ranks or (path,)))


@dataclass(frozen=True, repr=False)
class Run(Result):
    """A run directory. Properties read the files anew, so a live run shows what it holds now."""

    schema = "normscope.run_summary/1"

    path: Path
    parts: tuple[FollowedPart, ...]

    def __repr__(self) -> str:
        return f"<Run: {visible(self.name)}>"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def manifest(self) -> dict[str, Any]:
        """Configuration, layers and versions, as the first process wrote them."""
        return self.parts[0].manifest

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Rows of the layer table: name, kind, role, parameter, shape, normalizer, …, in the order of every list column."""
        layers: list[dict[str, Any]] = self.manifest["layers"]
        return layers

    @property
    def layer_names(self) -> list[str]:
        return [layer["name"] for layer in self.layers]

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per sampled step. columns: only these, with `step`, which is much faster for long runs.

        Where weights are sharded over processes, sums of squares are merged, for the steps that every process recorded.
        """
        tables = [(part, table) for part in self.parts if (table := part.table(columns)) is not None]
        if not tables:
            damage = next(iter(self.damage), None)
            why = "yet: the first is written after the first optimizer step" if damage is None else f"that can be read: {damage}"
            raise InputError(f"{self.path} holds no rows {why}")
        layers = self.layers
        if len(self.parts) == 1 or not any(layer.get("sharded") for layer in layers):
            return tables[0][1]
        wanted = None if columns is None else [*dict.fromkeys([*columns, *MERGED])]
        if any(len(part.manifest["layers"]) != len(layers) for part, _ in tables):
            raise InputError(f"the processes of {self.path} recorded different layers: read each with ns.load_run(… / 'rank-0')")
        return merge_ranks([part.table(wanted) for part, _ in tables], layers).select(tables[0][1].column_names)

    def matrix(self, metric: str) -> np.ndarray:
        """A metric as an array (sampled steps, layers)."""
        return matrix(self.table([metric])[metric])

    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        """`step` and these columns, read at once: (sampled steps,) for a number, (sampled steps, layers) for a metric."""
        table = self.table(columns)
        return {name: _array(table[name]) for name in table.column_names}

    def render(self) -> RenderableType:
        """The run in words: how far it is, what is not fine and what is."""
        from normscope.report.summary import rendered_run

        return rendered_run(self)

    def to_dict(self) -> dict[str, Any]:
        """What its report says, as of now: how far it is, its findings, what is fine. The rows themselves are `table()`."""
        from normscope.report.summary import described_run

        return {"schema": self.schema, "path": str(self.path.absolute()), **described_run(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Run:
        """The run in the directory that `to_dict` named, as it is now."""
        return load_run(content["path"])

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """Heatmaps of layers against steps, one per metric, a line per number, "products" and "norm_angle"; none without rows."""
        from normscope.report.runs import run_figure

        if self._last_row is None:
            return {}
        return {name: partial(run_figure, self, name) for name in (*METRICS, *SCALARS, "products", "norm_angle")}

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Notes, errors and findings of all processes, in the order of time; of one process in the order of writing."""
        found = []
        for part in self.parts:
            events = part.events()
            times = accumulate((event["time"] for event in events), max)  # a clock may go backwards
            found += list(zip(times, events, strict=True))
        return [event for _, event in sorted(found, key=lambda pair: pair[0]) if kind in (None, event["kind"])]

    @property
    def life(self) -> Life:
        """How it goes, or how it ended: state, last step and error."""
        return Life.together([part.life() for part in self.parts])

    @property
    def status(self) -> str:
        """running, finished, failed, interrupted or killed."""
        return self.life.state

    @property
    def damage(self) -> list[Damage]:
        """What was skipped because it is damaged: file, place, bytes and rows."""
        return [damage for part in self.parts for damage in part.damage()]

    @property
    def notes(self) -> list[str]:
        """What a reader must know of how complete the run is, in words; nothing if it is whole."""
        named = len(self.parts) > 1
        return [f"{part.path.name}: {note}" if named else note for part in self.parts for note in part.notes()]

    @property
    def columns(self) -> list[str]:
        """The columns that every part of it has."""
        first, *others = (part.columns() for part in self.parts)
        return [name for name in first if all(name in other for other in others)]

    @property
    def findings(self) -> list[Finding]:
        """Early warnings, each rule and layer once: since when it holds, or until when it did."""
        return last_states(self.events("finding"), self._last_row)

    @property
    def judged(self) -> dict[str, Judged]:
        """By rule of a training: in how many steps of the last recording it judged, up to which one, and how many layers."""
        return last_judged(self.events())

    @property
    def _last_row(self) -> int | None:
        """The last step on record."""
        edges = [edge for part in self.parts if (edge := part.edge("step")) is not None]
        return max((int(edge[0]) for edge in edges), default=None)

    def follow(self, poll: float = 0.5, timeout: float | None = None) -> Iterator[pa.Table]:
        """Rows of the first process as they are written, until the run is closed or nothing came for `timeout` seconds."""
        part, seen = FollowedPart.at(self.parts[0].path), time.monotonic()
        known: dict[Path, int] = {}
        while True:
            ended = part.life().state != "running"  # before reading: what was written until then is read below
            while part.refresh():
                pass
            for path, stream in part.streams.items():
                first = min(known.get(path, 0), stream.rows)
                if (rows := stream.table(first=first)) is not None and len(rows):
                    known[path], seen = stream.rows, time.monotonic()
                    yield rows
            if ended or (timeout is not None and time.monotonic() - seen > timeout):
                return
            time.sleep(poll)


def _array(column: pa.ChunkedArray) -> np.ndarray:
    return matrix(column) if pa.types.is_fixed_size_list(column.type) else column.to_numpy()
