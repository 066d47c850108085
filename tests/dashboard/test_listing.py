"""The catalogue follows what changes, and shows what it cannot read beside what it can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import normscope as ns
from normscope.dashboard import listing
from normscope.dashboard.card import Alert, Card
from normscope.dashboard.listing import Catalogue
from normscope.findings.finding import Finding
from normscope.report.summary import summarize
from tests.dashboard.cards import FINDING, NAMES, cards
from tests.report.recordings import write_run


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
        deadline = time.monotonic() + 60  # the thread that writes may come later
        while "run" not in (found := cards(Catalogue(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found["run"].status == "live"
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
    honest = listing.card

    def failing(id: str, *rest: Any) -> Card:
        if id == "a":
            raise ZeroDivisionError("nobody thought of it")
        return honest(id, *rest)

    monkeypatch.setattr(listing, "card", failing)
    found = cards(Catalogue(tmp_path))
    assert found["a"].error == "ZeroDivisionError: nobody thought of it" and found["b"].status == "finished"


def test_a_run_that_takes_long_to_read_delays_no_other_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "slow", 2, NAMES)
    write_run(tmp_path / "swift", 2, NAMES)
    honest, begun, ended = listing.card, threading.Event(), threading.Event()

    def waiting(id: str, *rest: Any) -> Card:
        if id == "slow":
            begun.set()
            assert ended.wait(60)
        return honest(id, *rest)

    monkeypatch.setattr(listing, "card", waiting)
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
    monkeypatch.setattr(listing, "MOST_HELD", most)
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
