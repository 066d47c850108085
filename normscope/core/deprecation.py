"""Calls as the last release took them: they work for one release more, with a warning that says how to write them now."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def earlier(positional: int = 0, **renamed: str) -> Callable[[Function], Function]:
    """Decorator of a public function whose parameters have changed.

    positional: how many of its keyword-only parameters, from the first, could be passed by position.
    renamed: old names of parameters, and what they are called now.

    >>> @earlier(positional=1, colour="color")
    ... def paint(wall, *, color="white", coats=1):
    ...     return f"{wall}: {color}"
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(paint("north", "green"), "/", paint("north", colour="red"))
    north: green / north: red
    >>> for warning in caught:
    ...     print(warning.message)
    paint: pass color= by name; by position it works until the next release
    paint: colour= is now color=; the old name works until the next release
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        first = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        movable = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY][:positional]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            late = dict(zip(movable, args[first:], strict=False))
            if late:
                names = ", ".join(f"{name}=" for name in late)
                _warn(f"{function.__name__}: pass {names} by name; by position it works until the next release")
            for old in [name for name in kwargs if name in renamed]:
                _warn(f"{function.__name__}: {old}= is now {renamed[old]}=; the old name works until the next release")
                late[renamed[old]] = kwargs.pop(old)
            if twice := late.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__}() got two values for {', '.join(sorted(twice))}")
            return function(*args[:first], *args[first + len(movable) :], **late, **kwargs)

        return called  # type: ignore[return-value]

    return decorate


def _warn(message: str) -> None:
    warnings.warn(message, DeprecationWarning, stacklevel=3)
