"""A page of results, made from the result.json files of experiments that were run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normscope._watch.store import plain
from normscope.core.errors import InputError
from normscope.lab.experiment import find
from normscope.lab.runner import Outcome
from normscope.lab.tasks import RESULT

MARK = "<!-- results: written by normscope lab document, which keeps what stands above this line -->"
HEAD = """# Reproduction

Experiments of the papers as they were run here.
"""
LEGEND = """
## How to read the results
`normscope lab document DIR … --to FILE` made what follows from the `result.json` files of `normscope lab run`; no number in it was
typed. A row says what the paper states, what was measured, and whether they agree; a row without a verdict is a number on which
the paper is silent. `10^a → 10^b` is before training → after.

Norms are of weights as matrices (out, everything else) unless a row says *operators*; variances are those of one fixed batch in
training mode; *eval mode* rows use running statistics. The definitions are those of [audit](audit.md): the same network has
products that are tens of orders of magnitude apart, depending on which is meant.
"""


def write_page(directories: Sequence[Path], page: Path) -> None:
    """One section per result, named after its directory, with still pictures of its figures in `images/` beside the page.

    What someone wrote above the results stays.
    """
    head = _written(page)
    names = [directory.resolve().name for directory in directories]
    if len({*names}) < len(names):
        raise InputError(f"results go by the names of their directories, and these are the same: {', '.join(sorted(names))}")
    outcomes = [(name, outcome) for name, directory in zip(names, directories, strict=True) for outcome in load_results(directory)]
    images = page.parent / "images" / page.stem
    images.mkdir(parents=True, exist_ok=True)
    sections = [_section(name, outcome, images, page.parent) for name, outcome in outcomes]
    page.write_text("\n".join([head + MARK, LEGEND, *sections]), encoding="utf-8")


def load_results(directory: Path) -> list[Outcome]:
    """Every result in a directory that was passed to `normscope lab run --out`."""
    paths = sorted(path for path in directory.glob(f"*/{RESULT}") if path.parent.name != "trials")
    if not paths:
        raise InputError(f"no result in {directory}: pass a directory that `normscope lab run NAME --out DIR` has filled")
    return [Outcome(path.parent, json.loads(path.read_text())) for path in paths]


def _written(page: Path) -> str:
    """What stands above the results; a page that was not made here is not overwritten."""
    if not page.exists():
        return HEAD
    head, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise InputError(f"{page} is not a page of results: choose another file, or put this line where they go: {MARK}")
    return head


def _section(name: str, outcome: Outcome, images: Path, base: Path) -> str:
    content = outcome.content
    lines = [f"## {content['experiment']}: {name}", "", f"*{content['source']}.* {content['statement']}", ""]
    lines += [f"**{outcome.verdict}.** {_effort(content)}", "", f"```\n{_command(content)}\n```", ""]
    lines += ["| quantity | the paper | here | |", "| --- | --- | --- | --- |"]
    lines += [f"| {_cell(row.quantity)} | {_cell(row.paper)} | {_cell(row.ours)} | {row.answer} |" for row in outcome.comparisons]
    lines += ["", *_pictures(outcome, images / f"{content['experiment']}-{name}", base)]
    return "\n".join(lines)


def _command(content: Any) -> str:
    """What to type to run it again."""
    experiment, full = find(content["experiment"]), content["mode"] == "full"
    defaults = plain(asdict(experiment.full if full else experiment.quick))
    words = ["normscope", "lab", "run", experiment.name, *(["--full"] if full else [])]
    for name, value in content["settings"].items():
        if value != defaults.get(name):
            words += ["--data", value] if name == "data" else ["--set", f"{name}={json.dumps(value)}"]
    return shlex.join(words)


def _effort(content: Any) -> str:
    hours = sum(trial["seconds"] for trial in content["trials"]) / 3600
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    trials = "1 trial" if len(content["trials"]) == 1 else f"{len(content['trials'])} trials"
    return f"Data: {content['settings']['data']}. {trials}, {hours:.2f} hours in all; {versions}."


def _pictures(outcome: Outcome, start: Path, base: Path) -> list[str]:
    from normscope.report.svg import svg

    lines = []
    for name in outcome.figures:
        figure = outcome.figure(name)
        path = start.with_name(f"{start.name}-{name}.svg")
        path.write_text(svg(figure), encoding="utf-8")
        lines += [f"![{figure.layout.title.text}]({path.relative_to(base).as_posix()})", ""]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
