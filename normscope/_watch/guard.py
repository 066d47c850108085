"""Failures of the recorder stay in the recorder."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Guard:
    """Runs parts of the recorder; one that fails is reported, warned about once, and from then on switched off.

    stop: ends the recording. Only exceptions end here: an interrupt goes on to the loop that it is meant for.
    """

    def __init__(self, report: Callable[..., None] = lambda *a, **k: None, stop: Callable[[], None] = lambda: None) -> None:
        self.report, self.stop, self.off = report, stop, set[str]()
        self.process: int | None = os.getpid()  # none: of a recording that could not begin
        self.over = False

    def hook(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function as torch may call it: whatever fails in it ends the recording and nothing else."""
        return partial(self._unless_over, function)

    def _unless_over(self, function: Callable[..., None], *args: Any) -> None:
        if not self.over:  # a hook whose removal failed does nothing
            self.outermost(function, *args)

    def outermost(self, function: Callable[..., Result], *args: Any) -> Result | None:
        """Every call from outside comes through here. A forked process does nothing, and compiled code traces it to nothing."""
        if torch.compiler.is_compiling() or os.getpid() != self.process:
            return None
        try:
            with torch._C.DisableTorchFunction():  # a subclass of Tensor, or a mode, would run code of the user's
                return function(*args)
        except Exception as error:  # whatever it is, it is told and training continues
            with suppress(Exception):
                self.fail("rows", error)
            with suppress(Exception):
                self.stop()
            return None

    def run(self, what: str, function: Callable[..., Result], *args: Any) -> Result | None:
        """The function's result; None if it fails now or failed before."""
        if what in self.off:
            return None
        try:
            return function(*args)
        except Exception as error:  # likewise: one kind of number is no longer recorded
            self.fail(what, error)
            return None

    def insist(self, what: str, function: Callable[..., object], *args: Any) -> None:
        """Run what must happen at the end, lest a hook or a thread stay behind: a failure is reported, and it is tried again."""
        for _ in range(2):
            try:
                function(*args)
                return
            except Exception as error:  # reported, and tried once more
                self.fail(what, error)

    def fail(self, what: str, error: BaseException) -> None:
        if what in self.off:
            return
        self.off.add(what)
        place = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
        where = f"{place[0].filename.rpartition('/')[2]}:{place[0].lineno}" if place else ""
        message = f"{type(error).__name__}: {error}"
        with suppress(Exception):
            self.report("error", what=what, message=message, where=where)
        warn(f"normscope.watch no longer records {what}: {message}")


def warn(message: str) -> None:
    """A warning that raises nothing: not where warnings are errors, nor where the stream for them is closed."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(message, stacklevel=4)
