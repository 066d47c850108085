"""`normscope export`: a recorded run in the form of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import writing
from normscope.core.errors import InputError

FORMS = ("tensorboard", "parquet", "csv")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory given to ns.watch(run=…).")],
    to: Annotated[str, typer.Option(metavar="|".join(FORMS), help="The format to write.")],
    out: Annotated[Path | None, typer.Option(metavar="PATH", help="Where to write it; by default beside the run.")] = None,
) -> None:
    """Write a recorded run as TensorBoard events, Parquet or CSV."""
    if to not in FORMS:
        raise InputError(f"no form {to!r}: choose from {', '.join(FORMS)}")

    from normscope._watch.exporters.tables import to_csv, to_parquet
    from normscope._watch.exporters.tensorboard import to_tensorboard
    from normscope._watch.reading import load_run

    writers = {"tensorboard": to_tensorboard, "parquet": to_parquet, "csv": to_csv}
    target = out or run / ("run.parquet" if to == "parquet" else to)
    with writing(target):
        for path in writers[to](load_run(run), target):
            print(path)
