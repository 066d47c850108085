"""One browser for all tests of pages, and one directory of runs for all tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.chromium import Heard, chromium, need_chromium
from tests.browser.dashboard import GONE, NAMES, WIDE, Open
from tests.browser.planted import train
from tests.browser.serving import served
from tests.report.recordings import write_run

HARMLESS = (*GONE, "preloaded using link preload")  # said where the machine is slow


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    need_chromium()
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "first", 300, NAMES)
    write_run(root / "second", 200, NAMES, seed=1)
    (root / "broken").mkdir()
    (root / "broken" / "manifest.json").write_text("{")
    train(root / "planted", epochs=1)
    return root


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    with served(runs) as found:
        yield found


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Open]:
    """How to open the dashboard: its page, and what was heard of it. Whatever a test does, nothing is complained of or fetched elsewhere."""
    pages: list[tuple[Any, Heard]] = []

    def open_page(query: str = "", at: str = address, wait: str = "#verdict h2", **options: Any) -> tuple[Any, Heard]:
        page = browser.new_page(**{"viewport": WIDE, **options})
        pages.append((page, Heard.of(page)))
        page.goto(at + query)
        page.wait_for_selector(wait)
        return pages[-1]

    yield open_page
    for page, heard in pages:
        page.close()
        assert [said for said in heard.said if not any(part in said for part in HARMLESS)] == []
        assert {urlsplit(url).hostname for url in heard.asked if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
