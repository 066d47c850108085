"""Results that commands wrote as JSON, beside the runs: a card each, and the report's page of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from normscope.app.card import Card, text
from normscope.core.errors import InputError
from normscope.recorder.growing import opened
from normscope.report.html import policy
from normscope.report.results import Shown, results_report, section_of

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
    made = section_of(path, _records(path))
    if made.section is None:
        raise InputError(made.problem)
    return made


def _records(path: Path) -> list[Any]:
    """What a file of anybody's holds, if it is a regular one of bounded size."""
    with opened(path) as (file, state):
        if state.st_size > MOST_BYTES:
            raise InputError(f"{path.name} has {state.st_size >> 20} MB: more than a result can have")
        content = os.pread(file, MOST_BYTES, 0)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} is not JSON: {type(error).__name__}") from error
    return found if isinstance(found, list) else [found]
