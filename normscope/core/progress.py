"""How far a computation has come: the parameter `progress` of every public function.

None is silent, True shows a bar on stderr, and a callable is called with (what, done, total); a total of 0 is not known.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Union

from normscope.core.errors import InputError
from normscope.core.text import visible
from normscope.core.undrawn import nothing_drawn

Report = Callable[[str, float, float], None]  # what is being done, how much of it is done, how much is expected
Progress = Union[bool, Callable[[str, Any, Any], Any], None]


class Meter:
    """Counts the parts of one computation that are done, and reports them."""

    def __init__(self, what: str, report: Report | None, total: int = 0) -> None:
        self.what, self.report, self.total, self.done = what, report, total, 0
        self._first: tuple[int, float] | None = None

    def advance(self, count: int = 1) -> None:
        self.done += count
        self.at(self.what)

    def at(self, what: str) -> None:
        """Say what is being done now."""
        if self.report is not None:
            self.report(what, self.done, self.total)

    def converging(self, done: int, distance: float) -> None:
        """Expect the distance to fall to 1 as it has fallen so far, by a factor per step."""
        if self.report is None:
            return
        left = 0 if distance <= 1 else 1
        if 1 < distance < math.inf:
            self._first = self._first or (done, distance)
            fallen = math.log(self._first[1] / distance)
            left = math.ceil((done - self._first[0] + 1) * math.log(distance) / max(fallen, 0.1))
        self.report(self.what, done, done + left)


@contextmanager
def shown(what: str, progress: Progress, total: int = 0) -> Iterator[Meter]:
    """A meter that reports to what the user gave as `progress`; the bar leaves nothing behind."""
    if progress is not True:
        yield Meter(what, None if progress is False else reporting(progress), total)
        return
    with nothing_drawn():
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn
    with bar_report(what, MofNCompleteColumn(), TimeElapsedColumn()) as report:
        yield Meter(what, report, total)


@contextmanager
def bar_report(what: str, *columns: Any) -> Iterator[Report]:
    """What moves a bar; columns: of rich, behind the bar."""
    with progress_bar(*columns) as bar:
        task = bar.add_task(what, total=None)

        def report(what: str, done: float, expected: float) -> None:
            bar.update(task, description=visible(what), completed=done, total=expected or None)  # 0: not known

        yield report


@contextmanager
def progress_bar(*columns: Any) -> Iterator[Any]:
    """rich's bar on stderr, which leaves nothing behind; it does not start where stderr is a file or a pipe."""
    with nothing_drawn():
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    bar = Bar(
        SpinnerColumn(), text, BarColumn(), *(columns or (TimeElapsedColumn(),)), console=Console(stderr=True), transient=True
    )
    with bar if bar.console.is_terminal else nullcontext():  # rich before 14.3 would leave an empty line
        yield bar


def reporting(given: Any) -> Report | None:
    """A callable as it was given; one of the last release's form, which took less, is called with what it takes."""
    if given is None:
        return None
    if not callable(given):
        raise InputError(f"progress must be True, None or a callable (what, done, total), got {given!r}")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # of a builtin without one
        return given  # type: ignore[no-any-return]
    for taken in (("what", "done", "total"), ("done", "total"), ("done",)):
        try:
            signature.bind(*taken)
        except TypeError:
            continue
        if len(taken) == 3:
            return given  # type: ignore[no-any-return]
        said = f"progress is called with (what, done, total); one that takes ({', '.join(taken)}) works until the next release"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return lambda *told: given(*told[1 : 1 + len(taken)])
    raise InputError(f"progress must take (what, done, total), but its signature is {signature}")
