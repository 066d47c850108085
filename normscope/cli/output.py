"""Where output goes: results to stdout or into files; progress, and what a model's own code prints, to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from normscope.core.errors import InputError
from normscope.core.progress import Report, bar_report
from normscope.core.rendering import Console
from normscope.core.text import inert

WIDTH = 100  # of what is printed into a file or a pipe
STDOUT = Path("-")


def check_writable(*paths: Path | None) -> None:
    """Refuse at once a file that could not be written after minutes of work."""
    for path in paths:
        if path is None or path == STDOUT:
            continue
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a directory")
        if not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no directory {path.parent}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the file system says against writing `path`, as an error that the user can fix."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {error.filename or path}: {error.strerror or error}") from error


def write_json(content: Any, path: Path | None) -> None:
    """Plain values as JSON into a file, or to stdout for -; nothing without a path."""
    if path == STDOUT:
        from normscope.core.codec import encode

        print(encode(content))
    elif path is not None:
        write_json_file(content, path)


def write_json_file(content: Any, path: Path) -> None:
    from normscope.core.codec import encode

    with writing(path):
        path.write_text(encode(content) + "\n", encoding="utf-8")


def terminal(json: Path | None = None) -> Console:
    """Standard output; 100 columns wide and inert where it is not a terminal, silent where JSON has it to itself."""
    return _console(sys.stdout, quiet=json == STDOUT)


def errors() -> Console:
    """Standard error, likewise."""
    return _console(sys.stderr)


def _console(stream: TextIO, quiet: bool = False) -> Console:
    console = partial(Console, highlight=False, markup=False, emoji=False, quiet=quiet)
    return console(file=stream) if stream.isatty() else console(file=cast(TextIO, _Log(stream)), width=WIDTH)


class _Log:
    """A stream that a CI server may read: what a name holds is no command to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(inert(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def progress(first: str) -> Iterator[Report]:
    """A bar that a computation moves. Meanwhile stdout is stderr: what a model's own code prints is not a result."""
    with redirect_stdout(sys.stderr), bar_report(first) as report:
        yield report
