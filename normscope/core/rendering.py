"""Reports that print the same in a terminal, in a notebook and as a string, whatever the names in them hold."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from normscope.core.text import inert, visible
from normscope.core.undrawn import nothing_drawn

with nothing_drawn():  # every other module has these from here
    from rich.console import Console as Console
    from rich.console import Group as Group
    from rich.console import RenderableType as RenderableType
    from rich.padding import Padding as Padding
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

PREFORMATTED = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
WIDTH = 100  # columns that every report fits in


class Text(RichText):
    """One line of words as they are: rich's own class lets escape sequences through. Line breaks at either end make room."""

    def __init__(self, text: str = "", *rest: Any, **options: Any) -> None:
        super().__init__(_one_line(text), *rest, **options)

    def append(self, text: Any, style: Any = None) -> Text:
        super().append(_one_line(text) if isinstance(text, str) else text, style)
        return self

    @classmethod
    def of_lines(cls, lines: Iterable[str], style: str = "") -> Text:
        """Several lines."""
        made = cls("", style)
        for number, line in enumerate(lines):
            made.append("\n" if number else "").append(visible(line))
        return made


def _one_line(text: str) -> str:
    inside = text.strip("\n")
    return text if inside.isprintable() else text.replace(inside, visible(inside), 1)


class Table(RichTable):
    """A table whose cells are words as they are: rich's own class takes strings as markup, so `a[b]` would lose its end."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells), **options)

    def add_column(self, header: RenderableType = "", *rest: Any, **options: Any) -> None:
        super().add_column(Text(header) if isinstance(header, str) else header, *rest, **options)


class Rendered:
    """Something with a `render` method, made printable."""

    def render(self) -> RenderableType:
        """The report as a rich renderable."""
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        return self.render()

    def __str__(self) -> str:
        console = Console(width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self.render())
        return inert(captured.get().rstrip())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text("…" if cycle else str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same text, coloured, in the page's own font colour."""
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(self.render())
        return console.export_html(inline_styles=True, code_format=PREFORMATTED)
