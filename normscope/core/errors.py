"""The errors that reach a user: each is one message that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Sequence

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


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits in a message of one line."""
    return str(error).strip().partition("\n")[0]
