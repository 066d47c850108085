"""What the list of runs says of one run: how it is, how far it is, and which layer to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from normscope._watch.columns import METRICS
from normscope._watch.following import FollowedPart
from normscope._watch.reading import Run
from normscope.findings.finding import Finding
from normscope.findings.over_time import Judged
from normscope.report.summary import Problem, summarize

LONGEST = 600  # characters of a text
MOST_NOTES = 20


@dataclass(frozen=True)
class Alert:
    """An early warning of a run, as text. affected: how many layers it is about."""

    rule: str
    layer: str | None
    step: int | None
    message: str
    fix: str
    affected: int = 1

    when: str = ""

    @staticmethod
    def of(finding: Finding) -> Alert:
        affected: Any = finding.evidence.get("affected", 1)
        return Alert(
            text(finding.name), text(finding.where) if finding.where else None, finding.first_step,
            text(finding.message), text(finding.fix.rstrip(".")), affected if isinstance(affected, int) else 1, finding.when,
        )  # fmt: skip


@dataclass(frozen=True)
class Card:
    """status: live, finished, failed (`error` says why), interrupted, killed (ended without a word), error (cannot be read; `error`
    says why) or waiting (not read yet). notes: what of it could not be read.

    headline, fine: the report's summary. worst: its first problem that names a layer, else its first.
    """

    id: str
    name: str
    status: str
    error: str = ""
    model: str = ""
    layers: int = 0
    rows: int = 0
    first: int | None = None
    step: int | None = None
    loss: float | None = None
    findings: int = 0
    worst: Alert | None = None
    headline: str = ""
    fine: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    updated: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def card(id: str, name: str, run: Run, updated: float) -> Card:
    """The card of a run that was refreshed just now."""
    part, life = run.parts[0], run.life
    edges = Edges(name, run.layers, run.findings, run.judged, part)
    summary = summarize(edges, part.count, life.step)
    problems = sorted(summary.problems, key=lambda problem: problem.layer is None)
    steps = edges.arrays()["step"].tolist() or [None]
    return Card(
        id,
        name,
        status(life.state),
        error=text(life.error),
        model=text(run.manifest.get("model")),
        layers=len(run.layers),
        rows=part.count,
        first=steps[0],
        step=steps[-1],
        loss=_number(part.edge("loss")),
        findings=len(edges.findings),
        worst=next((_alert(problem) for problem in problems), None),
        headline=text(summary.headline),
        fine=summary.fine,
        notes=tuple(map(text, run.notes[:MOST_NOTES])),
        updated=updated,
    )


@dataclass(frozen=True)
class Edges:
    """The first and the last row of a run as a recording: enough for its summary, however long it is."""

    name: str
    layers: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    judged: Mapping[str, Judged]
    part: FollowedPart

    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        return {name: self._column(name) for name in ("step", *columns)}

    def _column(self, name: str) -> np.ndarray:
        rows = [row for last in (False, True) if (row := self.part.edge(name, last)) is not None]
        width = (len(self.layers),) if name in METRICS else ()
        return np.stack(rows).reshape(len(rows), *width) if rows else np.empty((0, *width), np.float32)


def alerts(run: Run) -> list[Alert]:
    """The findings of a run, in the order of time."""
    return [Alert.of(finding) for finding in run.findings]


def status(state: str) -> str:
    """A run's state in the words of the page."""
    return "live" if state == "running" else state


def text(value: Any) -> str:
    """Anything as text of bounded length."""
    made = "" if value is None else str(value)
    return made if len(made) <= LONGEST else made[: LONGEST - 1] + "…"


def _alert(problem: Problem) -> Alert:
    layer = None if problem.layer is None else text(problem.layer)
    said = text(problem.message), text(problem.fix)
    return Alert(text(problem.name), layer, problem.step, *said, 1 + problem.others, problem.when)


def _number(value: np.ndarray | None) -> float | None:
    return None if value is None or not math.isfinite(float(value[0])) else float(value[0])
