"""Run directories damaged at random, and what every reader must make of them: rows that were written, or an error of ours."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import normscope as ns
from normscope._watch.columns import METRICS, SCALARS, schema
from normscope._watch.exporters.tables import to_csv
from normscope._watch.lock import is_being_written
from normscope._watch.reading import followed
from normscope._watch.segments import ColumnCache
from normscope._watch.store import Writer
from normscope.dashboard.card import card
from normscope.report.run_page import COLUMNS, run_report
from normscope.report.snapshot import Snapshot
from normscope.report.summary import COLUMNS as SUMMARIZED
from normscope.report.summary import summarize

VALUES = (None, True, 3, -1.5, 10**30, "text", "nan", [], {}, [[]], [{}], {"layers": [[]]}, {"layers": "x", "affected": []})
FINDING = {
    "rule": "variance-collapse", "step": 2, "layer": "layer1", "evidence": {"affected": 1, "layers": ["layer1"]},
    "message": "the variance is close to ε", "fix": "raise it",
}  # fmt: skip
LAYERS = [{"name": f"layer{index}", "role": "weight"} for index in range(3)]
ROWS = 8
SEGMENT, CHECKSUMS = "metrics-0001.arrows", "metrics-0001.checksums"
NAMES = (SEGMENT, CHECKSUMS, "manifest.json", "events.jsonl", "status.json")
EXTREMES = (b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"\x80" * 8, b"\1\0\0\0" * 2, b"\xff\xff\xff\xff\0\0\0\0")

Files = dict[str, bytes]


def fail(error: BaseException) -> None:
    raise AssertionError(error)


def row(step: int, layers: int = len(LAYERS)) -> dict[str, Any]:
    """A row that can be told from every other."""
    metrics = {name: np.arange(layers) + step + 0.5 * i for i, name in enumerate(METRICS)}
    return {"step": step, "time": float(step), **dict.fromkeys(SCALARS, step / 8), **metrics}


def files(rows: int = ROWS, layers: int = len(LAYERS)) -> Files:
    """Those of a run that was closed."""
    named = [{"name": f"layer{index}", "role": "weight"} for index in range(layers)]
    with tempfile.TemporaryDirectory() as name:
        writer = Writer(Path(name), fail, lambda: rows)
        writer.event("started", step=0)
        writer.begin({"layers": named, "model": "Sequential", "created": 1e9}, schema(named))
        for step in range(rows):
            writer.row(row(step, layers))
        writer.event("finding", **FINDING)
        writer.event("closed", step=rows)
        writer.close()
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.name in NAMES}


def laid(path: Path, content: Files) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


# damage --------------------------------------------------------------------------------------------------------------


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.choice((1, 8, 24, 100, 1_000, 4_096)))


def _overwrite(filling: Callable[[int, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    def change(data: bytes, chance: random.Random) -> bytes:
        start, end = _span(data, chance)
        return data[:start] + filling(end - start, chance)[: end - start] + data[end:]

    return change


def _flip(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data)) if data else 0
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :] if data else data


def _move(data: bytes, chance: random.Random) -> bytes:
    (start, end), place = _span(data, chance), chance.randrange(len(data) + 1)
    return data[:place] + data[start:end] + data[place:]


def _cut_out(data: bytes, chance: random.Random) -> bytes:
    start, end = _span(data, chance)
    return data[:start] + data[end:]


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _move, _cut_out,
    _overwrite(lambda size, chance: bytes(size)),
    _overwrite(lambda size, chance: b"\xff" * size),
    _overwrite(lambda size, chance: chance.randbytes(size)),
    _overwrite(lambda size, chance: (chance.choice(EXTREMES) * (size // 8 + 1))),
    lambda data, chance: data[: chance.randrange(len(data) + 1)],
    lambda data, chance: data + chance.randbytes(chance.randrange(200)),
    lambda data, chance: chance.choice((b"", b"42\n", b"{}", b"[]\n", b"\0" * 100, b'{"layers": [{"name": "a", "replicas": "x"}]}')),
)  # fmt: skip


def _other_values(data: bytes, chance: random.Random) -> bytes:
    """Each of the objects in the lines of a file with a field of another type."""
    changed = []
    for line in data.split(b"\n"):
        try:
            found = json.loads(line)
            found[chance.choice(list(found))] = chance.choice(VALUES)
            line = json.dumps(found).encode()
        except (ValueError, TypeError, IndexError):
            pass
        changed.append(line)
    return b"\n".join(changed)


def damaged(content: Files, chance: random.Random, names: tuple[str, ...] = NAMES) -> Files:
    changed = dict(content)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([name for name in names if name in changed])
        change = _other_values if name == "events.jsonl" and chance.random() < 0.5 else chance.choice(CHANGES)
        changed[name] = change(changed[name], chance)
    return changed


def odd(path: Path, chance: random.Random) -> None:
    """One of its files is no file, or gone."""
    place = path / chance.choice(NAMES)
    place.unlink(missing_ok=True)
    made = chance.choice(("fifo", "directory", "device", "nothing"))
    if made == "fifo":
        os.mkfifo(place)
    elif made == "directory":
        place.mkdir()
    elif made == "device":
        place.symlink_to(os.devnull if chance.random() < 0.5 else "/dev/zero")


# laws ----------------------------------------------------------------------------------------------------------------


def questions(path: Path, thorough: bool, chance: random.Random) -> list[Callable[[], Any]]:
    """Everything that reads a run."""
    run, live = ns.load_run(path), followed(path, [], ColumnCache())

    def shown() -> Any:
        while live.parts[0].refresh():
            pass
        return card("a", "a", live, 0.0)

    asked = [
        run.table,
        lambda: run.arrays("loss", "angle"),
        run.events,
        lambda: run.life,
        lambda: run.notes,
        shown,
        lambda: str(run),
    ]
    report: Callable[[], Any] = lambda: run_report([Snapshot.of(run, COLUMNS)])  # noqa: E731
    summary: Callable[[], Any] = lambda: summarize(Snapshot.of(run, SUMMARIZED)).headline  # noqa: E731
    slow = [
        *([report] if chance.random() < 0.2 else []),
        summary,
        lambda: to_csv(run, path / "csv"),
        lambda: list(run.follow(timeout=0.0)),
    ]
    return [*asked, lambda: is_being_written(path), *(slow if thorough else [])]


def check_case(seed: int, whole: Files, path: Path) -> None:
    """No reader raises anything but our errors; and with a sound manifest and sound checksums, rows are right and losses are said."""
    chance = random.Random(seed)
    only_stream = seed % 3 == 0
    content = damaged(whole, chance, (SEGMENT,) if only_stream else NAMES)
    if seed % 5 == 1:  # as runs were before they had checksums and a status
        content = {name: data for name, data in content.items() if name not in (CHECKSUMS, "status.json")}
    laid(path, content)
    if not only_stream and seed % 16 < 2:
        odd(path, chance)
    try:
        asked = questions(path, seed % 25 == 0, chance)
    except ns.NormscopeError:
        return
    for question in asked:
        with suppress(ns.NormscopeError):
            question()
    if only_stream and CHECKSUMS in content:
        check_rows(path)


def check_rows(path: Path, rows: int = ROWS) -> pa.Table:
    """Every row that is read is as it was written, and those that are not are counted."""
    run = ns.load_run(path)
    try:
        table = run.table()
    except ns.InputError as error:
        assert sum(damage.rows for damage in run.damage) == rows and "that can be read" in str(error)
        return schema(run.layers).empty_table()
    assert table["step"].to_pylist() == sorted(set(table["step"].to_pylist()) & set(range(rows)))
    for found in table.to_pylist():
        assert all(np.array_equal(found[name], row(found["step"], len(run.layers))[name]) for name in METRICS), found["step"]
        assert found["loss"] == found["step"] / 8
    found = len(table) + sum(damage.rows for damage in run.damage)
    assert found == rows if all(damage.counted for damage in run.damage) else found >= rows, (len(table), run.notes)
    return table


def check_cases(first: int, count: int) -> None:
    whole = files()
    assert json.loads(whole["status.json"])["state"] == "finished"
    for seed in range(first, first + count):
        path = Path(tempfile.mkdtemp())
        try:
            check_case(seed, whole, path)
        except BaseException as error:
            raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(path)
