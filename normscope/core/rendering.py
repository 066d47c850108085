"""Reports that print the same in a terminal, in a notebook and as a string."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

PREFORMATTED = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
WIDTH = 100  # columns that every report fits in


class Rendered:
    """Something with a `render` method, made printable."""

    def render(self) -> RenderableType:
        """The report as a rich renderable."""
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        return self.render()

    def __str__(self) -> str:
        console = Console(width=WIDTH, color_system=None, force_terminal=False, file=None)
        with console.capture() as captured:
            console.print(self.render())
        return captured.get().rstrip()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text("…" if cycle else str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same text, coloured, in the page's own font colour."""
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(self.render())
        return console.export_html(inline_styles=True, code_format=PREFORMATTED)
