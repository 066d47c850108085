"""`normscope report`: recorded runs as one HTML file that opens anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.audit import check_writable
from normscope.core.errors import InputError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Directories given to ns.watch(run=…); several are compared.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write what happened in a training, or in several side by side, as one page that needs no network."""
    check_writable(out)

    from normscope.report.run_page import write_run_report

    try:
        write_run_report(runs, out)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    print(out)
