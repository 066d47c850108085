"""`normscope lab`: experiments of the papers, on digits in minutes or in full."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

from normscope.cli.output import check_writable, terminal
from normscope.core.errors import InputError
from normscope.core.progress import bar_report
from normscope.core.rendering import Console, Table

if TYPE_CHECKING:
    from normscope.core.progress import Report
    from normscope.lab.executors import Executor
    from normscope.lab.runner import Outcome

EVERY = 60.0  # seconds between two lines of progress in a file
EARLY = 0.005  # of the work: before that, how long it takes cannot be told

lab = typer.Typer(help="Experiments of the papers: list, run, show.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="An experiment of `normscope lab list`.")]
Full = Annotated[
    bool, typer.Option("--full", help="Use the paper's settings instead of the quick ones, which take a minute or two.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where trials, result.json and figures go.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@lab.command("list")
def list_experiments() -> None:
    """Every experiment, with the statement that it tests."""
    from normscope.lab.experiment import experiments

    table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in ("experiment", "source", "statement"):
        table.add_column(column, overflow="fold")
    for experiment in experiments().values():
        table.add_row(experiment.name, experiment.source, experiment.statement)
    terminal().print(table)


@lab.command()
def run(
    name: Name,
    full: Full = False,
    data: Annotated[str | None, typer.Option(metavar="NAME", help="Another data set: cifar10, fashion-mnist, …")] = None,
    dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The directory of the data set's files.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds to run: 0, 1, …")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; may be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many trials run at a time.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads per trial; the same number gives the same results.")] = 1,
    on: Annotated[str | None, typer.Option(metavar="ray|ray:ADDRESS", help="Run trials on a Ray cluster.")] = None,
    out: Out = Path("runs/lab"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished trials again.")] = False,
    json: Json = False,
) -> None:
    """Run an experiment, or finish it where it stopped, and say what it shows."""
    from normscope.lab.runner import run_experiment

    changes = dict(_pair(text) for text in set or [])
    changes |= {"data": data} if data is not None else {}
    changes |= {"seeds": ",".join(map(str, range(seeds)))} if seeds is not None else {}
    with _progress(name) as report:
        outcome = run_experiment(
            name, full=full, settings=changes, out=out, data_directory=dir, workers=workers, threads=threads,
            executor=_executor(on), fresh=fresh, progress=report,
        )  # fmt: skip
    _print(outcome, json)
    if outcome.failures:
        raise typer.Exit(2)


@lab.command()
def show(name: Name, full: Full = False, out: Out = Path("runs/lab"), json: Json = False) -> None:
    """What an experiment that was run before shows."""
    from normscope.lab.runner import load_experiment

    outcome = load_experiment(name, full=full, out=out)
    _print(outcome, json)


@lab.command()
def document(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Directories that `lab run --out` has filled.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="The page, in Markdown; pictures go beside it.")],
) -> None:
    """Make a page of the results of experiments, with their figures."""
    from normscope.lab.documentation import write_page

    check_writable(to)
    write_page(directories, to)


def _print(outcome: Outcome, json: bool) -> None:
    if json:
        print(outcome.to_json())
    else:
        terminal().print(outcome.render(), f"figures and result.json in {outcome.directory}", sep="\n")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--set takes NAME=VALUE, such as epochs=3, got {text!r}")
    return name, value


def _executor(on: str | None) -> Executor | None:
    if on is None:
        return None
    where, _, address = on.partition(":")
    if where != "ray":
        raise InputError(f"--on takes ray or ray:ADDRESS, got {on!r}")
    from normscope.lab.cluster import OnRay

    return OnRay(address or None)


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """A bar with the time left on a terminal; in a file, one line per minute."""
    if not Console(stderr=True).is_terminal:
        yield _Lines(name).report
        return
    with bar_report(name, TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()) as report:
        yield lambda what, done, total: report(f"{name}, {int(done)} of {total:g} trials", done, total)


class _Lines:
    """Progress as lines of text on stderr, at most one per minute."""

    def __init__(self, name: str) -> None:
        self.name, self.start, self.last, self.ended = name, time.monotonic(), 0.0, False

    def report(self, what: str, done: float, total: float) -> None:
        now = time.monotonic()
        if self.ended or (now - self.last < EVERY and done < total):
            return
        self.last, self.ended = now, done >= total
        minutes = (now - self.start) * (total - done) / max(done, 1e-9) / 60
        left = f"about {minutes:.0f} minutes left" if done > EARLY * total else "time left not known yet"
        print(f"{self.name}: {done:.2f} of {total:g} trials, {left}", file=sys.stderr, flush=True)
