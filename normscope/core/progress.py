"""How far a computation of unknown length has come: a bar on stderr, or a call of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Union

from normscope.core.errors import InputError
from normscope.core.text import visible

Report = Callable[[str, int, int], None]  # what, how much is done, how much is expected
Wanted = Union[bool, Report, None]


def check_callback(given: object, name: str = "progress") -> None:
    """Refuse what cannot be called to say how far a computation is."""
    if given is not None and not callable(given):
        raise InputError(f"{name} is a function to call with how much is done, or None, not {given!r}")


class Progress:
    """Reports of one computation, in products or in samples."""

    def __init__(self, what: str, report: Report | None, total: int = 0) -> None:
        self.what, self.report, self.total, self.done = what, report, total, 0
        self._first: tuple[int, float] | None = None

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self.report is not None:
            self.report(self.what, self.done, self.total)

    def converging(self, done: int, distance: float) -> None:
        """Expect the distance to fall to 1 as it has fallen so far, by a factor per step."""
        if self.report is None:
            return
        expected = done + 1
        if math.isfinite(distance):
            self._first = self._first or (done, distance)
            fallen = math.log(self._first[1] / max(distance, 1e-300))
            expected = (
                done if distance <= 1 else done + math.ceil((done - self._first[0] + 1) * math.log(distance) / max(fallen, 0.1))
            )
        self.report(self.what, done, expected)


@contextmanager
def shown(what: str, wanted: Wanted, total: int = 0) -> Iterator[Progress]:
    """progress=True: a bar on stderr that leaves nothing behind; a callable: called; else silent."""
    if not isinstance(wanted, bool):
        check_callback(wanted)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if wanted is not True or not console.is_terminal:
        yield Progress(what, wanted if callable(wanted) else None, total)
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def report(what: str, done: int, expected: int) -> None:
            bar.update(task, description=visible(what), completed=done, total=expected or None)  # 0: not known

        yield Progress(what, report, total)
