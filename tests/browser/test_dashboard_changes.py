"""The dashboard in a real browser while what it shows changes: trainings that run, findings, servers that stop, other files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import normscope as ns
from tests.browser.dashboard import GONE, NAMES, Open, drawn, until
from tests.browser.serving import served
from tests.report.recorded_results import an_audit
from tests.report.recordings import write_run

HOSTILE = "<img src=x onerror=\"document.title='caught'\"></script><b>bold</b>"


def test_a_training_is_followed_as_it_runs(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as at:
        page, _ = opened("", at)
        assert "No runs here yet" in page.locator("#verdict").inner_text()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.browser.training", str(tmp_path / "runs" / "now")],
            stdin=subprocess.PIPE,
            cwd=Path(ns.__file__).parents[1],
        )
        try:
            page.wait_for_selector(".card.live")
            drawn(page)
            step = "Number(document.querySelector('.card .facts').textContent.match(/step ([0-9,]+)/)?.[1].replace(',', '') ?? 0)"
            shown = "(document.querySelector('[data-key=loss] .plot')?.calcdata?.[0].length ?? 0)"
            for value in (step, shown):
                before = until(page, value)
                until(page, f"{value} > {before + 3}")
            assert "following 1 live run" in page.locator("#connection").inner_text()
            behind = int(ns.load_run(tmp_path / "runs" / "now").table(["step"])["step"][-1].as_py())
            until(page, f"{step} >= {behind}")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
        page.wait_for_selector(".card.finished")


def test_a_finding_appears_when_it_is_written(opened: Open, tmp_path: Path) -> None:
    from tests.watch.test_store import opened as writing
    from tests.watch.test_store import row

    writer = writing(tmp_path / "run")
    writer.event("started", step=0)
    writer.row(row(1))
    with served(tmp_path) as at:
        page, _ = opened("", at)
        page.wait_for_selector("#verdict :text('No warnings')")
        writer.event(
            "finding", rule="dead-units", step=1, layer="layer4", evidence={}, message="most units are off", fix="wake them"
        )
        page.wait_for_selector("#verdict code:text('layer4')")
        assert "wake them" in page.locator("#findings").inner_text()
        writer.close()


def test_a_server_that_went_away_is_said(opened: Open, runs: Path) -> None:
    with served(runs) as at:
        page, heard = opened("", at)
    until(page, "document.querySelector('#connection').textContent.includes('does not answer')")
    time.sleep(0.1)
    assert all(any(sign in said for sign in GONE) for said in heard.said)


def test_hostile_names_do_nothing(opened: Open, tmp_path: Path) -> None:
    finding = {"rule": HOSTILE, "step": 3, "layer": HOSTILE, "evidence": {"affected": 1}, "message": HOSTILE, "fix": HOSTILE}
    write_run(tmp_path / HOSTILE.replace("/", "|"), 10, [HOSTILE, "fine"], finding=finding)
    with served(tmp_path) as at:
        page, heard = opened("", at)
        drawn(page)
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        page.wait_for_selector(".panel table tbody tr")
        page.mouse.move(600, 500)
        assert HOSTILE in page.locator("#verdict").inner_text()
        assert page.title() == "normscope" and page.locator("img[src=x], main b:text-is('bold')").count() == 0
        assert not any(url.endswith("/x") for url in heard.asked)


def test_results_stand_beside_runs_and_open_as_pages(opened: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20, NAMES)
    an_audit().to_json(tmp_path / "audit.json")
    with served(tmp_path) as address:
        page, _ = opened(at=address)
        card = page.locator(".card.result")
        assert "Audit of Sequential" in card.inner_text() and "Lipschitz constant" in card.inner_text()
        assert "all 20 steps" in page.inner_text("#verdict"), "the newest is a result, yet a run is shown"
        page.fill("#find", "aud")
        page.wait_for_selector("text=1 of 2")
        assert page.locator(".card").count() == 1 and "all 20 steps" in page.inner_text("#verdict")
        result, _ = opened(at=f"{address}result?id=audit.json", wait="main h2")
        result.wait_for_selector(".plot .main-svg")


def test_a_run_that_is_not_listed_is_found_by_its_name_and_kept_by_its_address(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.dashboard.listing.MOST_LISTED", 3)
    monkeypatch.setattr("normscope.dashboard.listing.MOST_SHOWN", 3)
    for number in range(8):
        write_run(tmp_path / f"run{number}", 10 + number, NAMES)
        os.utime(tmp_path / f"run{number}" / "events.jsonl", (2e9 + number, 2e9 + number))
    with served(tmp_path) as address:
        page, _ = opened(at=address)
        page.wait_for_selector("text=8; the newest 3 are listed")
        assert page.locator(".card .name").all_inner_texts() == ["run7", "run6", "run5"]
        page.fill("#find", "run1")
        page.click(".card .name:text('run1')")
        page.wait_for_selector("text=all 11 steps")
        page.fill("#find", "")
        page.wait_for_selector(".card .name:text('run7')")
        assert "all 11 steps" in page.inner_text("#verdict") and "run=run1" in page.url
        again, _ = opened(at=page.url)
        again.wait_for_selector("text=all 11 steps")
