"""The table of rules. A rule has an id, a severity, what it needs, why it matters and how to mend what it finds.

A rule runs wherever what it needs is at hand: in `ns.doctor` on a model, in `ns.watch` on the rows of a training, on the tensors of
a checkpoint. `judged` runs all that can run, and says of the others what they lack.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from normscope.core.errors import InputError
from normscope.findings.finding import Evidence, Finding

if TYPE_CHECKING:
    from normscope.graph.graph import Node

GROUPS = {
    "NS1": "Structure",
    "NS2": "State",
    "NS3": "Training set-up",
    "NS4": "Capacity",
    "NS5": "A training over time",
    "NS6": "Files of weights",
}
NEEDS = {  # what a rule may need, and what to say where it is missing
    "graph": "the model could not be traced",
    "train graph": "the model could not be traced in train mode",
    "model": "pass the model itself",
    "weights": "there are no weights",
    "files": "it is about files: ns.checkpoint(path)",
    "data": "pass data= (--data), batches of inputs or (inputs, targets)",
    "labels": "pass data=(inputs, targets) (--data)",
    "optimizer": "pass optimizer= (--optimizer)",
    "batch size": "pass micro_batch= (--micro-batch), samples per device and forward pass, or data= in batches as trained",
    "accumulation": "pass accumulation= (--accumulation), how many micro-batches make a step",
    "rows": "pass run= (--run), the directory of a recorded run",
    "judged weights": "the run did not judge which weights are scale-free: record it with symmetries=ns.symmetries(model, example)",
    "symmetries": "scale-free weights were not looked for",
}


@dataclass(frozen=True)
class Hit:
    """One place where a rule found something; `severity` and `fix` where they differ from those of the rule."""

    where: str
    message: str
    evidence: Evidence = field(default_factory=dict)
    source: str = ""
    severity: str = ""
    fix: str = ""

    @classmethod
    def at(cls, node: Node, message: str, severity: str = "", **evidence: float | int | str) -> Hit:
        return cls(node.path or node.name, message, evidence, node.source, severity)


Find = Callable[[Any], Iterable[Hit]]


@dataclass(frozen=True)
class Clean:
    """What may be said where a rule on rows found nothing. column: what the rule reads, also the chart that shows it."""

    sentence: str
    column: str


@dataclass(frozen=True)
class FindingRule:
    """why: one paragraph. reference: where to read more. name: a word for it in reports. clean: of rules on rows."""

    id: str
    title: str
    severity: str
    fix: str
    why: str
    reference: str
    needs: tuple[str, ...]
    find: Find
    name: str = ""
    clean: Clean | None = None

    def run(self, subject: Any) -> list[Finding]:
        """What it finds in a subject; of rules on rows, what they found over time."""
        found: list[Finding] = (
            subject.over_time(self.id) if "rows" in self.needs else [self.finding(hit) for hit in self.find(subject)]
        )
        return found

    def finding(self, hit: Hit) -> Finding:
        severity = hit.severity or self.severity
        return Finding(self.id, severity, hit.where, hit.message, hit.fix or self.fix, hit.evidence, hit.source, self.name)

    @property
    def group(self) -> str:
        return GROUPS[self.id[:3]]


RULES: dict[str, FindingRule] = {}


def rule(
    id: str, title: str, severity: str, fix: str, reference: str, needs: tuple[str, ...] = ("model",), name: str = "",
    clean: Clean | None = None,
) -> Callable[[Find], Find]:  # fmt: skip
    """Register a function that yields hits; its docstring says why they matter."""

    def decorate(find: Find) -> Find:
        if id in RULES:
            raise ValueError(f"{id} is taken by {RULES[id].title!r}")
        why = " ".join((inspect.getdoc(find) or "").split())
        RULES[id] = FindingRule(id, title, severity, fix, why, reference, needs, find, name, clean)
        return find

    return decorate


def chosen_rules(select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[str]:
    """Ids of the rules to run, by ids or their beginnings; an unknown one is refused."""
    for prefix in (*select, *ignore):
        if not any(rule.startswith(prefix) for rule in RULES):
            raise InputError(f"no rule {prefix!r}: choose from {', '.join(sorted(RULES))}")
    wanted = [rule for rule in sorted(RULES) if not select or rule.startswith(tuple(select))]
    return [rule for rule in wanted if not ignore or not rule.startswith(tuple(ignore))]


class Examined(Protocol):
    """What rules are run on."""

    def missing(self, needs: tuple[str, ...]) -> str:
        """Why a rule with these needs cannot run, or an empty string."""


def judged(subject: Examined, rules: Sequence[str]) -> tuple[list[Finding], list[str], dict[str, str]]:
    """What the rules found, which of them ran, and why the others did not."""
    found: list[Finding] = []
    checked: list[str] = []
    not_checked: dict[str, str] = {}
    for id in rules:
        needs = RULES[id].needs
        if reason := subject.missing(needs) or (subject.unjudged(id) if "rows" in needs else ""):  # type: ignore[attr-defined]
            not_checked[id] = reason
        else:
            found += RULES[id].run(subject)
            checked.append(id)
    return found, checked, not_checked
