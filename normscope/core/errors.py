"""The errors that reach a user: each is one message that says what is wrong and what to do."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from normscope.core.text import lines


class NormscopeError(Exception):
    """Base class of every error that normscope raises on purpose."""

    def __str__(self) -> str:
        return lines(super().__str__())  # names of layers and files stand in messages


class InputError(NormscopeError, ValueError):
    """An argument cannot be used as given."""


class ExportError(NormscopeError):
    """The model could not be traced into a graph."""


class Refusal(NormscopeError):
    """No certificate can be given; `causes` lists every reason at once, each with its module path."""

    def __init__(self, headline: str, causes: Sequence[str], advice: str = "") -> None:
        self.headline, self.causes, self.advice = headline, tuple(causes), advice
        message = f"{headline}: " + "; ".join(self.causes)
        super().__init__(f"{message}. {advice}" if advice else message)


class NoConstant(Refusal):
    """The model is not a function of one sample (it is random, or samples influence each other): there is no constant to bound."""


class EvaluationError(Refusal, RuntimeError):
    """One operation of a graph cannot be evaluated: what torch raised is the `__cause__`."""


class UnforeseenError(Refusal):
    """A case that normscope did not foresee: what was raised is the `__cause__`."""


class InternalError(NormscopeError, AssertionError):
    """normscope contradicts itself, so that no number of this call may be trusted."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a bug of normscope: {what}; please report it")


NO_CERTIFICATE = "no certificate: "  # how headlines of refusals begin that are about a certificate


def joined(unknown: Refusal | None, refused: Sequence[Refusal]) -> Refusal | None:
    """One refusal that lists all causes: of operations that are not known, and of those whose rule refuses, with its reason."""
    every = [*([unknown] if unknown is not None else []), *refused]
    if len(every) <= 1:
        return every[0] if every else None
    causes = [f"{cause}: {one.headline.removeprefix(NO_CERTIFICATE)}" for one in refused for cause in one.causes]
    causes = [*(unknown.causes if unknown is not None else ()), *causes]
    kind = NoConstant if any(isinstance(one, NoConstant) for one in every) else Refusal
    advice = " ".join(dict.fromkeys(one.advice for one in every if one.advice))
    return kind(f"{NO_CERTIFICATE}{len(causes)} operations without a bound", causes, advice)


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits in a message of one line."""
    return str(error).strip().partition("\n")[0]


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def boundary(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a public function: no exception but ours leaves it.

    Whatever else is raised becomes a refusal that names the operation at work, if any, and keeps the exception as its cause.
    A call with the wrong arguments raises TypeError, as any function does.
    """

    @functools.wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except NormscopeError:
            raise
        except Exception as error:
            if len(_frames(error)) == 1:  # raised by the call itself
                raise
            raise unforeseen(function.__name__, error) from error

    return guarded


def unforeseen(name: str, error: Exception) -> UnforeseenError:
    """What an exception becomes that was caught in the function of that name."""
    frames = _frames(error)[1:] or _frames(error)
    if isinstance(error, MemoryError):
        return UnforeseenError(f"{name} ran out of memory", [_place(frames)], "Take a smaller model, region or batch.")
    cause = f"{_place(frames)}: {type(error).__name__}: {first_line(error) or 'no message'}"
    called = _foreign(frames)
    if called:
        return UnforeseenError(f"{name} called {called}, which raised an exception", [cause])
    return UnforeseenError(f"{name} does not cover this case", [cause], "This is a limitation of normscope: please report it.")


def _frames(error: Exception) -> list[FrameType]:
    found, step = [], error.__traceback__
    while step is not None:
        found.append(step.tb_frame)
        step = step.tb_next
    return found


def _place(frames: Sequence[FrameType]) -> str:
    """The graph's node that was at work (operation, module path, source line), or else our function."""
    for frame in reversed(frames):
        for value in map(frame.f_locals.get, ("node", "top", "self", "output")):
            if isinstance(getattr(value, "op", None), str) and isinstance(label := getattr(value, "label", None), str):
                return label
    own = [frame for frame in frames if _is_own(frame)]
    return f"{own[-1].f_globals['__name__']}.{own[-1].f_code.co_name}" if own else "unknown place"


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "normscope"


def _foreign(frames: Sequence[FrameType]) -> str:
    """The user's own code (a rule, data, a callback), if the exception was raised there."""
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    last: Any = frames[-1].f_code
    path = Path(last.co_filename)
    if _is_own(frames[-1]) or not path.is_file() or any(path.is_relative_to(place) for place in installed):
        return ""
    return f"{path.name}:{last.co_firstlineno} ({last.co_name})"
