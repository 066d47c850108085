"""A followed run reads the same as `load_run`, whatever was written since; only what is new is read; nothing it meets can harm."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import normscope as ns
from normscope._watch.columns import METRICS, record_batch, schema
from normscope._watch.following import FollowedPart
from normscope._watch.growing import MOST_HELD, MOST_LINE, MOST_MANIFEST, parsed
from normscope._watch.layout import batch_layout, places
from normscope._watch.reading import Run, followed
from normscope._watch.segments import ColumnCache, FollowedSegment
from tests.watch.test_store import LAYERS, row, written

COLUMNS = ["loss", "spectral_norm", "angle"]


def refreshed(path: Path, cache: ColumnCache | None = None) -> Run:
    run = followed(path, [], cache or ColumnCache())
    refresh(run)
    return run


def refresh(run: Run) -> None:
    for part in run.parts:
        while part.refresh():
            pass


def stream(*sizes: int, layers: list[dict[str, Any]] = LAYERS) -> bytes:
    """A schema and batches of these many rows, as the writer makes them, with the steps counted through."""
    kind, content, step = schema(layers), bytes(schema(layers).serialize()), 0
    for size in sizes:
        content += bytes(batch([row(step + i, len(layers)) for i in range(size)], kind).serialize())
        step += size
    return content


def batch(rows: list[dict[str, Any]], kind: pa.Schema) -> pa.RecordBatch:
    return record_batch(rows, kind) if rows else pa.record_batch([pa.array([], field.type) for field in kind], schema=kind)


def laid(path: Path, content: bytes) -> Path:
    """A run directory with one segment."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({"layers": LAYERS}))
    (path / "metrics-0001.arrows").write_bytes(content)
    return path


# the same ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_same_as_load_run_while_it_grows(sizes: list[int], random: Any) -> None:
    """The file is cut at random bytes, as a reader may meet it; after every cut both readers have the same rows."""
    import tempfile

    content = stream(*sizes)
    with tempfile.TemporaryDirectory() as name:
        path = laid(Path(name), b"")
        run = refreshed(path)
        for cut in sorted(random.randrange(len(content) + 1) for _ in range(6)):
            (path / "metrics-0001.arrows").write_bytes(content[:cut])
            refresh(run)
            expected, found = ns.load_run(path).parts[0].table(COLUMNS), run.parts[0].table(COLUMNS)
            assert (expected is None) == (found is None)
            assert found is None or found.equals(expected)


def test_all_columns_and_restarts_that_repeat_steps(tmp_path: Path) -> None:
    written(tmp_path, range(10))
    written(tmp_path, range(6, 14))
    run, expected = refreshed(tmp_path), ns.load_run(tmp_path)
    assert run.table().combine_chunks().equals(expected.table().combine_chunks())
    for metric in METRICS:
        np.testing.assert_array_equal(run.matrix(metric), expected.matrix(metric))


def test_a_part_knows_its_first_and_last_row(tmp_path: Path) -> None:
    part = refreshed(laid(tmp_path, stream(3, 1, 1, 4))).parts[0]
    assert part.count == 9
    first, last = part.edge("step", last=False), part.edge("step")
    assert first is not None and first[0] == 0 and last is not None and last[0] == 8
    metric = part.edge("angle")
    assert metric is not None and np.array_equal(metric, row(8)["angle"].astype(np.float32))
    assert part.edge("nonsense") is None


def test_a_run_without_layers(tmp_path: Path) -> None:
    path = laid(tmp_path, stream(2, 3, layers=[]))
    (path / "manifest.json").write_text('{"layers": []}')
    assert refreshed(path).matrix("angle").shape == ns.load_run(path).matrix("angle").shape == (5, 0)


def test_shards_of_several_processes_are_merged(tmp_path: Path) -> None:
    layers = [{**layer, "sharded": True, "replicas": 1} for layer in LAYERS]
    for rank in (0, 1):
        laid(tmp_path / f"rank-{rank}", stream(2, 3))
        (tmp_path / f"rank-{rank}" / "manifest.json").write_text(json.dumps({"layers": layers}))
    run = followed(tmp_path, [tmp_path / "rank-0", tmp_path / "rank-1"], ColumnCache())
    refresh(run)
    whole, one = ns.load_run(tmp_path), refreshed(tmp_path / "rank-0")
    for metric in ("frobenius_norm", "update_ratio", "spectral_norm", "gamma_min"):
        np.testing.assert_array_equal(run.matrix(metric), whole.matrix(metric))
    np.testing.assert_allclose(run.matrix("frobenius_norm"), np.sqrt(2) * one.matrix("frobenius_norm"), rtol=1e-6)


def test_layouts_agree_with_arrow() -> None:
    """A column cut out of a message by its place is the column that pyarrow decodes."""
    kind = schema(LAYERS)
    for size in (0, 1, 2, 63):
        message = bytes(batch([row(step) for step in range(size)], kind).serialize())
        decoded = pa.ipc.read_record_batch(pa.ipc.read_message(message), kind)
        layout = batch_layout(message[: len(message) - pa.ipc.read_message(message).body.size])
        assert (layout.rows, layout.size) == (size, len(message))
        for name, place in places(kind).items():
            start, _ = layout.buffers[place.buffer]
            values = np.frombuffer(message, place.dtype, size * place.width, start)
            column = decoded[name].flatten() if place.width > 1 else decoded[name]
            assert np.array_equal(values, column.to_numpy())


# only what is new ----------------------------------------------------------------------------------------------------


def test_only_new_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = stream(*[1] * 300)
    size = len(stream(1)) - len(stream())
    run = refreshed(laid(tmp_path, content[: -3 * size]))
    run.matrix("spectral_norm")
    amounts: list[int] = []
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda *a: (amounts.append(len(got := pread(*a))), got)[1])
    monkeypatch.setattr(os, "preadv", lambda *a: (amounts.append(got := preadv(*a)), got)[1])
    (tmp_path / "metrics-0001.arrows").write_bytes(content)
    refresh(run)
    assert run.matrix("spectral_norm").shape == (300, len(LAYERS))
    assert len(amounts) < 25 and sum(amounts) < 10 * size  # headers, and two columns of three rows, of 300
    amounts.clear()
    refresh(run)
    run.matrix("spectral_norm")
    assert sum(amounts) == 0


def test_a_view_stays_as_it_was_while_its_column_grows(tmp_path: Path) -> None:
    content = stream(*[2] * 20)
    run = refreshed(laid(tmp_path, content[: len(stream(*[2] * 10))]))
    part = run.parts[0]
    (segment,) = part.streams.values()
    before = segment.column("angle")
    copy = before.copy()
    (tmp_path / "metrics-0001.arrows").write_bytes(content)
    refresh(run)
    assert len(segment.column("angle")) == 40 and np.array_equal(before, copy)


def test_the_cache_keeps_within_its_limit(tmp_path: Path) -> None:
    cache = ColumnCache(limit=20_000)
    run = refreshed(laid(tmp_path, stream(*[50] * 10)), cache)
    for metric in METRICS:
        assert np.array_equal(run.matrix(metric), ns.load_run(tmp_path).matrix(metric))
        assert cache.bytes <= cache.limit
    run = refreshed(laid(tmp_path / "b", stream(*[50] * 30)), cache)
    with pytest.raises(ns.InputError, match="too much to show"):
        run.matrix("angle")


def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    run = refreshed(laid(tmp_path, stream(5, 5)))
    assert len(run.matrix("angle")) == 10
    (tmp_path / "metrics-0001.arrows").write_bytes(stream(3))
    refresh(run)
    assert len(run.matrix("angle")) == 3
    other = tmp_path / "other"
    other.write_bytes(stream(7, 7, 7))
    other.replace(tmp_path / "metrics-0001.arrows")
    refresh(run)
    assert len(run.matrix("angle")) == 21


# harmless ------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_stream_gives_rows_or_an_input_error(data: st.DataObject) -> None:
    import tempfile

    content = bytearray(stream(2, 2, 1))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as name:
        path = laid(Path(name), bytes(content))
        try:
            table = refreshed(path).parts[0].table(COLUMNS)
        except ns.InputError:
            return
        assert table is None or len(table) <= 5 + len(content)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_header_gives_a_layout_inside_its_message_or_an_input_error(data: st.DataObject) -> None:
    """Eight bytes at a time, so that lengths and offsets become huge or negative."""
    message = bytearray(record_batch([row(0)], schema(LAYERS)).serialize())
    header = message[: len(message) - pa.ipc.read_message(bytes(message)).body.size]
    place = data.draw(st.integers(8, len(header) - 8))
    header[place : place + 8] = data.draw(
        st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"\x80" * 8, b"\1\0\0\0" * 2])
    )
    try:
        layout = batch_layout(bytes(header))
    except ns.InputError:
        return
    assert all(0 <= start <= start + length <= layout.size for start, length in layout.buffers) and layout.rows >= 0


def test_compressed_batches_are_refused_unread(tmp_path: Path) -> None:
    """A few kilobytes of zeros can stand for any number of gigabytes."""
    kind = schema(LAYERS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kind, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(record_batch([row(step) for step in range(500)], kind))
    (damage,) = refreshed(laid(tmp_path, sink.getvalue().to_pybytes())).damage
    assert "not compressed" in damage.why


@pytest.mark.parametrize("column", ["loss", "spectral_norm"])
def test_batches_with_nulls_are_refused_unread(column: str, tmp_path: Path) -> None:
    """What lies below a null is any number; a run has NaN."""
    kind = schema(LAYERS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, kind) as writer:
        for step in range(3):
            batch = record_batch([row(step)], kind)
            null = pa.nulls(1, kind.field(column).type)
            writer.write_batch(batch.set_column(kind.get_field_index(column), kind.field(column), null) if step == 1 else batch)
    found = refreshed(laid(tmp_path, sink.getvalue().to_pybytes()))
    (damage,) = found.damage
    assert "nulls" in damage.why and found.table(["loss"])["step"].to_pylist() == [0, 2]


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.float32()), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_columns_that_no_run_has_are_refused(kind: pa.DataType, tmp_path: Path) -> None:
    with pytest.raises(ns.InputError, match="not a run's stream"):
        refreshed(laid(tmp_path, bytes(pa.schema([("step", pa.int64()), ("x", kind)]).serialize())))


def test_other_layers_than_the_manifest_says_are_refused(tmp_path: Path) -> None:
    path = laid(tmp_path, stream(2))
    (path / "manifest.json").write_text(json.dumps({"layers": LAYERS[:-1]}))
    with pytest.raises(ns.InputError, match="has 6 layers"):
        refreshed(path)


MANIFESTS: dict[str, tuple[bytes, str]] = {
    "nonsense": (b"{nonsense", "not JSON"),
    "deep": (b"[" * 200_000 + b"]" * 200_000, "not JSON"),
    "other encoding": (b'{"layers": [{"name": "\xff\xfe"}]}', "not JSON"),
    "huge number": (b'{"layers": [], "n": ' + b"9" * 10_000 + b"}", "not JSON"),
    "empty": (b"", "not JSON"),
    "list": (b"[1, 2]", "is not a run's"),
    "no layers": (b'{"layers": {"a": 1}}', "is not a run's"),
    "layers without names": (b'{"layers": [{"name": 3}]}', "is not a run's"),
    "long name": (b'{"layers": [{"name": "' + b"x" * 5_000 + b'"}]}', "is not a run's"),
    "huge": (b'{"layers": []' + b" " * MOST_MANIFEST + b"}", "more than a run's file may have"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_none_is_an_input_error(case: str, tmp_path: Path) -> None:
    content, message = MANIFESTS[case]
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ns.InputError, match=message):
        refreshed(tmp_path)


def test_lines_that_are_no_events_are_counted_not_shown(tmp_path: Path) -> None:
    lines = [
        b'{"kind": "note", "time": 1, "message": "fine"}',
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": 3, "time": 1}',
        b'"text"',
        b"",
    ]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines) + b'\n{"kind": "torn"')
    part = refreshed(tmp_path).parts[0]
    assert [event["message"] for event in part.events()] == ["fine"] and part.log.unread == 5


def test_the_end_of_a_run_is_known_however_much_it_said(tmp_path: Path) -> None:
    kinds = ["started", "note", "note", "note", "note", "closed"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"kind": kind, "time": 1}) + "\n" for kind in kinds))
    part = FollowedPart.at(tmp_path, most_events=3)
    part.refresh()
    assert (
        [event["kind"] for event in part.events()] == ["started", "note", "closed"]
        and part.log.unread == 3
        and part.life().state == "finished"
    )


def test_events_take_a_limited_part_of_memory(tmp_path: Path) -> None:
    """However much of it their form takes: a list of empty lists takes 25 times its text."""
    nested = [[[]] * 15_000, [{}] * 15_000, [{"a": 1}] * 5_000, list(range(10_000)), "x" * 60_000]
    for value in nested:
        with (tmp_path / "events.jsonl").open("w") as file:
            for _ in range(150):
                file.write(json.dumps({"kind": "note", "time": 1, "a": value}) + "\n")
            file.write('{"kind": "closed", "time": 1}\n')
        tracemalloc.start()
        part = refreshed(tmp_path).parts[0]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < 2 * MOST_HELD and part.life().state == "finished" and len(part.events()) + part.log.unread == 151


@pytest.mark.parametrize(
    "field",
    [
        *({"layer": value} for value in ([], {}, 3, True)), *({"step": value} for value in ("now", [], 1.5, True, 10**400, 1 << 62)),
        *({name: value} for name in ("rule", "message", "fix") for value in ([], {}, 3, None)), {"time": 1e300}, {"time": None},
        *({"evidence": value} for value in ([], "a", None, {"layers": 3}, {"layers": [[]]}, {"layers": [{}]}, {"affected": "x"})),
    ],
)  # fmt: skip
def test_an_event_whose_known_fields_are_of_other_types_is_none(field: dict[str, Any]) -> None:
    event = {
        "kind": "finding", "time": 1.0, "rule": "a", "layer": "b", "step": 3, "message": "c", "fix": "d",
        "evidence": {"layers": ["b"], "affected": 1, "x": [{}]},
    }  # fmt: skip
    assert parsed(json.dumps(event).encode()) == event and parsed(json.dumps({**event, "layer": None}).encode()) is not None
    assert parsed(json.dumps({**event, **field}).encode()) is None


def test_an_endless_line_is_counted_and_what_follows_is_read(tmp_path: Path) -> None:
    fine = b'{"kind": "note", "time": 1}\n'
    with (tmp_path / "events.jsonl").open("wb", buffering=0) as file:
        file.write(fine + b"x" * (MOST_LINE + 1))
        run = refreshed(tmp_path)
        for more in (b"y" * (MOST_LINE + 2), b"z\n" + fine, b"w" * (MOST_LINE + 1) + b"\n" + fine):
            file.write(more)
            refresh(run)
    assert len(run.events()) == 3 and run.parts[0].log.unread == 2
    assert len(ns.load_run(tmp_path).events()) == 3


@pytest.mark.parametrize("name", ["manifest.json", "events.jsonl", "metrics-0001.arrows"])
@pytest.mark.parametrize("kind", ["fifo", "link", "device link", "directory", "broken link"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"layers": [], "secret": 1}')
    run = tmp_path / "run"
    run.mkdir()
    make = {
        "fifo": os.mkfifo, "directory": os.mkdir, "link": lambda path: os.symlink(secret, path),
        "device link": lambda path: os.symlink("/dev/zero", path), "broken link": lambda path: os.symlink("nowhere", path),
    }  # fmt: skip
    make[kind](run / name)
    with pytest.raises(ns.InputError, match="not a regular file"):
        refreshed(run)


def test_a_sparse_file_costs_nothing(tmp_path: Path) -> None:
    path = laid(tmp_path, stream(2))
    with (path / "metrics-0001.arrows").open("ab") as file:
        file.truncate(1 << 40)
    run = refreshed(path)
    assert len(run.matrix("angle")) == 2 and run.damage[0].bytes == (1 << 40) - len(stream(2))


def test_many_messages_are_read_in_several_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope._watch.messages.BYTES_AT_ONCE", 10_000)
    path = laid(tmp_path, stream(*[1, 2] * 10))
    segment = FollowedSegment(path / "metrics-0001.arrows", ColumnCache())
    turns = 0
    while turns == 0 or segment.more:
        segment.refresh()
        turns += 1
    assert turns > 2 and segment.rows == 30
    assert np.array_equal(segment.column("step"), np.arange(30))
