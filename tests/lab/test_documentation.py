"""The page of results: every row and figure of every result, made from files alone."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from normscope.core.errors import InputError
from normscope.lab.__main__ import documentation
from normscope.lab.documentation import write_page
from normscope.lab.experiment import Plot
from normscope.lab.runner import run_experiment
from normscope.report.plots import plot
from normscope.report.svg import svg
from normscope.report.theme import COLORS
from tests.lab.test_runner import TINY


def test_a_page_holds_every_row_and_figure(tmp_path: Path) -> None:
    outcomes = [run_experiment(name, settings=TINY, out=tmp_path / "out") for name in ("weight-norms", "input-variance")]
    page = tmp_path / "docs" / "reproduction.md"
    page.parent.mkdir()
    write_page([tmp_path / "out"], page)
    text = page.read_text()
    for outcome in outcomes:
        assert f"## {outcome.content['experiment']}: out" in text
        for row in outcome.comparisons:
            assert row.ours in text
    images = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(images) == sum(len(outcome.content["figures"]) for outcome in outcomes)
    for image in images:
        ElementTree.parse(page.parent / image)
    command = next(line for line in text.splitlines() if line.startswith("normscope lab run weight-norms"))
    assert "--set epochs=2" in command and "--set images=200" in command


def test_what_was_written_above_the_results_stays_and_other_files_are_not_touched(tmp_path: Path) -> None:
    run_experiment("weight-norms", settings=TINY, out=tmp_path / "out")
    page = tmp_path / "page.md"
    write_page([tmp_path / "out"], page)
    fresh = page.read_text()
    page.write_text("What we think of it.\n" + fresh)
    write_page([tmp_path / "out"], page)
    assert page.read_text() == "What we think of it.\n" + fresh
    page.write_text("a letter")
    with pytest.raises(InputError, match="is not a page of results"):
        write_page([tmp_path / "out"], page)
    assert page.read_text() == "a letter"


def test_the_command_of_a_page_runs_the_experiment_again(tmp_path: Path) -> None:
    first = run_experiment("weight-norms", settings=TINY, out=tmp_path / "out")
    page = tmp_path / "page.md"
    write_page([tmp_path / "out"], page)
    words = shlex.split(next(line for line in page.read_text().splitlines() if line.startswith("normscope")))[3:]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    assert run_experiment(words[0], settings=settings, out=tmp_path / "out").content == first.content


def test_results_of_two_directories_stay_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_experiment("weight-norms", settings={**TINY, "seeds": "0" if name == "one" else "1"}, out=tmp_path / name)
    write_page([tmp_path / "one", tmp_path / "two"], tmp_path / "page.md")
    pictures = [(tmp_path / "images" / "page" / f"weight-norms-{name}-products.svg").read_text() for name in ("one", "two")]
    assert pictures[0] != pictures[1]
    with pytest.raises(InputError, match="these are the same: one, one"):
        write_page([tmp_path / "one", tmp_path / "two" / ".." / "one"], tmp_path / "page.md")


def test_no_results_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no result in"):
        write_page([tmp_path], tmp_path / "page.md")


@pytest.mark.parametrize("kind", ["lines", "points", "bars"])
@pytest.mark.parametrize("log", [False, True])
def test_pictures_leave_out_what_cannot_be_shown(kind: str, log: bool) -> None:
    values = [1.0, math.nan, math.inf, 1e-3, 0.0, 5.0]
    shown = Plot(
        "a < b & c",
        "x",
        "y",
        {"one": (range(6), values), "two": (range(6), values[::-1])},
        kind=kind,
        log_y=log,
        levels={"level": 2.0},
    )
    picture = svg(plot(shown))
    ElementTree.fromstring(picture)
    assert "nan" not in picture and "inf" not in picture and "a &lt; b" in picture


def test_lines_whose_colours_return_are_told_apart() -> None:
    many = Plot("t", "x", "y", {f"line {index}": ([0, 1], [index, index + 1.0]) for index in range(len(COLORS) + 2)})
    drawn = plot(many)
    assert len({(COLORS[index % len(COLORS)], trace.line.dash) for index, trace in enumerate(drawn.data)}) == len(many.series)
    strokes = [path.attrib.get("stroke-dasharray") for path in ElementTree.fromstring(svg(drawn)) if "1.6" in path.attrib.values()]
    assert strokes.count(None) == 2 * len(COLORS) and len(strokes) == 2 * len(many.series)  # each also in the legend


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.6, 4.0], {"1", "2"}),
        ([1e-9, 1.0], {"10^-8", "10^-4", "1"}),
        ([3.01, 3.02], {"3.01", "3.02"}),
        ([90.0, 210.0], {"100", "200"}),
        ([1e-6, 4e-5], {"10^-6", "2e-06", "10^-5"}),
    ],
)
def test_logarithmic_axes_mark_round_numbers(values: list[float], labels: set[str]) -> None:
    picture = ElementTree.fromstring(svg(plot(Plot("t", "x", "y", {"one": ([3, 4], values)}, log_y=True))))
    shown = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text") if text.attrib["text-anchor"] == "end"}
    assert labels <= shown and len(shown) <= 8


def test_a_constant_and_words_have_a_place() -> None:
    words = Plot("t", "x", "y", {"one": (["first", "second"], [3.0, 3.0])}, kind="bars")
    assert "second" in svg(plot(words))
    ElementTree.fromstring(svg(plot(Plot("t", "x", "y", {"one": ([0], [0.0])}))))


def test_a_kind_of_plot_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(InputError, match="no kind of plot 'pie': choose from lines"):
        plot(Plot("t", "x", "y", {}, kind="pie"))


def test_the_catalogue_is_made_from_the_experiments() -> None:
    page = Path(__file__).parents[2] / "docs" / "experiments.md"
    assert page.read_text(encoding="utf-8") == documentation(), "run: python -m normscope.lab > docs/experiments.md"


def test_a_surface_is_drawn_in_cells_and_equal_axes_have_equal_units() -> None:
    places = [-1.0, 0.0, 3.0]
    shown = Plot(
        "", "x", "y", {"way": ([0.0, 1.0], [0.0, 1.0])}, surface=(places, places, [[1, 2, 3], [1, 2, 3], [1, 2, float("nan")]])
    )
    for equal in (False, True):
        drawn = ElementTree.fromstring(svg(plot(replace(shown, equal=equal))))
        assert len(drawn.findall("{*}rect")) == 8
        last = [path for line in drawn.findall("{*}path") if "L" in (path := line.get("d", ""))][-1]
        x0, y0, x1, y1 = (float(number) for point in last[1:].split("L") for number in point.split())
        assert (x1 - x0 == pytest.approx(y0 - y1, abs=0.2)) == equal
