"""The table of checks: each has an id, a severity, what it needs, why it matters and how to mend what it finds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normscope.checkup.finding import Evidence, Finding

if TYPE_CHECKING:
    from normscope.checkup.subject import Subject
    from normscope.graph.graph import Node

GROUPS = {"NS1": "Structure", "NS2": "State", "NS3": "Training set-up", "NS4": "Capacity"}
NEEDS = {  # what a check may need, and what to say where it is missing
    "graph": "the model could not be traced",
    "data": "pass data=, batches of inputs or (inputs, targets)",
    "labels": "pass data=(inputs, targets)",
    "optimizer": "pass optimizer=",
    "accumulation": "pass accumulation=, how many micro-batches make a step",
    "run": "pass run=, the directory of a recorded run",
}


@dataclass(frozen=True)
class Hit:
    """One place where a check found something; `severity` where it differs from that of the check."""

    where: str
    message: str
    evidence: Evidence = field(default_factory=dict)
    source: str = ""
    severity: str = ""

    @classmethod
    def at(cls, node: Node, message: str, severity: str = "", **evidence: float | int | str) -> Hit:
        return cls(node.path or node.name, message, evidence, node.source, severity)


Find = Callable[["Subject"], Iterable[Hit]]


@dataclass(frozen=True)
class Check:
    """One rule of the doctor; `why` is one paragraph, `reference` where to read more."""

    id: str
    title: str
    severity: str
    fix: str
    why: str
    reference: str
    needs: tuple[str, ...]
    find: Find

    def run(self, subject: Subject) -> list[Finding]:
        return [
            Finding(self.id, hit.severity or self.severity, hit.where, hit.message, self.fix, hit.evidence, hit.source)
            for hit in self.find(subject)
        ]

    @property
    def group(self) -> str:
        return GROUPS[self.id[:3]]


CHECKS: dict[str, Check] = {}


def check(id: str, title: str, severity: str, fix: str, reference: str, needs: tuple[str, ...] = ()) -> Callable[[Find], Find]:
    """Register a function that yields hits; its docstring says why they matter."""

    def decorate(find: Find) -> Find:
        if id in CHECKS:
            raise ValueError(f"{id} is taken by {CHECKS[id].title!r}")
        CHECKS[id] = Check(id, title, severity, fix, " ".join(inspect.getdoc(find).split()), reference, needs, find)  # type: ignore[union-attr]
        return find

    return decorate
