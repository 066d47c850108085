"""A damaged run is read as far as it is sound: every row that is read is right, and what is lost is counted and said."""

from __future__ import annotations

import multiprocessing
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import normscope as ns
from normscope._watch import messages
from normscope._watch.checksums import SIZE
from normscope._watch.columns import matrix
from normscope._watch.layout import PREFIX, batch_layout, metadata_size
from normscope._watch.reading import followed
from normscope._watch.segments import ColumnCache
from normscope.report.run_page import COLUMNS, run_report
from normscope.report.snapshot import Snapshot
from tests.watch.fuzzing import CHECKSUMS, SEGMENT, Files, check_cases, check_rows, files, laid

ROWS = 200


@pytest.fixture(scope="module")
def whole() -> Files:
    return files(ROWS)


def without_checksums(content: Files) -> Files:
    """As runs were before they had checksums and a status."""
    return {name: data for name, data in content.items() if name not in (CHECKSUMS, "status.json")}


def ends(content: Files) -> list[int]:
    """Where each message of the stream ends, by Arrow's own reader."""
    source, found = pa.BufferReader(content[SEGMENT]), []
    for _ in range(1 + ROWS):
        pa.ipc.read_message(source)
        found.append(source.tell())
    return found


def with_block(content: Files, start: int, block: bytes) -> Files:
    stream = content[SEGMENT]
    return {**content, SEGMENT: stream[:start] + block + stream[start + len(block) :]}


@pytest.mark.quick(2)
@pytest.mark.parametrize("filling", [b"\0", b"\xff", b"\x55"])
@pytest.mark.parametrize("checked", [True, False])
def test_all_outside_of_a_damaged_block_is_read_and_the_loss_is_said(
    filling: bytes, checked: bool, whole: Files, tmp_path: Path
) -> None:
    places = ends(whole)
    content = whole if checked else without_checksums(whole)
    for start in (places[90] - 100, places[150], places[0]):
        path = laid(tmp_path, with_block(content, start, filling * 4096))
        hit = {step for step in range(ROWS) if places[step] < start + 4096 and places[step + 1] > start}
        run = ns.load_run(path)
        steps = run.table(["loss"])["step"].to_pylist()
        if checked:
            assert steps == [step for step in range(ROWS) if step not in hit]
            check_rows(path, ROWS)
        else:  # a block that begins and ends among numbers leaves headers as they are; that needs a checksum to be seen
            assert set(range(ROWS)) - hit <= set(steps) and "have no checksum" in " ".join(run.notes)
        (damage,) = run.damage
        assert 1 <= damage.rows <= len(hit) and damage.counted == checked and damage.bytes >= 1000
        said = str(damage)
        assert SEGMENT in said and f"{damage.rows} row" in said and said in run.notes
    assert said in " ".join(str(run).split())
    if checked and filling == b"\0":
        assert said in run_report([Snapshot.of(run, COLUMNS)])


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    content = files(3)
    stream = content[SEGMENT]
    for place in range(0, len(stream) - 8, 397):
        changed = bytearray(stream)
        changed[place] ^= 1 << place % 8
        laid(tmp_path, {**content, SEGMENT: bytes(changed)})
        check_rows(tmp_path, 3)
        assert len(ns.load_run(tmp_path).damage) == 1, place


def test_a_damaged_schema_is_replaced_by_what_the_manifest_implies(whole: Files, tmp_path: Path) -> None:
    for content in (whole, without_checksums(whole)):
        path = laid(tmp_path / str(len(content)), with_block(content, 100, b"\x55" * 64))
        assert ns.load_run(path).table()["step"].to_pylist() == list(range(ROWS)) and ns.load_run(path).damage[0].rows == 0
        (path / "manifest.json").unlink()
        with pytest.raises(ns.InputError):
            ns.load_run(path).table()


def test_damage_of_the_checksums_alone_loses_no_row(whole: Files, tmp_path: Path) -> None:
    records = whole[CHECKSUMS]
    assert len(records) == SIZE * (1 + ROWS)
    for changed in (records[: 30 * SIZE], b"\0" * 100 + records[100:], records[:50] + b"!" + records[51:], b"", records[5:]):
        path = laid(tmp_path, {**whole, CHECKSUMS: changed})
        table = ns.load_run(path).table()
        assert table["step"].to_pylist() == list(range(ROWS)) and not ns.load_run(path).damage
        assert "have no checksum" in " ".join(ns.load_run(path).notes)


@pytest.mark.parametrize("kept", [0, 1, 57, 199])
def test_rows_that_were_cut_off_are_counted(kept: int, whole: Files, tmp_path: Path) -> None:
    end = ends(whole)[kept]
    path = laid(tmp_path, {**whole, SEGMENT: whole[SEGMENT][: end + 11]})
    run = ns.load_run(path)
    assert run.table(["loss"])["step"].to_pylist() == list(range(kept))
    assert sum(damage.rows for damage in run.damage) == ROWS - kept


def test_streams_stay_plain_arrow(whole: Files, tmp_path: Path) -> None:
    laid(tmp_path, whole)
    with pa.ipc.open_stream(tmp_path / SEGMENT) as stream:
        assert stream.read_all().equals(ns.load_run(tmp_path).table().combine_chunks())


def test_a_file_that_is_cut_while_it_is_open_is_an_error_of_ours(whole: Files, tmp_path: Path) -> None:
    """A memory map would kill the process."""
    run = ns.load_run(laid(tmp_path, whole))
    (stream,) = (part.streams[tmp_path / SEGMENT] for part in run.parts if part.table(["loss"]) is not None)
    os.truncate(tmp_path / SEGMENT, 8_000)  # behind the schema, within the first row
    with pytest.raises(ns.InputError, match="was truncated"):
        stream.table()
    assert run.table()["step"].to_pylist() == []


@pytest.mark.parametrize("name", ["manifest.json", "events.jsonl", SEGMENT, CHECKSUMS])
@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "link"])
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    path = laid(tmp_path / "run", files(2))
    (path / name).rename(tmp_path / "aside")
    make: dict[str, Any] = {
        "fifo": os.mkfifo, "directory": os.mkdir, "device": lambda place: os.symlink("/dev/zero", place),
        "link": lambda place: os.symlink(tmp_path / "aside", place),
    }  # fmt: skip
    make[kind](path / name)
    with pytest.raises(ns.InputError, match="is not a regular file") as caught:
        run = ns.load_run(path)
        run.events(), run.table()
    assert "\n" not in str(caught.value)


def test_one_line_that_is_no_event_does_not_fail_a_report(tmp_path: Path) -> None:
    content = files(2)
    path = laid(tmp_path, {**content, "events.jsonl": b'42\n"x"\nnull\n{"kind": "note"}\n' + content["events.jsonl"]})
    run = ns.load_run(path)
    assert [event["kind"] for event in run.events()] == ["started", "finding", "closed"]
    assert re.search(r"4 lines of events.jsonl", run_report([Snapshot.of(run, COLUMNS)]))


def test_what_a_segment_lacks_is_nan(tmp_path: Path) -> None:
    path = laid(tmp_path, files(2))
    fewer = pa.schema([("step", pa.int64()), ("loss", pa.float64())])
    (path / "metrics-0002.arrows").write_bytes(
        bytes(fewer.serialize()) + bytes(pa.record_batch([[5], [1.0]], schema=fewer).serialize())
    )
    assert ns.load_run(path).table(["loss"])["step"].to_pylist() == [0, 1, 5]
    table = ns.load_run(path).table()
    assert table["step"].to_pylist() == [0, 1, 5] and table["loss"].null_count == 0
    lists = [name for name in table.column_names if pa.types.is_fixed_size_list(table[name].type)]
    assert lists and all(np.isnan(matrix(table[name])[-1]).all() for name in lists)


def test_columns_of_two_types_are_an_error_of_ours(tmp_path: Path) -> None:
    path = laid(tmp_path, files(2))
    other = pa.schema([("step", pa.int64()), ("loss", pa.int64())])
    (path / "metrics-0002.arrows").write_bytes(
        bytes(other.serialize()) + bytes(pa.record_batch([[5], [1]], schema=other).serialize())
    )
    with pytest.raises(ns.InputError, match="different columns: loss is int64 and double"):
        ns.load_run(path).table(["loss"])


def test_names_of_directories_that_look_like_processes(tmp_path: Path) -> None:
    path = laid(tmp_path, files(2))
    for name in ("rank-x", "rank-", "rank-1.old"):
        (path / name).mkdir()
    (path / "rank-7").write_text("a file")
    assert len(ns.load_run(path).table()) == 2


BEGINNINGS = b"\xff\xff\xff\xff\xf8\xff\xff\0"  # of messages whose headers would have 16 MB


@pytest.mark.parametrize("noise", [BEGINNINGS * 2_000, (BEGINNINGS[:4] + b"\x08\1\0\0") * 20_000], ids=["huge", "plausible"])
@pytest.mark.parametrize("growing", [False, True])
def test_a_search_after_damage_reads_little(
    noise: bytes, growing: bool, whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much looks like a message; and one refresh reads about as much as it may, over all segments."""
    content = without_checksums(whole)
    stream, end = content[SEGMENT], ends(whole)[0]
    hostile = stream[:end] + bytes(8) + noise
    path = laid(tmp_path, {**content, SEGMENT: hostile, "metrics-0002.arrows": hostile, "metrics-0003.arrows": hostile})
    for segment in path.glob("metrics-*.arrows"):
        os.truncate(segment, 20 << 20)
    taken, honest = 0, messages.read_at

    def counted(file: int, length: int, offset: int) -> bytes:
        nonlocal taken
        content = honest(file, length, offset)
        taken += len(content)
        return content

    monkeypatch.setattr(messages, "read_at", counted)
    part, refreshed = followed(path, [], ColumnCache()).parts[0], True
    while refreshed:
        taken = 0
        refreshed = part.refresh()
        assert taken < messages.BYTES_AT_ONCE + (3 << 20)
    assert part.count == 0 and len(part.damage()) == 3
    if growing and len(noise) < 80_000:  # what is found after more of it still counts
        with (path / SEGMENT).open("ab") as file:
            file.write(stream[end:])
        while part.refresh():
            pass
        assert part.count == ROWS


def test_a_message_that_becomes_whole_after_damage_is_found(whole: Files, tmp_path: Path) -> None:
    content, places = without_checksums(whole), ends(whole)
    stream = content[SEGMENT]
    path = laid(tmp_path, {**content, SEGMENT: stream[: places[0]] + b"\x55" * 100})
    part = followed(path, [], ColumnCache()).parts[0]
    for start in range(places[0], places[5], 37):
        part.refresh()
        with (path / SEGMENT).open("ab") as file:
            file.write(stream[start : min(start + 37, places[5])])
    part.refresh()
    assert part.count == 5


def test_buffers_of_a_batch_do_not_overlap(tmp_path: Path) -> None:
    """Otherwise a small file would hold columns of any size."""
    fields = pa.schema([("step", pa.int64()), *((f"c{index}", pa.float64()) for index in range(20))])
    batch = bytes(pa.record_batch([list(range(64))] * 21, schema=fields).serialize())
    header = PREFIX + metadata_size(batch[:PREFIX])
    layout = batch_layout(batch[:header])
    first = layout.buffers[1][0] - header
    shared = batch[:header]
    for start, length in layout.buffers[1::2]:
        shared = shared.replace(struct.pack("<qq", start - header, length), struct.pack("<qq", first, length))
    with pytest.raises(ns.InputError, match="laid out"):
        batch_layout(shared)
    (path := tmp_path / "run").mkdir()
    (path / SEGMENT).write_bytes(bytes(fields.serialize()) + shared + batch[header : header + first + 512])
    assert len(ns.load_run(path).table()) == 0


# at random -----------------------------------------------------------------------------------------------------------


def check_in_a_child(first: int, count: int) -> None:
    """A crash of the process is a failure of the test, not of the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.watch.fuzzing"])
    process = context.Process(target=check_cases, args=(first, count))
    process.start()
    process.join()
    assert process.exitcode == 0, "its error is above; a negative code is the signal that killed it"


def test_damaged_runs() -> None:
    check_in_a_child(0, 150)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_damaged_runs_more(part: int) -> None:
    check_in_a_child(10_000 + 1_000 * part, 1_000)


def test_a_damaged_run_can_be_resumed(tmp_path: Path) -> None:
    from tests.watch.loops import Loop, mlp

    list(Loop(mlp).watched(tmp_path / "run", 6))
    segment = tmp_path / "run" / SEGMENT
    stream = segment.read_bytes()
    segment.write_bytes(stream[:-2000] + bytes(100) + stream[-1900:])
    list(Loop(mlp).watched(tmp_path / "run", 2))
    run = ns.load_run(tmp_path / "run")
    assert run.table(["loss"])["step"].to_pylist()[-2:] == [7, 8] and len(run.damage) == 1
