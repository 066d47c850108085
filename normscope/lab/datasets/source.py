"""Where a data set comes from, and what to say when it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from normscope.core.errors import InputError
from normscope.lab.datasets.split import Split


@dataclass(frozen=True)
class Source:
    """load: makes the split, from a directory where there are files. how: to get the files, in one line.

    folders: where the files may be, below the directory that is passed or on any machine.
    """

    load: Callable[..., Split]
    files: tuple[str, ...] = ()
    how: str = ""
    folders: tuple[str, ...] = ()

    def split(self, name: str, directory: Path | None = None) -> Split:
        return self.load(self.find(name, directory)) if self.files else self.load()

    def find(self, name: str, directory: Path | None) -> Path:
        """The directory that holds all files: the one given, or a usual folder in it."""
        roots = [] if directory is None else [directory]
        for root in [*roots, *((directory or Path()) / folder for folder in self.folders)]:
            if not self._missing(root):
                return root
        if directory is None:
            raise InputError(f"{name} is read from files: {self.how}")
        raise InputError(f"{directory} lacks {', '.join(self._missing(directory))} of {name}: {self.how}")

    def _missing(self, root: Path) -> list[str]:
        return [file for file in self.files if not any((root / name).is_file() for name in (file, f"{file}.gz"))]
