"""The dashboard in a real browser: what a person does with it, on any screen, with or without a mouse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import normscope as ns
from tests.browser.dashboard import NAMES, NARROW, WIDE, Open, drawn, query, until
from tests.browser.planted import BAD
from tests.browser.serving import served
from tests.report.recordings import write_run


def rows(page: Any, key: str) -> list[str]:
    """The layers of a heatmap."""
    found: list[str] = until(page, f"""document.querySelector('[data-key="heatmap {key}"] .plot').data[0].y""")
    return found


# what is seen --------------------------------------------------------------------------------------------------------


def test_the_first_screen_names_the_bad_layer(opened: Open) -> None:
    page, _ = opened()
    headline = page.locator("#verdict h2").first
    box = headline.bounding_box()
    assert BAD in headline.inner_text() and box["y"] + box["height"] < WIDE["height"]
    assert BAD in page.locator(".card", has_text="planted").inner_text()
    assert "Try:" in page.locator("#verdict").inner_text()
    drawn(page)


def test_every_run_has_a_card_and_a_broken_one_says_so(opened: Open) -> None:
    page, _ = opened()
    until(page, "document.querySelectorAll('.card').length === 4")
    broken = page.locator(".card.error")  # drawn anew with every look at the runs
    for words in ("manifest.json is not JSON", "unreadable"):
        until(page, f"document.querySelector('.card.error').innerText.includes('{words}')")
    broken.get_by_role("button").click()
    page.wait_for_selector("#verdict :text('Cannot be read')")
    page.locator(".card", has_text="first").get_by_role("button").click()
    drawn(page)


def test_a_filter_chooses_layers(opened: Open) -> None:
    page, _ = opened("?run=first")
    drawn(page)
    assert rows(page, "first") == NAMES
    page.fill("#filter", r"norm$")
    until(page, "document.querySelector('#filter-state').textContent === '(8 of 16)'")
    until(page, """document.querySelector('[data-key="heatmap first"] .plot').data[0].y.length === 8""")
    assert rows(page, "first") == [name for name in NAMES if name.endswith("norm")] and query(page)["filter"] == ["norm$"]
    page.fill("#filter", "(")
    until(page, "document.querySelector('#filter-state').textContent.startsWith('not used')")
    assert page.get_attribute("#filter", "aria-invalid") == "true"
    page.fill("#filter", "no such layer")
    until(page, "document.querySelector('#filter-state').textContent === '(0 of 16)'")


def test_an_expression_without_end_is_stopped(opened: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "long", 3, ["a" * 60 + "!"])
    with served(tmp_path) as at:
        page, _ = opened("?filter=" + "(a%2B)%2B%24", at)
        until(page, "document.querySelector('#filter-state').textContent.includes('too long')")
        drawn(page)


def test_runs_are_compared(opened: Open) -> None:
    page, _ = opened("?run=first")
    drawn(page, 3)
    page.get_by_label("Compare second").check()
    page.wait_for_selector('[data-key="heatmap second"] .main-svg')
    until(page, "document.querySelector('[data-key=loss] .plot').data?.length === 2")
    assert query(page)["run"] == ["first", "second"]
    scales = until(
        page,
        "[...document.querySelectorAll('[data-key^=heatmap] .plot')].map(({ data: [{ zmin, zmax }] }) => `${zmin} ${zmax}`)",
    )
    assert len(scales) == 2 and len(set(scales)) == 1
    edge = "getBoundingClientRect().right"
    until(
        page,
        f"[...document.querySelectorAll('.figure')].every((panel) => !(panel.querySelector('.main-svg')?.{edge} > panel.{edge}))",
    )
    page.get_by_label("Compare first").uncheck()
    until(page, "document.querySelectorAll('[data-key^=heatmap]').length === 1")
    page.go_back()
    until(page, "document.querySelectorAll('[data-key^=heatmap]').length === 2")


def test_figures_zoom_together_and_share_a_cursor(opened: Open) -> None:
    page, _ = opened("?run=first&metric=spectral_norm")
    drawn(page, 3)
    area = page.locator('[data-key="heatmap first"] .nsewdrag').bounding_box()
    middle = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + 0.5 * area["width"], middle)
    until(page, "document.querySelectorAll('.cursor:not([hidden])').length === 3")
    labels = page.evaluate("[...document.querySelectorAll('.cursor:not([hidden]) span')].map((label) => label.textContent)")
    assert len(set(labels)) == 1 and 120 < int(labels[0]) < 180
    page.mouse.move(area["x"] + 0.25 * area["width"], middle)
    page.mouse.down()
    page.mouse.move(area["x"] + 0.5 * area["width"], middle, steps=4)
    page.mouse.up()
    until(page, "new URLSearchParams(location.search).has('from')")
    first, last = int(query(page)["from"][0]), int(query(page)["to"][0])
    assert 50 < first < 100 < last < 200
    ranges = (
        "[...document.querySelectorAll('.figure:not([data-key=norm_angle]) .plot')].map((plot) => String(plot.layout.xaxis.range))"
    )
    until(page, f"{ranges}.every((range) => range === '{first},{last}')")
    page.click("#reset")
    until(page, "!new URLSearchParams(location.search).has('from')")


def test_an_address_brings_the_view_back(opened: Open) -> None:
    page, _ = opened("?run=second&run=first&metric=gradient_norm&filter=block1&from=20&to=60&theme=dark")
    drawn(page, 4)
    assert page.input_value("#metric") == "gradient_norm" and page.input_value("#filter") == "block1"
    assert (page.input_value("#from"), page.input_value("#to")) == ("20", "60")
    until(page, """String(document.querySelector('[data-key="heatmap second"] .plot').data[0].y) === 'block1.conv,block1.norm'""")
    until(page, "String(document.querySelector('.plot').layout?.xaxis?.range) === '20,60'")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    until(page, "document.querySelectorAll('.card input:checked').length === 2")
    assert sorted(page.evaluate("[...document.querySelectorAll('.card input:checked')].map((box) => box.ariaLabel)")) == [
        "Compare first",
        "Compare second",
    ]


@pytest.mark.parametrize(
    "query",
    [
        "?run=nowhere",
        "?run=first&metric=evil&from=x&to=NaN&layer=none&theme=pink",
        "?run=first&from=60&to=20",
        "?run=first&filter=%FF%00",
    ],
)
def test_an_address_of_any_form_is_shown(query: str, opened: Open, address: str) -> None:
    page, _ = opened("")
    page.goto(address + query)
    until(page, "document.querySelector('#verdict').textContent.length > 20 && document.querySelector('.card')")


def test_a_layer_is_followed_over_time(opened: Open) -> None:
    page, _ = opened("?run=first&metric=angle")
    drawn(page)
    page.locator('[data-key="heatmap first"] summary').click()
    page.locator('[data-key="heatmap first"]').get_by_role("button", name="block3.norm", exact=True).click()
    page.wait_for_selector('[data-key="layer first"] .main-svg')
    assert "block3.norm" in page.locator('[data-key="layer first"] h2').inner_text() and query(page)["layer"] == ["block3.norm"]


def test_tables_hold_what_figures_show(opened: Open, runs: Path) -> None:
    page, _ = opened("?run=first&metric=gradient_norm")
    drawn(page)
    page.locator('[data-key="heatmap first"] summary').click()
    page.wait_for_selector('[data-key="heatmap first"] tbody tr')
    cells = page.locator('[data-key="heatmap first"] tbody tr').first.locator("th, td").all_inner_texts()
    last = float(ns.load_run(runs / "first").matrix("gradient_norm")[-1, 0])
    assert cells[0] == NAMES[0] and float(cells[3]) == pytest.approx(last, rel=1e-3)


# who it is for -------------------------------------------------------------------------------------------------------


def test_dark_and_light(opened: Open) -> None:
    page, _ = opened("?run=first", color_scheme="dark")
    drawn(page)
    colours = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.plot').layout.font.color].join()"
    dark = until(page, colours)
    page.click("#theme")
    until(page, f"{colours} !== '{dark}'")
    assert query(page)["theme"] == ["light"]
    page.click("#theme")
    until(page, f"{colours} === '{dark}'")


def test_everything_by_keyboard(opened: Open) -> None:
    page, _ = opened("?run=first")
    drawn(page, 3)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    reached: dict[str, int] = {}
    for count in range(60):
        page.keyboard.press("Tab")
        reached.setdefault(
            page.evaluate(
                "document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.textContent.slice(0, 40)"
            ),
            count,
        )
    assert {"theme", "find", "metric", "filter", "from", "to", "Compare second", "second", "As a table"} <= reached.keys()
    assert (
        reached["theme"]
        < reached["find"]
        < reached["Compare second"]
        < reached["metric"]
        < reached["filter"]
        < reached["As a table"]
    )
    page.focus("[aria-label='Compare second']")
    page.keyboard.press("Space")
    page.wait_for_selector('[data-key="heatmap second"]')
    page.focus("#from")
    page.keyboard.type("50")
    page.keyboard.press("Tab")
    page.keyboard.type("90")
    until(page, "String(document.querySelector('.plot').layout?.xaxis.range) === '50,90'")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    until(page, "!new URLSearchParams(location.search).has('to')")


def test_a_narrow_screen(opened: Open) -> None:
    page, _ = opened("?run=planted&run=first", viewport=NARROW)
    drawn(page)
    box = page.locator("#verdict h2").first.bounding_box()
    assert BAD in page.locator("#verdict h2").first.inner_text() and box["y"] + box["height"] < NARROW["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.locator("#run-list summary").click()
    page.locator(".card", has_text="second").get_by_role("button").click()
    page.wait_for_selector('[data-key="heatmap second"]')
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_rule_is_broken(scheme: str, opened: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, _ = opened("?run=planted&run=first", color_scheme=scheme)
    drawn(page, 4)
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    page.wait_for_selector(".panel table tbody tr")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
