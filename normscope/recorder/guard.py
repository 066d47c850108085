"""Failures of the recorder stay in the recorder."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Guard:
    """Runs parts of the recorder; one that fails is reported, warned about once, and from then on switched off."""

    def __init__(self, report: Callable[..., None] = lambda *a, **k: None) -> None:
        self.report, self.off = report, set[str]()

    def run(self, what: str, function: Callable[..., Result], *args: Any) -> Result | None:
        """The function's result; None if it fails now or failed before."""
        if what in self.off:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.fail(what, error)
            return None

    def fail(self, what: str, error: Exception) -> None:
        self.off.add(what)
        place = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
        where = f"{place[0].filename.rpartition('/')[2]}:{place[0].lineno}" if place else ""
        message = f"{type(error).__name__}: {error}"
        self.report("error", what=what, message=message, where=where)
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # a user who turns warnings into errors must not get one from here
            warnings.warn(f"normscope.watch no longer records {what}: {message}", stacklevel=3)
