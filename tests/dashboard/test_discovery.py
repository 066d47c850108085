"""Runs are found at any depth, in large trees and on slow file systems, and nothing else is."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import normscope as ns
from normscope.dashboard import listing
from normscope.dashboard.discovery import DEEPEST, Discovered, Discovery
from normscope.dashboard.listing import Catalogue
from tests.dashboard.cards import NAMES, cards
from tests.report.recordings import write_run


def discover(root: Path) -> list[Discovered]:
    """All that lies below `root`, in the order of names."""
    found = Discovery(root)
    while not found.known_once:
        found.advance(60.0)
    return sorted(found.places.values(), key=lambda place: place.id)


def ids(root: Path) -> set[str]:
    return {place.id for place in discover(root)}


def test_runs_are_found_at_any_depth_with_their_ranks(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 2, NAMES)
    write_run(tmp_path / "sweep" / "lr=0.1" / "b", 2, NAMES)
    for rank in (0, 1, 10, 2):
        write_run(tmp_path / "ddp" / f"rank-{rank}", 2, NAMES)
    (tmp_path / "ddp" / "rank-x").mkdir()
    (tmp_path / "nothing" / "here").mkdir(parents=True)
    assert ids(tmp_path) == {"a", "sweep/lr%3D0.1/b", "ddp"}
    (ddp,) = (place for place in discover(tmp_path) if place.id == "ddp")
    assert [rank.name for rank in ddp.ranks] == ["rank-0", "rank-1", "rank-2", "rank-10"]


def test_a_run_itself_can_be_served(tmp_path: Path) -> None:
    write_run(tmp_path / "alone", 3, NAMES)
    (card,) = cards(Catalogue(tmp_path / "alone")).values()
    assert card.name == "alone" and card.step == 3
    write_run(tmp_path / "ranks" / "rank-0", 2, NAMES)
    assert ids(tmp_path / "ranks" / "rank-0") == {"."}


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside", 2, NAMES)
    root = tmp_path / "root"
    write_run(root / "inside", 2, NAMES)
    (root / "linked").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "ddp").mkdir()
    (root / "ddp" / "rank-0").symlink_to(outside)
    assert ids(root) == {"inside"}


def test_a_deep_tree_ends(tmp_path: Path) -> None:
    path = tmp_path
    for _ in range(DEEPEST + 5):
        path = path / "d"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    assert ids(tmp_path) == set()


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a b&c=d#e?f%2e", "‮übung".encode(), b"<img src=x onerror=alert(1)>", b"%2e%2e"])
def test_any_name_of_a_directory_has_an_id_of_its_own(name: bytes, tmp_path: Path) -> None:
    write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), 2, NAMES)
    catalogue = Catalogue(tmp_path)
    ((id, card),) = cards(catalogue).items()
    assert id.isascii() and card.status == "finished"
    json.dumps(card.to_dict()).encode()
    with catalogue.reading([id]) as (run,):
        assert len(run.matrix("angle")) == 2


def test_ids_that_are_not_in_the_list_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "root" / "a", 2, NAMES)
    write_run(tmp_path / "secret", 2, NAMES)
    catalogue = Catalogue(tmp_path / "root")
    for id in ("../secret", "a/../../secret", str(tmp_path / "secret"), "%2e%2e/secret", "", "a/", "./a", "a\0"):
        with pytest.raises(ns.InputError, match="no run"), catalogue.reading([id]):
            pass


# many runs, slow file systems ------------------------------------------------------------------------------------------


def test_many_runs_are_read_a_few_at_a_time_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        write_run(tmp_path / f"run{number}", 2, NAMES)
        os.utime(tmp_path / f"run{number}" / "events.jsonl", (2e9 + number, 2e9 + number))
    clock = itertools.count()  # a second passes between any two looks at it
    monkeypatch.setattr(listing, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(listing, "AT_ONCE", 4.0)
    catalogue = Catalogue(tmp_path)
    first = catalogue.changes()
    assert len(first.ids) == 12 and first.more
    read = [card.id for card in first.cards if card.status != "waiting"]
    assert 0 < len(read) < 12 and "run11" in read and "run0" not in read
    monkeypatch.undo()
    assert all(card.status == "finished" for card in cards(catalogue).values())


class Slow:
    """A file system that takes its time to list a directory or tell of a file, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
        self.now, self.delay = 0.0, delay
        for name in ("scandir", "stat", "lstat"):
            monkeypatch.setattr(os, name, self.slowed(getattr(os, name)))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def slowed(self, call: Any) -> Any:
        def slow(*given: Any, **options: Any) -> Any:
            self.now += self.delay
            return call(*given, **options)

        return slow


@pytest.mark.parametrize("delay", [0.0003, 0.01, 1.0])
def test_a_slow_file_system_delays_but_stops_nothing(delay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "run000", 2, NAMES)
    for number in range(1, 60):
        shutil.copytree(tmp_path / "runs" / "run000", tmp_path / "runs" / f"run{number:03}")
    with monkeypatch.context() as patched:
        Slow(patched, delay)
        catalogue = Catalogue(tmp_path / "runs")
        for answers in range(1, 200):
            found = catalogue.changes()
            read = sum(card.status == "finished" for card in found.cards)
            assert read >= min(answers // 8, 60), "each answer reads a run, once the first directories are listed"
            if not found.more:
                break
    assert not found.more and len(found.ids) == 60


@pytest.mark.parametrize("rising", [True, False])
def test_a_first_answer_that_has_time_for_few_directories_has_those_made_last(
    rising: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File numbers say which directories are asked for their times first, and no more: where they mislead, the end is the same."""
    for number in range(300):
        (tmp_path / f"{number * 7919 % 1000:03}").mkdir()
        (tmp_path / f"{number * 7919 % 1000:03}" / "manifest.json").write_text('{"layers": []}')
    made = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_ino, reverse=not rising)
    for number, path in enumerate(made):
        for each in (path / "manifest.json", path):
            os.utime(each, (1e9 + number // 20, 1e9 + number // 20))  # file systems with coarse clocks
    with monkeypatch.context() as patched:
        Slow(patched, 0.05)
        catalogue = Catalogue(tmp_path)
        first = catalogue.changes()
        newest = {path.name for path in made[-10:]}
        assert first.total < 30 and (not rising or newest <= set(first.listed))
        while (found := catalogue.changes()).more:
            pass
    assert {path.name for path in made[-200:]} == set(found.listed)


def test_of_many_runs_the_newest_are_listed_and_all_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_LISTED", 20)
    monkeypatch.setattr(listing, "MOST_KEPT", 40)
    for number in range(100):
        path = tmp_path / f"sweep{number % 7}" / f"run{number:03}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text('{"layers": []}')
        os.utime(path / "manifest.json", (1e9 + number, 1e9 + number))
    catalogue = Catalogue(tmp_path)

    def asked(find: str = "", also: Any = ()) -> Any:
        while (found := catalogue.changes(-1, find, also)).more:
            pass
        return found

    found = asked()
    assert (found.total, found.matching) == (100, 100)
    assert [id[-3:] for id in found.listed] == [f"{number:03}" for number in range(99, 79, -1)]
    for number in (0, 50, 99):
        found = asked(f"RUN{number:03}")
        assert [id[-6:] for id in found.listed] == [f"run{number:03}"] and found.matching == 1 and len(found.ids) <= 13
        assert len(catalogue._entries) <= 40
    far = "sweep3/run003"
    assert far in asked(also=[far]).ids and far not in asked().ids
    with catalogue.reading([far]) as (run,):
        assert run.layers == []


def test_a_new_run_in_a_large_tree_is_seen_before_all_is_looked_through_again(tmp_path: Path) -> None:
    for number in range(30):
        write_run(tmp_path / "sweep" / f"run{number}", 2, NAMES)
    catalogue = Catalogue(tmp_path)
    cards(catalogue)
    catalogue.discovery._next = 1e12  # as if it had taken long
    write_run(tmp_path / "sweep" / "new", 2, NAMES)
    shutil.rmtree(tmp_path / "sweep" / "run3")
    found = cards(catalogue)
    assert "sweep/new" in found and "sweep/run3" not in found
