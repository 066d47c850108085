"""The report in a real browser, from disk: it draws, fetches nothing, and serves readers with any screen, eyes or hands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import normscope as ns
from normscope.report.file import write_report
from tests.browser.chromium import Heard
from tests.browser.planted import BAD, network, train
from tests.report.recorded_results import results_of_every_kind
from tests.report.recordings import write_run

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
HOSTILE = "</script><script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\"><a href='https://example.com'>x</a>"


@pytest.fixture(scope="module")
def report(tmp_path_factory, browser) -> Path:
    """Of a training with a planted bad layer."""
    place = tmp_path_factory.mktemp("planted")
    train(place / "run", epochs=2)
    write_report([place / "run"], place / "report.html")
    return place / "report.html"


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[tuple[Any, Heard]]:
    page = browser.new_page(**{"viewport": WIDE, **options})
    heard = Heard.of(page)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    yield page, heard
    page.close()


@pytest.fixture(scope="module", params=["light", "dark"])
def view(browser, report, request) -> Iterator[tuple[Any, Heard]]:
    """The page on a wide screen, and what was heard of it."""
    with opened(browser, report, color_scheme=request.param) as found:
        yield found


def test_it_draws_every_figure_and_fetches_nothing(view, report):
    page, heard = view
    figures = page.locator(".plot").count()
    assert figures >= 6 and page.locator(".plot .main-svg").count() >= figures
    assert heard.said == [] and heard.asked == [report.as_uri()]


def test_the_first_screen_names_the_bad_layer(view):
    headline = view[0].locator(".headline").first
    box = headline.bounding_box()
    assert BAD in headline.inner_text() and box["y"] + box["height"] < WIDE["height"]


def test_hovering_gives_layer_step_and_value(view):
    page = view[0]
    page.locator("#figure-1 .nsewdrag").hover()
    page.wait_for_selector("#figure-1 .hovertext")
    assert re.search(
        r"blocks\.\d+\.linear.*step \d+.*Spectral norm ‖W‖ [\d.]+", page.locator("#figure-1 .hovertext").first.text_content()
    )


def test_no_accessibility_rule_is_broken(view):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = view[0]
    page.evaluate("document.querySelectorAll('details').forEach(detail => { detail.open = true; })")
    found = axe.Axe().run(page)
    page.evaluate("document.querySelectorAll('details').forEach(detail => { detail.open = false; })")
    assert found.violations_count == 0, found.generate_report()


def test_an_audit_and_a_comparison_are_as_good(browser, report, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    ns.audit(network(bad=1e3).eval(), torch.zeros(2, 1, 8, 8), effort=0.1).to_html(tmp_path / "audit.html")
    write_report([report.parent / "run", write_run(tmp_path / "other", 5, ["only"])], tmp_path / "compare.html")
    for name, words in (("audit", f"Layer {BAD}"), ("compare", BAD)):
        with opened(browser, tmp_path / f"{name}.html") as (page, heard):
            assert words in page.locator(".headline").first.inner_text()
            assert heard.said == [] and len(heard.asked) == 1
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


def test_results_are_as_good(browser, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    paths = [tmp_path / "unknown.json"]
    paths[0].write_text("{}")
    for name, content in results_of_every_kind(tmp_path / "lab").items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    write_report(paths, tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html", color_scheme="dark", viewport=NARROW) as (page, heard):
        assert page.locator(".plot .main-svg").count() >= page.locator(".plot").count() == 5
        assert heard.said == [] and len(heard.asked) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        page.evaluate("document.querySelectorAll('details').forEach(detail => { detail.open = true; })")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_the_keyboard_reaches_everything(view):
    page = view[0]
    page.locator("a.skip").focus()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent.slice(0, 40)"))
    assert reached[:2] == ["BUTTON Light or dark", "A Summary"] and any(name.startswith("SUMMARY") for name in reached)
    for place, inside in (("figure", "table"), (".verdict", "li")):
        assert not page.locator(f"{place} details {inside}").first.is_visible()
        page.locator(f"{place} summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator(f"{place} details {inside}").first.is_visible()


def test_the_scheme_follows_the_reader_and_paper(view):
    page, heard = view
    colours = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color]"
    before, button = page.evaluate(colours), page.get_by_role("button", name="Light or dark")
    button.click()
    other = page.evaluate(colours)
    button.click()
    assert page.evaluate(colours) == before and set(before).isdisjoint(other)
    page.emulate_media(media="print")
    page.wait_for_timeout(300)  # the page's policy forbids waiting for an expression
    assert page.evaluate(colours) == ["rgb(255, 255, 255)", "#1f2328"]
    page.emulate_media(media="screen")
    assert heard.said == []


def test_a_narrow_screen_needs_no_sideways_scrolling(browser, report):
    with opened(browser, report, viewport=NARROW) as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        widths = page.evaluate("[...document.querySelectorAll('.plot .main-svg')].map(plot => plot.getBoundingClientRect().width)")
        assert max(widths) <= NARROW["width"]


def test_hostile_names_do_nothing(browser, tmp_path):
    finding = {"rule": HOSTILE, "step": 3, "layer": HOSTILE, "evidence": {HOSTILE: 1}, "message": HOSTILE, "fix": HOSTILE}
    write_report([write_run(tmp_path / "run", 10, [HOSTILE, "fine"], finding=finding)], tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as (page, heard):
        assert page.title() == "Run run · normscope"
        assert page.locator("img[src], a[href^=http], svg a").count() == 0
        assert heard.said == [] and len(heard.asked) == 1


def test_without_scripts_the_numbers_are_there(browser, report):
    page = browser.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    assert BAD in page.locator(".headline").first.inner_text()
    assert page.locator("details table").count() >= 6
    page.close()
