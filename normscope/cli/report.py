"""`normscope report`: recorded runs and results of other commands as one HTML file that opens anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import check_writable, writing


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Directories given to ns.watch(run=…), side by side if there are several, and JSON files of any result.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write what happened in trainings, and what other commands found, as one page that needs no network."""
    check_writable(out)

    from normscope.report.file import write_report

    with writing(out):
        problems = write_report(paths, out)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(out)
