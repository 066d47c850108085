"""Results that commands wrote as JSON, beside the runs: a card each, and the report's page of one."""

from __future__ import annotations

from pathlib import Path

from normscope.core.errors import InputError
from normscope.dashboard.card import Card, text
from normscope.report.html import policy
from normscope.report.results import Shown, results_report, shown_results

MOST_BYTES = 16 << 20
POLICY = f"{policy()}; frame-ancestors 'none'"  # the page's own scripts alone


def result_card(id: str, name: str, path: Path, updated: float) -> Card:
    """What a result is, and what it says in a sentence."""
    made = _shown(path).section
    assert made is not None
    return Card(id, name, "result", model=text(made.title), headline=text(made.headline), updated=updated)


def result_page(path: Path) -> str:
    """The report of one result, as HTML."""
    return results_report([_shown(path)])


def _shown(path: Path) -> Shown:
    made = shown_results(path, MOST_BYTES, links=False)
    if made.section is None:
        raise InputError(made.problem)
    return made
