"""The catalogue finds every run and nothing else, follows what changes, and shows what it cannot read beside what it can."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normscope as ns
from normscope.dashboard import catalogue as catalogues
from normscope.dashboard.card import Alert, Card
from normscope.dashboard.catalogue import Catalogue
from normscope.dashboard.discovery import DEEPEST, discover
from normscope.findings.finding import Finding
from normscope.report.summary import summarize
from tests.report.recordings import write_run

NAMES = ["first", "norm", "head"]
FINDING = {
    "rule": "variance-collapse", "step": 2, "layer": "norm", "evidence": {"affected": 1, "layers": ["norm"]},
    "message": "the variance is close to ε", "fix": "raise it",
}  # fmt: skip


def cards(catalogue: Catalogue) -> dict[str, Card]:
    """All cards, once everything is read."""
    found: dict[str, Card] = {}
    for _ in range(200):
        catalogue._last = -1e9
        changes = catalogue.changes()
        found = {card.id: card for card in changes.cards}
        if not changes.more:
            return found
    raise AssertionError("never done")


def ids(root: Path) -> set[str]:
    return {place.id for place in discover(root)}


# discovery -----------------------------------------------------------------------------------------------------------


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


# cards ---------------------------------------------------------------------------------------------------------------


def test_a_card_says_how_far_and_which_layer(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", 5, NAMES, finding=FINDING)
    write_run(tmp_path / "good", 4, NAMES)
    found = cards(Catalogue(tmp_path))
    bad, good = found["bad"], found["good"]
    assert (bad.status, bad.first, bad.step, bad.rows, bad.layers, bad.findings) == ("finished", 1, 5, 5, 3, 1)
    assert bad.worst == Alert("variance-collapse", "norm", 2, "the variance is close to ε", "raise it", when="at step 2")
    assert good.worst is None and good.findings == 0


def test_the_summary_is_that_of_the_report(tmp_path: Path) -> None:
    """A card reads two rows, the report all: they name the same layer in the same words."""
    for rule, layer in [
        ("variance-collapse", "norm"),
        ("loss-not-finite", None),
        ("growing-weight-product", None),
        ("new-rule", "head"),
    ]:
        write_run(tmp_path / rule, 5, NAMES, finding={**FINDING, "rule": rule, "layer": layer, "evidence": {}})
    write_run(tmp_path / "fine", 7, NAMES)
    for id, card in cards(Catalogue(tmp_path)).items():
        whole = summarize(ns.load_run(tmp_path / id))
        assert (card.headline, card.fine) == (whole.headline, whole.fine)
        assert (card.worst.layer if card.worst else None) == (whole.problems[0].layer if whole.problems else None)


def test_of_several_findings_one_that_names_a_layer_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 5, NAMES, finding=FINDING)
    with (tmp_path / "a" / "events.jsonl").open("a") as file:
        for rule, layer in [("loss-not-finite", None), ("exploding-gradient", "head"), ("dead-units", "first")]:
            file.write(json.dumps({**FINDING, "kind": "finding", "time": 1.0, "rule": rule, "layer": layer}) + "\n")
    card = cards(Catalogue(tmp_path))["a"]
    assert card.worst is not None and (card.worst.layer, card.findings) == ("head", 4)


@pytest.mark.parametrize(
    "finding",
    [{}, {"rule": 3, "layer": ["x"], "step": "now", "evidence": [1], "message": {"a": 1}, "fix": None}, {"message": "x" * 10**5}],
)
def test_a_finding_of_any_form_becomes_text(finding: dict[str, Any]) -> None:
    alert = Alert.of(Finding.from_event(finding))
    assert all(isinstance(text, str) and len(text) < 1000 for text in (alert.rule, alert.message, alert.fix))


WRITER = """
import sys, time
from pathlib import Path
from tests.report.recordings import layer
from normscope._watch.columns import schema
from normscope._watch.store import Writer
writer = Writer(Path(sys.argv[1]), on_failure=print)
writer.event("started", step=0)
writer.begin({"layers": [layer("a")]}, schema([layer("a")]))
for step in range(1, 10**6):
    writer.row({"step": step, "time": 0.0, "loss": 1 / step})
    print(step, flush=True)
    sys.stdin.readline()
"""


def test_live_until_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(ns.__file__).parents[1],
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        catalogue, seen = Catalogue(tmp_path), 0
        process.stdout.readline()
        for step in (1, 2, 3):
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                card = cards(catalogue).get("run")
                if card is not None and card.step == step:
                    break
            assert card is not None and (card.status, card.step) == ("live", step)
            assert catalogue.version > seen
            seen = catalogue.version
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert cards(catalogue)["run"].status == "killed"


def test_a_run_in_this_process_is_live(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ns.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert cards(Catalogue(tmp_path))["run"].status == "live"
    assert cards(Catalogue(tmp_path))["run"].status == "finished"


def test_only_what_changed_is_said_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 2, NAMES)
    write_run(tmp_path / "b", 2, NAMES)
    catalogue = Catalogue(tmp_path)
    cards(catalogue)
    version = catalogue.version

    def changed() -> list[str]:
        catalogue._last = -1e9
        return [card.id for card in catalogue.changes(version).cards]

    assert changed() == []
    write_run(tmp_path / "b", 4, NAMES)
    assert changed() == ["b"]
    shutil.rmtree(tmp_path / "a")
    version = catalogue.version
    assert changed() == [] and catalogue.changes(version).ids == ("b",) and catalogue.version > version


def test_an_unreadable_run_harms_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "good", 3, NAMES)
    whole = (tmp_path / "good" / "metrics-0001.arrows").read_bytes()
    for name, manifest, metrics in [
        ("no-json", b"{", whole), ("deep", b"[" * 10**5, whole), ("cut", None, whole[: len(whole) // 2]), ("noise", None, os.urandom(5000)),
        ("empty", None, b""), ("only-manifest", None, None),
    ]:  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(manifest or (tmp_path / "good" / "manifest.json").read_bytes())
        if metrics is not None:
            (tmp_path / name / "metrics-0001.arrows").write_bytes(metrics)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "events.jsonl")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "manifest.json").symlink_to("/etc/passwd")
    catalogue = Catalogue(tmp_path)
    found = cards(catalogue)
    assert {id for id, card in found.items() if card.status == "error"} == {"no-json", "deep", "noise", "pipe", "link"}
    assert all("\n" not in card.error for card in found.values())
    assert found["good"].step == 3 and found["cut"].status in ("killed", "live") and found["empty"].step is None
    with pytest.raises(ns.InputError, match="cannot be read"), catalogue.reading(["good", "noise"]):
        pass
    assert cards(catalogue) == found


def test_an_error_that_nobody_thought_of_stays_on_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a", 2, NAMES)
    write_run(tmp_path / "b", 2, NAMES)
    honest = catalogues.card

    def failing(id: str, *rest: Any) -> Card:
        if id == "a":
            raise ZeroDivisionError("nobody thought of it")
        return honest(id, *rest)

    monkeypatch.setattr(catalogues, "card", failing)
    found = cards(Catalogue(tmp_path))
    assert found["a"].error == "ZeroDivisionError: nobody thought of it" and found["b"].status == "finished"


def test_a_run_that_takes_long_to_read_delays_no_other_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "slow", 2, NAMES)
    write_run(tmp_path / "swift", 2, NAMES)
    honest, begun, ended = catalogues.card, threading.Event(), threading.Event()

    def waiting(id: str, *rest: Any) -> Card:
        if id == "slow":
            begun.set()
            assert ended.wait(60)
        return honest(id, *rest)

    monkeypatch.setattr(catalogues, "card", waiting)
    catalogue = Catalogue(tmp_path)
    first = threading.Thread(target=catalogue.changes)
    first.start()
    assert begun.wait(60)
    found = {card.id: card.status for card in catalogue.changes().cards}
    assert found == {"slow": "waiting", "swift": "finished"}
    with catalogue.reading(["swift"]) as (run,):
        assert len(run.matrix("angle")) == 2
    ended.set()
    first.join()
    assert {card.status for card in cards(catalogue).values()} == {"finished"}


def test_what_all_runs_hold_together_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        write_run(tmp_path / name, 3, NAMES, finding=FINDING)
    catalogue = Catalogue(tmp_path)
    usual = cards(catalogue)
    most = 2 * max(catalogue._held.values())
    monkeypatch.setattr(catalogues, "MOST_HELD", most)
    catalogue = Catalogue(tmp_path)
    assert cards(catalogue) == usual == cards(catalogue)

    def held() -> int:
        return sum(part.held for entry in catalogue._entries.values() for part in entry.run.parts)

    assert 0 < held() <= most
    for name in "abcdabcd":
        with catalogue.reading([name]) as (run,):
            assert len(run.layers) == len(NAMES) and len(run.matrix("angle")) == 3 and len(run.findings) == 1
        assert held() <= most
    assert cards(catalogue) == usual


def test_a_mended_run_is_shown_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 2, NAMES)
    manifest = (tmp_path / "a" / "manifest.json").read_bytes()
    (tmp_path / "a" / "manifest.json").write_bytes(b"{")
    catalogue = Catalogue(tmp_path)
    assert cards(catalogue)["a"].status == "error"
    (tmp_path / "a" / "manifest.json").write_bytes(manifest)
    assert cards(catalogue)["a"].status == "finished"


def test_many_runs_are_read_a_few_at_a_time_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        write_run(tmp_path / f"run{number}", 2, NAMES)
        os.utime(tmp_path / f"run{number}" / "events.jsonl", (2e9 + number, 2e9 + number))
    clock = itertools.count()  # a second passes between any two looks at it
    monkeypatch.setattr(catalogues, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(catalogues, "AT_ONCE", 4.0)
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
    monkeypatch.setattr(catalogues, "MOST_LISTED", 20)
    monkeypatch.setattr(catalogues, "MOST_KEPT", 40)
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


def test_results_are_listed_beside_runs(tmp_path: Path) -> None:
    audit = ns.audit(torch.nn.Linear(3, 2), torch.zeros(1, 3), effort=0.1)
    write_run(tmp_path / "run", 2, NAMES)
    for path in (tmp_path / "audit.json", tmp_path / "run" / "results" / "late.json"):
        path.parent.mkdir(exist_ok=True)
        audit.to_json(path)
    hostile = {
        "other.json": '{"a": 1}',
        "cut.json": audit.to_json()[:200],
        "wrong.json": '{"schema": "normscope.audit/1"}',
        "huge.json": "[" * 10**5,
    }
    for name, content in hostile.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "link.json").symlink_to(tmp_path / "audit.json")
    os.mkfifo(tmp_path / "pipe.json")
    catalogue = Catalogue(tmp_path)
    found = cards(catalogue)
    assert {id: card.status for id, card in found.items()} == {
        "run": "finished", "audit.json": "result", "run/results/late.json": "result", "cut.json": "error", "wrong.json": "error",
    }  # fmt: skip
    assert "Lipschitz" in found["audit.json"].headline
    assert catalogue.result("audit.json") == tmp_path / "audit.json"
    for id in ("run", "../audit.json", "link.json", "pipe.json", "other.json", ""):
        with pytest.raises(ns.InputError, match="no result"):
            catalogue.result(id)
    with pytest.raises(ns.InputError, match="no run"), catalogue.reading(["audit.json"]):
        pass


def test_ids_that_are_not_in_the_list_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "root" / "a", 2, NAMES)
    write_run(tmp_path / "secret", 2, NAMES)
    catalogue = Catalogue(tmp_path / "root")
    for id in ("../secret", "a/../../secret", str(tmp_path / "secret"), "%2e%2e/secret", "", "a/", "./a", "a\0"):
        with pytest.raises(ns.InputError, match="no run"), catalogue.reading([id]):
            pass
