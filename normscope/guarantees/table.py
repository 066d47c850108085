"""The open list of bounds: functions of a setting, in a table that anyone can add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from normscope.core.errors import NormscopeError
from normscope.guarantees.bound import Bound

if TYPE_CHECKING:
    from normscope.guarantees.setting import Setting

Source = Callable[["Setting"], Iterable[Bound]]

TABLE: dict[str, Source] = {}


class NotApplicable(NormscopeError):
    """A bound says nothing about this setting; the message says why, and what it would need."""


def bounds_of(name: str, overwrite: bool = False) -> Callable[[Source], Source]:
    """Register a function of a `Setting` that gives one or more bounds, or raises `NotApplicable`.

    >>> @bounds_of("The trivial bound")
    ... def trivial(setting):
    ...     yield setting.bound("trivial", setting.loss.bound, "risk")
    >>> TABLE.pop("The trivial bound") is trivial
    True
    """

    def register(source: Source) -> Source:
        if name in TABLE and not overwrite:
            raise ValueError(f"{name} is taken by {TABLE[name].__qualname__}; pass overwrite=True to replace it")
        TABLE[name] = source
        return source

    return register
