"""Reports that print the same in a terminal, in a notebook and as a string."""

from __future__ import annotations

from rich.console import Console, RenderableType

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
