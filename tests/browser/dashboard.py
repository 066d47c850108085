"""What tests of the dashboard share: screens, waiting for what a page shows, and the state that its address holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.browser.chromium import PATIENCE, Heard

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
GONE = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_SOCKET_NOT_CONNECTED", "ERR_EMPTY_RESPONSE")  # a test's own server
NAMES = [f"block{i}.{kind}" for i in range(8) for kind in ("conv", "norm")]

Open = Callable[..., tuple[Any, Heard]]


def until(page: Any, expression: str, patience: float = PATIENCE) -> Any:
    """Wait for an expression to hold, and give its value; while a figure is drawn anew, parts of it may be missing.

    Playwright's own way to wait evaluates a string in the page, which its policy forbids.
    """
    deadline = time.monotonic() + patience
    while not (found := page.evaluate(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")):
        assert time.monotonic() < deadline, f"never: {expression}"
        page.wait_for_timeout(50)
    return found


def drawn(page: Any, figures: int = 1) -> None:
    until(page, f"document.querySelectorAll('.plot:has(.main-svg)').length >= {figures}")


def query(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)
