"""What the list of runs says of one run: how it is, how far it is, and which layer to look at."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from normscope.recorder.following import FollowedPart
from normscope.recorder.reading import Run, closed
from normscope.recorder.store import is_being_written

QUIET = 120.0  # seconds after which an open run without a lock to ask counts as ended
LONGEST = 600  # characters of a text

SEVERITY = (  # what ends a training first
    "loss-not-finite", "exploding-gradient", "variance-collapse", "vanishing-gradient", "growing-", "dead-units",
    "effective-learning-rate-drift", "running-statistics",
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """An early warning of a run, as text."""

    rule: str
    layer: str | None
    step: int | None
    message: str
    fix: str
    affected: int = 1

    @staticmethod
    def of(finding: Mapping[str, Any]) -> Alert:
        evidence = finding.get("evidence")
        affected = evidence.get("affected", 1) if isinstance(evidence, Mapping) else 1
        layer, step = finding.get("layer"), finding.get("step")
        return Alert(
            _text(finding.get("rule")), None if layer is None else _text(layer), step if isinstance(step, int) else None,
            _text(finding.get("message")), _text(finding.get("fix")), affected if isinstance(affected, int) else 1,
        )  # fmt: skip

    @property
    def severity(self) -> tuple[bool, int]:
        """Smaller is worse; those that name a layer come first, because they say where to look."""
        ranks = [rank for rank, rule in enumerate(SEVERITY) if self.rule.startswith(rule)]
        return self.layer is None, ranks[0] if ranks else len(SEVERITY)


@dataclass(frozen=True)
class Card:
    """status: live, finished, failed (ended without closing) or error (cannot be read; `error` says why)."""

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
    updated: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def card(id: str, name: str, run: Run, updated: float) -> Card:
    """The card of a run that was refreshed just now."""
    first = run.parts[0]
    assert isinstance(first, FollowedPart)
    found = alerts(run)
    ends = [_integer(first.edge("step", last)) for last in (False, True)]
    return Card(
        id,
        name,
        status(run, updated),
        model=_text(run.manifest.get("model")),
        layers=len(run.layers),
        rows=first.count,
        first=ends[0],
        step=ends[1],
        loss=_number(first.edge("loss")),
        findings=len(found),
        worst=min(found, key=lambda alert: alert.severity, default=None),
        updated=updated,
    )


def alerts(run: Run) -> list[Alert]:
    """The findings of a run, in the order of time."""
    return [Alert.of(finding) for finding in run.findings]


def status(run: Run, updated: float) -> str:
    """Finished where every process closed its part; live while one holds its lock, or writes where there is no lock to ask."""
    if all(closed(part) for part in run.parts):
        return "finished"
    writing = [is_being_written(part.path) for part in run.parts]
    recent = time.time() - updated < QUIET
    return "live" if any(recent if held is None else held for held in writing) else "failed"


def _integer(value: np.ndarray | None) -> int | None:
    return None if value is None else int(value[0])


def _number(value: np.ndarray | None) -> float | None:
    if value is None or not math.isfinite(float(value[0])):
        return None
    return float(value[0])


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
