"""`ns.load_run`: a run as a pyarrow table, finished, still being written, or cut off by `kill -9`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import RenderableType

from normscope.core.errors import InputError
from normscope.core.rendering import Rendered
from normscope.recorder.columns import matrix
from normscope.recorder.sharding import MERGED, merge_ranks
from normscope.recorder.store import EVENTS, MANIFEST, SEGMENTS, segment_number

LIFE = ("started", "closed")  # the events that say whether a run is being written
INCOMPLETE = (EOFError, OSError, pa.ArrowInvalid)  # what pyarrow says of a message that is not all there


def load_run(path: str | Path) -> Run:
    """The run in a directory that `ns.watch` wrote, or is writing.

    load_run(path).table() is a pyarrow table, one row a sampled step; .table().to_pandas() a pandas frame.
    """
    path = Path(path)
    ranks = sorted(path.glob("rank-*"), key=lambda rank: int(rank.name.removeprefix("rank-")))
    if not path.is_dir() or not (ranks or (path / MANIFEST).exists() or (path / EVENTS).exists()):
        raise InputError(f"no run in {path}: pass the directory given to ns.watch(run=…)")
    return Run(path, tuple(Part(rank) for rank in ranks) or (Part(path),))


@dataclass(frozen=True)
class Part:
    """What one process wrote."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return {"layers": []}
        except ValueError as error:
            raise InputError(f"{self.path / MANIFEST} is not JSON: restore it, or choose another run=") from error
        return content

    @property
    def segments(self) -> list[Path]:
        return sorted(self.path.glob(SEGMENTS), key=segment_number)

    def events(self) -> list[dict[str, Any]]:
        """Every complete line of events.jsonl."""
        try:
            lines = (self.path / EVENTS).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [event for line in lines if line.endswith(b"\n") and (event := parsed(line)) is not None]

    def table(self, columns: Sequence[str] | None = None) -> pa.Table | None:
        """All rows. A restart from an earlier checkpoint repeats steps: the later segment's rows are kept."""
        tables: list[pa.Table] = []
        first: int | None = None  # step of the segments after the one at hand
        for segment in reversed(self.segments):
            rows = self.rows(segment, columns)
            if rows is None:
                continue
            if first is not None and len(rows) and rows["step"][-1].as_py() >= first:
                rows = rows.slice(0, int(np.searchsorted(rows["step"].to_numpy(), first)))
            if len(rows):
                first = rows["step"][0].as_py()
            tables.append(rows)
        return pa.concat_tables(reversed(tables)) if tables else None

    def rows(self, segment: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The complete rows of one segment; None while it has no complete schema."""
        return Segment(segment).read(columns)


class Segment:
    """An Arrow IPC stream that may still grow: reads complete messages and remembers where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self.schema: pa.Schema | None = None

    def read(self, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The rows since the last call; None while the file has no complete schema."""
        batches = []
        try:
            source = pa.memory_map(str(self.path))
        except (OSError, ValueError):  # an empty file cannot be mapped
            return None
        source.seek(self.offset)
        while source.tell() < source.size():
            try:
                message = pa.ipc.read_message(source)
                if self.schema is None:
                    self.schema = pa.ipc.read_schema(message)
                else:
                    batch = pa.ipc.read_record_batch(message, self.schema)
                    batches.append(batch if columns is None else batch.select(chosen(self.schema, columns)))
            except INCOMPLETE:
                break
            self.offset = source.tell()
        if self.schema is None:
            return None
        schema = self.schema if columns is None else self.schema.empty_table().select(chosen(self.schema, columns)).schema
        return pa.Table.from_batches(batches, schema)


@dataclass(frozen=True)
class Run(Rendered):
    """A run directory. Properties read the files anew, so a live run shows what it holds now."""

    path: Path
    parts: tuple[Part, ...]

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
        """One row a sampled step. columns: only these, with `step`, which is much faster for long runs.

        Where weights are sharded over processes, sums of squares are merged, for the steps that every process recorded.
        """
        tables = [(part, table) for part in self.parts if (table := part.table(columns)) is not None]
        if not tables:
            raise InputError(f"{self.path} holds no rows yet: the first is written after the first optimizer step")
        layers = self.layers
        if len(self.parts) == 1 or not any(layer.get("sharded") for layer in layers):
            return tables[0][1]
        wanted = None if columns is None else [*dict.fromkeys([*columns, *MERGED])]
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

    def figure(self, name: str, **options: Any) -> Any:
        """A Plotly figure: of a metric a heatmap of layers against steps, of a number a line, "products" or "norm_angle"."""
        from normscope.report.runs import run_figure

        return run_figure(self, name, **options)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Notes, errors and findings of all processes, in the order of time."""
        found = [event for part in self.parts for event in part.events() if kind in (None, event["kind"])]
        return sorted(found, key=lambda event: event["time"])

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.events("finding")

    def follow(self, poll: float = 0.5, timeout: float | None = None) -> Iterator[pa.Table]:
        """Rows of the first process as they are written, until the run is closed or nothing came for `timeout` seconds."""
        part, seen = self.parts[0], time.monotonic()
        known: dict[Path, Segment] = {}
        while True:
            ended = closed(part)  # before reading: what was written until then is read below
            for path in part.segments:
                rows = known.setdefault(path, Segment(path)).read()
                if rows is not None and len(rows):
                    seen = time.monotonic()
                    yield rows
            if ended or (timeout is not None and time.monotonic() - seen > timeout):
                return
            time.sleep(poll)


def chosen(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """The columns asked for, `step` first."""
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise InputError(f"a run has no column {', '.join(missing)}: choose from {', '.join(schema.names)}")
    return ["step", *(name for name in columns if name != "step")]


def _array(column: pa.ChunkedArray) -> np.ndarray:
    return matrix(column) if pa.types.is_fixed_size_list(column.type) else column.to_numpy()


def closed(part: Part) -> bool:
    """Whether its last recording ended as it should."""
    events = [event["kind"] for event in part.events() if event["kind"] in LIFE]
    return bool(events) and events[-1] == "closed"


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line of events.jsonl, None where it is not JSON."""
    try:
        event: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event
