"""`normscope serve`: the dashboard of recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs are, at any depth.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8321,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Any but loopback demands --token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(metavar="SECRET", envvar="NORMSCOPE_TOKEN", help="Demanded of every visitor, as /?token=SECRET.")
    ] = None,
) -> None:
    """Show recorded runs in the browser and follow those that are being written."""
    from normscope.app import server

    def ready(address: str) -> None:
        print(f"normscope: {directory} at {address} (Ctrl-C stops)", flush=True)

    server.serve(directory, host, port, token, ready)
