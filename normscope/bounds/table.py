"""The open list of bounds: functions of a setting, in a table that anyone can add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.bounds.bound import Bound
from normscope.core.errors import NormscopeError

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

Source = Callable[["Setting"], Iterable[Bound]]


@dataclass(frozen=True)
class BoundEntry:
    """A function that gives bounds; cellwise: it sums over cells, so the pass over the sample looks at them."""

    source: Source
    cellwise: bool = False


TABLE: dict[str, BoundEntry] = {}


class NotApplicable(NormscopeError):
    """A bound says nothing about this setting; the message says why, and what it would need."""


def bounds_of(name: str, cellwise: bool = False, overwrite: bool = False) -> Callable[[Source], Source]:
    """Register a function of a `Setting` that gives one or more bounds, or raises `NotApplicable`.

    >>> @bounds_of("The trivial bound")
    ... def trivial(setting):
    ...     yield setting.bound("trivial", setting.loss.bound, "risk")
    >>> TABLE.pop("The trivial bound").source is trivial
    True
    """

    def register(source: Source) -> Source:
        if name in TABLE and not overwrite:
            raise ValueError(f"{name} is taken by {TABLE[name].source.__qualname__}; pass overwrite=True to replace it")
        TABLE[name] = BoundEntry(source, cellwise)
        return source

    return register
