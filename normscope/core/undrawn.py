"""Imports that draw no random numbers: rich draws one when it is imported, in the middle of somebody's training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Python's random numbers go on as if nothing had happened inside; torch's and numpy's are seen to elsewhere."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
