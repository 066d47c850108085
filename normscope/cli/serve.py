"""`normscope serve`: the dashboard of recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normscope.core.errors import InputError


def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs are, at any depth.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")] = 8321,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on; any but loopback needs --token-file.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the access token on one line; by default a new token is made.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="SECRET", envvar="NORMSCOPE_TOKEN", help="The token itself; other users of this machine see it."),
    ] = None,
) -> None:
    """Show recorded runs in the browser and follow those that are being written."""
    try:
        from normscope.dashboard import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11"):
            raise
        raise InputError(f"the dashboard needs {error.name}: pip install 'normscope[dashboard]'") from None

    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the token in {token_file}: {getattr(error, 'strerror', None) or error}") from error

    def ready(address: str) -> None:
        print(f"normscope: {directory} at {address} (Ctrl-C stops)", flush=True)

    server.serve(directory, host, port, token, ready)
