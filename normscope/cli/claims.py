"""`normscope claims`: every statement of both papers, run, with its verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from normscope.cli.options import JsonFile, seed_of
from normscope.cli.output import check_writable, progress, terminal, write_json


def claims(
    select: Annotated[
        list[str] | None,
        typer.Option("--select", "--only", metavar="ID", help="Run only this claim, such as T-T13; may be repeated."),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Run the long claims too.")] = False,
    list: Annotated[bool, typer.Option("--list", help="List the claims and stop.")] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Change every statement, and list which changes the checks catch.")
    ] = False,
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Explain one claim and stop.")] = None,
    json: JsonFile = None,
    seed: Annotated[int, seed_of("every random instance and training")] = 0,
) -> None:
    """Run the statements of both papers and print what the numbers say of each."""
    from normscope.claims.claim import contents, explanation, run_claims

    if list:
        print(contents())
        return
    if explain is not None:
        print(explanation(explain))
        return
    if mutants:
        _list_mutants(select or [], long, seed)
        return
    check_writable(json)
    with progress("claims") as report:
        ledger = run_claims(select or (), long=long, seed=seed, progress=lambda id, *done: report(f"{id:<18}", *done))
    write_json(ledger.to_dict(), json)
    terminal(json).print(ledger.render())


def _list_mutants(select: Sequence[str], long: bool, seed: int) -> None:
    from normscope.claims.claim import find, load
    from normscope.claims.mutants import report

    claims = {claim.id: claim for claim in map(find, select)} or {
        id: claim for id, claim in load().items() if long or not claim.long
    }
    out = sys.stdout  # each line as soon as it is there: all of them take minutes
    with progress("mutants") as show:
        for line in report(claims, seed, lambda id, done, total: show(f"{id:<18}", done, total)):
            print(line, file=out, flush=True)
