"""Results in a report: each kind has a section that says what its file says; no file can break the page or act in it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normscope as ns
from normscope._checkpoint.difference import Difference
from normscope.auditing import Audit
from normscope.bounds.generalization import Guarantees
from normscope.claims.claim import Ledger
from normscope.report import figures
from normscope.report.file import write_report
from normscope.report.html import Drawing
from normscope.report.result_sections import SECTIONS, STORED
from normscope.report.results import FOLDER, Shown, results_report, shown_results
from normscope.symmetry.report import SymmetryReport
from tests.report.recorded_results import an_audit, results_of_every_kind, some_guarantees
from tests.report.recordings import write_run
from tests.report.test_report import HOSTILE, NAMES, Elements, invoke, is_self_contained

MUTATIONS = 60  # of each kind's file
ODD: tuple[Any, ...] = (None, True, -1, 0, 1e308, "", "nan", "-inf", HOSTILE, "\ud800", [], [[1]], {}, {"a": {}}, [None, "x"])


@pytest.fixture(scope="module")
def audit() -> Audit:
    return an_audit()


@pytest.fixture(scope="module")
def guarantees() -> Guarantees:
    return some_guarantees()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of_every_kind(tmp_path_factory.mktemp("lab"))


def written(place: Path, content: Any) -> Path:
    place.write_text(json.dumps(content))
    return place


def page_of(place: Path, content: Any) -> Elements:
    return Elements(results_report([shown_results(written(place, content))]))


# reading back --------------------------------------------------------------------------------------------------------


def test_what_is_read_back_is_what_was_written(audit, guarantees):
    for result in (audit, audit.findings, guarantees):
        content = json.loads(json.dumps(result.to_dict()))
        again = json.loads(json.dumps(type(result).from_dict(content).to_dict()))
        assert same(again, content)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == pytest.approx(other, rel=1e-12) if isinstance(one, float) else one == other


def test_figures_of_what_was_read_are_the_figures(audit, guarantees):
    for draw, result in ((figures.depth_profile, audit), (figures.model_graph, audit), (figures.bound_comparison, guarantees)):
        again = draw(type(result).from_dict(json.loads(json.dumps(result.to_dict()))))
        for one, other in zip(draw(result).data, again.data, strict=True):
            assert one.type == other.type and one.name == other.name
            numbers = [np.array([value for value in trace.x if isinstance(value, float)]) for trace in (one, other)]
            assert np.allclose(*numbers)


def test_beyond_floats_nothing_is_lost(audit):
    content = audit.to_dict()
    content["bracket"]["upper_log10"] = 412.5
    content["layers"][0]["upper_here"] = "3.20e+412"
    assert Audit.from_dict(content).layers[0].upper_here.log10 == pytest.approx(412 + np.log10(3.2))
    assert Audit.from_dict({**content, "bracket": {**content["bracket"], "upper_log10": "inf"}}).bracket.upper == float("inf")


# sections ------------------------------------------------------------------------------------------------------------

SAID: dict[str, Callable[[Any], list[str]]] = {  # what a section must say of its file
    "audit": lambda found: ["The Lipschitz constant lies between", *(row["name"] for row in found["layers"])],
    "doctor": lambda found: [f"{len(found['checked'])} checks", *(finding["message"] for finding in found["findings"])],
    "curvature": lambda found: ["plain", "quotient", *(f"{record['eigenvalues']['largest'][0]['value']:.5g}" for record in found)],
    "generalization": lambda found: ["certified", *(bound["name"] for bound in found["bounds"]), *found["not_given"]],
    "claims": lambda found: [text for record in found["claims"] for text in (record["id"], record["statement"], record["verdict"])],
    "lab": lambda found: [found["verdict"], "theirs", "ours", *(row["ours"] for row in found["comparisons"])],
}


def test_every_kind_has_a_case_here(results):
    schemas = [(content[0] if isinstance(content, list) else content)["schema"] for content in results.values()]
    others = {
        "normscope.claim/1",
        "normscope.claim/2",
        *(kind.schema for kind in (*STORED, Difference, SymmetryReport, ns.Run)),
    }  # in tests/test_results.py
    assert {*schemas} == {*SECTIONS} - others and set(SAID) == set(results)


@pytest.mark.parametrize("kind", SAID)
def test_a_section_says_what_its_file_says(kind, results, tmp_path):
    words = " ".join(page_of(tmp_path / f"{kind}.json", results[kind]).words)
    for said in [f"From {kind}.json", *SAID[kind](results[kind])]:
        assert said in words


def test_results_follow_the_run_and_are_named_in_the_summary(results, tmp_path):
    run = write_run(tmp_path / "run", 5, NAMES)
    (run / FOLDER).mkdir()
    written(run / FOLDER / "audit.json", results["audit"])
    (run / FOLDER / "cut.json").write_text('{"schema"')
    given = [written(tmp_path / f"{kind}.json", results[kind]) for kind in ("claims", "lab")]
    problems = write_report([given[0], run, given[1]], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    ids = [attributes["id"] for tag, attributes in Elements(page).found if tag == "section"]
    assert ids == ["summary", "layers", "time", "ledger", "findings", "settings", "result-1", "result-2", "result-3"]
    words = " ".join(Elements(page).words)
    summary = words[: words.index("Layers over time", words.index("Results"))]
    assert all(title in summary for title in ("Audit of Sequential", "Claims of the papers", "Experiment weight-norms"))
    assert [problem.count("\n") for problem in problems] == [0] and "cut.json is not JSON" in problems[0] and problems[0] in summary
    assert is_self_contained(page)


def test_nothing_in_the_folder_stops_the_report(tmp_path):
    run = write_run(tmp_path / "run", 5, NAMES)
    (run / FOLDER / "directory.json").mkdir(parents=True)
    os.mkfifo(run / FOLDER / "pipe.json")
    (run / FOLDER / "lost.json").symlink_to(tmp_path / "nowhere")
    (run / FOLDER / "deep.json").write_text('{"a":' * 100_000)
    problems = write_report([run], tmp_path / "page.html")
    assert len(problems) == 4 and all("\n" not in problem for problem in problems)


def test_a_file_that_is_too_large_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("normscope.report.results.HELD", 1)
    for number, (content, why) in enumerate([(b" " * 2000, "more than the"), (b"[" + b"[]," * 300 + b"[]]", "of memory")]):
        (tmp_path / f"{number}.json").write_bytes(content)
        with pytest.raises(ns.InputError, match=why) as caught:
            shown_results(tmp_path / f"{number}.json", 1000)
        assert "\n" not in str(caught.value)
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ns.InputError, match="1048576 MB, more than the 64 MB of a result"):
        shown_results(tmp_path / "sparse.json")


def test_a_link_to_a_result_is_read_where_links_are_allowed(tmp_path, results):
    written(tmp_path / "audit.json", results["audit"])
    (tmp_path / "link.json").symlink_to(tmp_path / "audit.json")
    (tmp_path / "circle.json").symlink_to(tmp_path / "circle.json")
    assert shown_results(tmp_path / "link.json").section is not None
    for name, links in (("link.json", False), ("circle.json", True)):
        with pytest.raises(ns.InputError, match=f"cannot read .*{name}"):
            shown_results(tmp_path / name, links=links)


# what is odd ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [3, "text", None, [], {}, [1], {"schema": 3}, {"schema": ["x"]}, {"schema": "other/1"}, {"schema": "normscope.run/1"}],
)
def test_an_unknown_file_is_one_line(tmp_path, content):
    words = " ".join(page_of(tmp_path / "odd.json", content).words)
    assert "odd.json is not shown: its schema is none of normscope.audit/1" in words


def test_claims_of_earlier_versions_are_shown(results, tmp_path):
    """They were lists of claims; the first version called the place of a statement `place`."""
    second = results["claims"]["claims"]
    first = [{"place": record["where"], **record, "schema": "normscope.claim/1"} for record in second]
    for record in first:
        del record["where"]
    for content in (second, first):
        shown = shown_results(written(tmp_path / "claims.json", content))
        assert shown.section is not None and shown.section.headline.startswith("2 claims"), shown.problem
    assert len(Ledger.from_dict({"claims": second})) == 2


def test_kinds_do_not_mix(results, tmp_path):
    shown = shown_results(written(tmp_path / "mixed.json", [results["audit"], results["claims"]]))
    assert shown.section is None and "none of" in shown.problem
    twice = shown_results(written(tmp_path / "twice.json", [results["audit"]] * 2))
    assert "it has 2 records, not one" in twice.problem


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within JSON."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from places(content[key])


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", SAID)
def test_no_change_of_a_file_breaks_the_page(kind, results, tmp_path):
    survives_changes(results[kind], MUTATIONS, tmp_path)


def survives_changes(content: Any, count: int, place: Path) -> None:
    """Whatever a file holds instead of one of its values, there is a page, and a line where a result is not shown."""
    random, shown = np.random.default_rng(0), []
    for number in range(count):
        changed = copy.deepcopy(content)
        everywhere = list(places(changed))
        container, key = everywhere[random.integers(len(everywhere))]
        if random.integers(3) and not isinstance(container, list):
            container[key] = copy.deepcopy(ODD[random.integers(len(ODD))])
        else:
            del container[key]
        shown.append(shown_results(written(place / f"{number}.json", changed)))
    page = results_report(shown)
    page.encode()
    assert is_self_contained(page)
    assert all((one.section is None) == bool(one.problem) and "\n" not in one.problem for one in shown)


@pytest.mark.parametrize("kind", SAID)
def test_names_in_files_stay_text(kind, results, tmp_path):
    def hostile(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: value if key in KEPT else hostile(value) for key, value in content.items()}
        if isinstance(content, list):
            return [hostile(value) for value in content]
        return HOSTILE + content if isinstance(content, str) else content

    attacked, harmless = (
        shown_results(written(tmp_path / f"{n}.json", c)) for n, c in enumerate((hostile(results[kind]), results[kind]))
    )
    assert attacked.section is not None, attacked.problem
    tags = [sorted(tag for tag, _ in Elements(results_report([shown])).found) for shown in (attacked, harmless)]
    assert tags[0] == tags[1]
    assert not any("<" in text.replace("<br>", "") for text in figure_text(attacked))


KEPT = ("schema", "verdict", "status", "quantity", "severity", "agrees")  # words of the format


def figure_text(shown: Shown) -> list[str]:
    """What Plotly would read as markup."""
    drawings = [part for part in shown.section.parts if isinstance(part, Drawing)] if shown.section else []
    lists = [
        np.ravel(values)
        for drawing in drawings
        for trace in drawing.made.data
        for values in (trace.x, trace.y, trace.text, trace.customdata, trace.name)
    ]
    return [str(value) for values in lists for value in values]


# the command ---------------------------------------------------------------------------------------------------------


def test_the_command_takes_results_alone(results, tmp_path, capsys):
    paths = [str(written(tmp_path / f"{kind}.json", content)) for kind, content in results.items()]
    unknown, out = written(tmp_path / "unknown.json", {}), tmp_path / "page.html"
    assert invoke("report", *paths, str(unknown), "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(out) and captured.err.count("\n") == 1 and "unknown.json is not shown" in captured.err
    assert "6 results" in out.read_text()


def test_a_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path, capsys):
    (tmp_path / "cut.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, said in (("cut.json", "is not JSON"), ("bytes.json", "is not JSON"), ("none.json", "cannot read")):
        assert invoke("report", str(tmp_path / name), "--out", str(tmp_path / "page.html")) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
