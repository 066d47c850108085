"""`normscope claims`: every statement of both papers, run, with its verdict."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.audit import check_writable, progress_bar, terminal
from normscope.cli.options import seed_of
from normscope.core.errors import InputError


def claims(
    only: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this claim, such as T-T13; may be repeated.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Run the long claims too.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Explain one claim and stop.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JSON; - prints it, and nothing else.")] = None,
    seed: Annotated[int, seed_of("every random instance and training")] = 0,
) -> None:
    """Run the statements of both papers and print what the numbers say of each."""
    from normscope.claims.ledger import explanation, run_claims

    if explain is not None:
        print(explanation(explain))
        return
    to_stdout = json == Path("-")
    check_writable(None if to_stdout else json)
    with redirect_stdout(sys.stderr), progress_bar() as bar:
        task = bar.add_task("claims", total=None)

        def report(id: str, done: int, total: int) -> None:
            bar.update(task, description=f"{id:<16}", completed=done, total=total)

        ledger = run_claims(only or (), long, seed, report)
    if to_stdout:
        print(ledger.to_json())
        return
    if json is not None:
        try:
            ledger.to_json(json)
        except OSError as error:
            raise InputError(f"cannot write {error.filename or json}: {error.strerror}") from error
    terminal().print(ledger.render())
