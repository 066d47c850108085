"""docs/experiments.md, made from the experiments: `python -m normscope.lab`."""

from __future__ import annotations

from normscope.lab.experiment import experiments

INTRODUCTION = """\
# Experiments

What `normscope lab run NAME` can run ([lab](lab.md)): the statement that is tested, and whose it is. The verdict follows from what
is measured. This page is made by `python -m normscope.lab`; a test fails when it is stale.

| experiment | statement | source | data |
| --- | --- | --- | --- |
"""


def catalogue() -> str:
    """One row per experiment."""
    rows = [f"| `{e.name}` | {_cell(e.statement)} | {_cell(e.source)} | {e.quick.data} |" for e in experiments().values()]
    return INTRODUCTION + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
