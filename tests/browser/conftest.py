"""One browser for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import chromium, need_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    need_chromium()
    with chromium() as found:
        yield found
