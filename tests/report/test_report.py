"""The report: one small file that needs nothing else, in which no name can act, of any run that can be read."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import normscope as ns
from normscope._watch.columns import METRICS, SCALARS
from normscope.cli import app
from normscope.report.html import MOST_OPEN, titled
from normscope.report.markup import element, table
from normscope.report.run_page import COLUMNS, distinct_names, run_report
from normscope.report.snapshot import Snapshot
from normscope.report.summary import summarize
from tests.report.recordings import write_run

LIMIT = 6_000_000
FINDING = {
    "rule": "exploding-gradient", "step": 20, "layer": "block.1.linear", "evidence": {"gradient_norm": 1e9, "layers": ["block.1.linear"]},
    "message": "the gradient is 1000 times its usual norm", "fix": "clip gradients",
}  # fmt: skip
NAMES = ["stem", "block.0.linear", "block.1.linear", "head"]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'><a href='https://example.com'>"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.words.append(data)


def report_of(path: Path, steps: int = 40, names: list[str] = NAMES, **options) -> str:
    return run_report([Snapshot.of(write_run(path, steps, names, **options), COLUMNS)])


def is_self_contained(page: str) -> bool:
    """No element fetches anything, and links stay within the page."""
    addresses = [
        value
        for _, attributes in Elements(page).found
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data")
    ]
    return all(address is not None and address.startswith("#") for address in addresses)


@pytest.mark.full
def test_size_of_ten_thousand_steps_and_a_hundred_layers(tmp_path):
    page = report_of(tmp_path / "long", 10_000, [f"block.{index}.linear" for index in range(100)], finding=FINDING)
    assert len(page.encode()) < LIMIT
    assert is_self_contained(page)


def test_words_come_first_and_name_the_layer(tmp_path):
    page = report_of(tmp_path / "one", finding=FINDING)
    words = " ".join(Elements(page).words)
    order = [
        words.index(part)
        for part in (
            "Look at layer block.1.linear:",
            "What is not fine",
            "clip gradients",
            "What is fine",
            "Spectral norm",
            "greatest",
        )
    ]
    assert order == sorted(order)
    assert "finished" in words and "SGD" in words and "normscope" in words


def test_a_long_list_of_what_is_fine_is_folded():
    assert "<details" not in str(titled("What is fine", ["a"] * MOST_OPEN, "right", fold=True))
    folded = str(titled("What is fine", ["a"] * (MOST_OPEN + 1), "right", fold=True))
    assert folded.startswith("<details>") and f"What is fine ({MOST_OPEN + 1})" in folded
    assert "<details" not in str(titled("What is not fine", ["a"] * 50, "wrong"))


def renamed(path: Path, names: list[str]) -> Path:
    """A run directory in which layers have other names, also such that no recorder could write."""
    manifest = json.loads((path / "manifest.json").read_text())
    for layer, name in zip(manifest["layers"], names, strict=True):
        layer["name"] = name
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_hostile_names_stay_text(tmp_path):
    hostile = {**FINDING, "layer": HOSTILE, "message": HOSTILE, "fix": HOSTILE, "rule": HOSTILE, "evidence": {HOSTILE: HOSTILE}}
    written = write_run(tmp_path / "one", 10, NAMES, finding=hostile)
    page = run_report([Snapshot.of(renamed(written, [HOSTILE, "\ud800half", "nul\0", "a" * 2000]), COLUMNS)])
    harmless = report_of(tmp_path / "two", 10, finding={**FINDING, "layer": NAMES[0], "rule": "unknown"})
    assert sorted(tag for tag, _ in Elements(page).found) == sorted(tag for tag, _ in Elements(harmless).found)
    assert HOSTILE in " ".join(Elements(page).words)
    assert is_self_contained(page)
    page.encode()


@given(st.text(), st.text())
def test_no_text_becomes_markup(words, attribute):
    made = Elements(element("p", words, title=attribute))
    assert [tag for tag, _ in made.found] == ["p"]
    assert list(made.found[0][1]) == ["title"]
    assert [tag for tag, _ in Elements(table([words], [[words, words]], words)).found].count("td") == 1


def test_scripts_are_those_of_the_policy_only(tmp_path):
    page = report_of(tmp_path / "one")
    policy = next(
        attributes["content"]
        for tag, attributes in Elements(page).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    assert "unsafe-inline" not in re.search(r"script-src ([^;]*)", policy)[1]


def test_runs_are_compared_on_one_scale(tmp_path):
    runs = [Snapshot.of(write_run(tmp_path / place / "run", 30, NAMES, seed=seed), COLUMNS) for seed, place in enumerate("ab")]
    words = " ".join(Elements(run_report(runs)).words)
    assert "a/run" in words and "b/run" in words and "The runs side by side" in words
    assert distinct_names([Path("x"), Path("x")]) == ["x (1)", "x (2)"]


@pytest.mark.parametrize("steps, names", [(1, NAMES), (3, []), (1, ["only"])])
def test_the_smallest_runs_have_reports(tmp_path, steps, names):
    page = report_of(tmp_path / "one", steps, names)
    assert ("1 step" if steps == 1 else f"all {steps:,} steps") in page and is_self_contained(page)


def test_a_live_run_says_that_it_is_not_finished(tmp_path):
    assert "killed" in report_of(tmp_path / "one", closed=False)


def test_a_cut_off_run_shows_what_was_flushed(tmp_path):
    path = write_run(tmp_path / "one", 200, NAMES)  # several batches, however late the writer is
    segment = next(path.glob("metrics-*.arrows"))
    segment.write_bytes(segment.read_bytes()[:-1000])
    assert 0 < summarize(Snapshot.of(path, COLUMNS)).samples < 200


@pytest.mark.parametrize(
    "damage", ["{", "[]", "3", '{"layers": 3}', '{"layers": [3]}', '{"layers": []}', '{"layers": [{"name": 1}]}', "{}"]
)
def test_a_damaged_manifest_is_an_error_of_one_line(tmp_path, damage):
    path = write_run(tmp_path / "one", 5, NAMES)
    (path / "manifest.json").write_text(damage)
    with pytest.raises(ns.InputError) as caught:
        Snapshot.of(path, COLUMNS)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_rows_are_an_error_or_fewer_rows(tmp_path):
    path, random = write_run(tmp_path / "one", 4, NAMES), np.random.default_rng(0)
    segment = next(path.glob("metrics-*.arrows"))
    whole = np.frombuffer(segment.read_bytes(), np.uint8)
    for number in range(25):
        damaged, places = whole.copy(), random.integers(len(whole), size=random.integers(1, 9))
        damaged[places] = random.integers(256, size=len(places))
        segment.write_bytes(damaged.tobytes())
        with suppress(ns.InputError):
            snapshot = Snapshot.of(path, COLUMNS)
            page = run_report([snapshot]) if number < 3 else " ".join(snapshot.notes)
            assert len(snapshot.held["step"]) == 4 or "lost" in page


def test_odd_events_are_shown_as_far_as_they_can(tmp_path):
    path = write_run(tmp_path / "one", 5, NAMES)
    with (path / "events.jsonl").open("a") as events:
        events.write(
            '{"time": 1, "kind": "finding"}\n{"time": 2, "kind": "finding", "layer": ["x"], "step": "y", "evidence": 3, "message": null}\n'
        )
        events.write('{"time": 3, "kind": "note", "message": {"a": 1}}\n')
    run_report([Snapshot.of(path, COLUMNS)])


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e-30, 1e30])
def test_any_numbers_make_a_report(tmp_path, value):
    from normscope._watch.columns import schema
    from normscope._watch.store import Writer
    from tests.report.recordings import layer

    layers = [layer(name) for name in NAMES]
    writer = Writer(tmp_path / "one", on_failure=print)
    writer.begin({"layers": layers}, schema(layers))
    for step in (1, 2, 3):
        writer.row({"step": step, "time": 0.0, **dict.fromkeys(SCALARS, value), **{name: np.full(4, value) for name in METRICS}})
    writer.close()
    run_report([Snapshot.of(tmp_path / "one", COLUMNS)])


# commands, audits, notebooks -----------------------------------------------------------------------------------------


def invoke(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    return ended.value.code


def test_the_command_writes_the_file_and_says_where(tmp_path, capsys):
    run, out = write_run(tmp_path / "one", 5, NAMES), tmp_path / "page.html"
    assert invoke("report", str(run), str(run), "--out", str(out)) == 0
    assert capsys.readouterr().out.strip() == str(out) and out.read_text().startswith("<!doctype html>")


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    empty = write_run(tmp_path / "empty", 0, NAMES)
    for run, out, said in (
        (tmp_path / "none", tmp_path / "a.html", "no run in"),
        (empty, tmp_path / "a.html", "holds no rows yet"),
        (empty, tmp_path, "it is a directory"),
        (empty, tmp_path / "no" / "a.html", "there is no directory"),
    ):
        assert invoke("report", str(run), "--out", str(out)) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "a.html").exists()


@pytest.fixture(scope="module")
def audit() -> ns.Audit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[3].weight.mul_(50)
    return ns.audit(model.eval(), torch.randn(4, 6))


def test_an_audit_names_the_layer_that_makes_its_bound(audit, tmp_path):
    audit.to_html(tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    words = " ".join(Elements(page).words)
    assert "Layer 3 adds most to the upper bound." in words and is_self_contained(page)
    for part in ("What is not fine", "Ledger", "Certificate", "share of log(upper)", "torch"):
        assert part in words


def test_an_audit_without_a_finite_bound_has_a_report_too(tmp_path):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    found = ns.audit(Model().eval(), torch.randn(2, 3, 8), effort=0.1)
    found.to_html(tmp_path / "audit.html")
    assert "has no finite bound" in (tmp_path / "audit.html").read_text()
    assert found.figure("graph").data and found.figure("depth").data
    with pytest.raises(ns.InputError, match="no figure 'other': choose from depth, graph"):
        found.figure("other")


def test_results_show_themselves_in_a_notebook(audit, tmp_path):
    run = ns.load_run(write_run(tmp_path / "one", 5, NAMES, finding={**FINDING, "message": "<b>loud</b>"}))
    for shown in (audit, audit.bracket, audit.findings, audit.findings[0], run):
        page = Elements(shown._repr_html_())
        assert page.found[0][0] == "pre" and {tag for tag, _ in page.found} <= {"pre", "span"}
    assert "<b>loud</b>" in "".join(Elements(run._repr_html_()).words)
    assert "no rows yet" in ns.load_run(write_run(tmp_path / "two", 0, NAMES))._repr_html_()
