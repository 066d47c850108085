"""Debian's Chromium, driven by playwright, and a note of all that a page says and fetches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 180.0  # seconds, for whatever a page is to do, on a machine that is busy with other things
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """Where Chromium is, if it is here at all."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def need_chromium() -> None:
    """Skip, with the reason, where there is no browser to test with."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if program() is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Heard:
    """What a page said on its console, what went wrong, and which addresses it asked for."""

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @staticmethod
    def of(page: Any) -> Heard:
        page.set_default_timeout(1000 * PATIENCE)
        heard = Heard()
        page.on("console", lambda message: heard.said.append(message.text))
        page.on("pageerror", lambda error: heard.said.append(str(error)))
        page.on("request", lambda request: heard.asked.append(request.url))
        return heard
