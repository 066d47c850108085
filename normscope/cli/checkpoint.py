"""`normscope checkpoint`: what files of weights hold, without building the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from normscope.cli.doctor import SEVERITIES, fails
from normscope.cli.options import FailOn, HtmlFile, JsonFile, SarifFile
from normscope.cli.output import STDOUT, check_writable, terminal, write_json, write_json_file, writing
from normscope.core.errors import InputError
from normscope.core.progress import progress_bar
from normscope.core.text import visible


def checkpoint(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files or directories of weights.")],
    sample: Annotated[bool, typer.Option("--sample", help="Estimate spectral norms; the default proves them.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="How many processes to use.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Work on this Ray cluster; local starts one on this machine.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file that keeps results; by default beside the first output.")
    ] = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    sarif: SarifFile = None,
    fail_on: FailOn = "error",
) -> None:
    """Audit files of weights: proved norms, pairs of γ and weights, bounds on logits, findings."""
    if fail_on not in SEVERITIES:
        raise InputError("--fail-on must be error, warning, info or never")
    if len(paths) > 1 and (html is not None or sarif is not None):
        raise InputError("--html and --sarif take one PATH: run the command once for each")
    check_writable(json, html, sarif, cache)
    from normscope._checkpoint.auditing import checkpoint as audit
    from normscope.findings.sarif import to_sarif

    written = next((file for file in (cache, json, html, sarif) if file is not None and file != STDOUT), None)
    kept = cache if cache is not None or written is None else written.with_name(written.name + ".cache")
    reports = []
    for path in paths:
        with bytes_done() as report:
            address = None if ray is None else "" if ray == "local" else ray
            reports.append(audit(path, sample=sample, cache=kept, workers=workers, ray=address, progress=report))
        terminal(json).print(reports[-1].render())
    contents = [report.to_dict() for report in reports]
    write_json(contents if len(contents) > 1 else contents[0], json)
    if html is not None:
        with writing(html):
            reports[0].to_html(html)
    if sarif is not None:
        write_json_file(to_sarif(reports[0].findings, str(paths[0])), sarif)
    if any(fails(report.findings, fail_on) for report in reports):
        raise typer.Exit(1)


@contextmanager
def bytes_done() -> Iterator[Any]:
    """A bar in bytes with the time left; if stderr is not a terminal, a line every minute."""
    with progress_bar() as bar:
        task = bar.add_task("reading headers", total=None)
        began = said = time.monotonic()

        def report(name: str, done: float, total: float) -> None:
            nonlocal said
            now = time.monotonic()
            left = (now - began) * (total - done) / max(done, 1)
            what = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {left:.0f} s left: {visible(name)}"
            bar.update(task, description=what, completed=done, total=total)
            if not sys.stderr.isatty() and now - said > 60:
                said = now
                print(f"normscope: {what}", file=sys.stderr)

        yield report
