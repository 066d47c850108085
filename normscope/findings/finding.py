"""What a rule says: one finding, and the collection of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from normscope.core.errors import InputError
from normscope.core.rendering import Group, Padding, RenderableType, Rendered, Text
from normscope.core.result import ResultSequence
from normscope.core.text import inert, visible

SEVERITIES = ("error", "warning", "info")  # from bad to good
COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
SHOWN = 3  # findings of one rule that are printed in full

Evidence = dict[str, float | int | str]


@dataclass(frozen=True)
class Finding(Rendered):
    """One thing that is wrong: which rule says so, where, by which numbers, and what to do.

    where: a module's path ("" is the whole model); source: "file.py:12", where it is called, if known. name: the rule in a word.
    Of a finding over time, first_step and last_step are the steps at which it was seen first and last, and state is "now" where
    that is still so at the last step that was looked at, else "was".
    """

    rule: str
    severity: str
    where: str
    message: str
    fix: str
    evidence: Evidence = field(default_factory=dict)
    source: str = ""
    name: str = ""
    first_step: int | None = None
    last_step: int | None = None
    state: str = ""

    @property
    def key(self) -> str:
        """What a baseline remembers: the rule and the place."""
        return f"{self.rule} {self.where}"

    @property
    def when(self) -> str:
        """Its steps in words, nothing for a finding that has none."""
        if self.first_step is None or self.last_step is None:
            return ""
        times = self.evidence.get("times", 1)
        again = f", {times} times" if times != 1 else ""
        if self.state == "now":
            return f"since step {self.first_step:,}{again}"
        at = f"at step {self.first_step:,}"
        return at if self.first_step == self.last_step else f"from step {self.first_step:,} until step {self.last_step:,}{again}"

    def to_dict(self) -> dict[str, Any]:
        """Steps and state only where there are any."""
        content = {name: getattr(self, name) for name in ("rule", "severity", "where", "message", "evidence", "fix", "source")}
        if self.first_step is not None:
            content |= {name: getattr(self, name) for name in ("name", "first_step", "last_step", "state")}
        return content

    @staticmethod
    def from_event(event: Mapping[str, Any]) -> Finding:
        """Of an event of a run, in this form or an older one (`layer`, `step`), whatever else somebody wrote there."""
        said = {name: str(event.get(name) or "") for name in ("rule", "severity", "message", "fix", "name", "state")}
        severity = said["severity"] if said["severity"] in SEVERITIES else "warning"
        where = event.get("where", event.get("layer"))
        evidence = event.get("evidence")
        steps = [
            value if isinstance(value, int) else None
            for value in (event.get("first_step", event.get("step")), event.get("last_step"))
        ]
        return Finding(
            said["rule"], severity, where if isinstance(where, str) else "",
            said["message"], said["fix"], dict(evidence) if isinstance(evidence, Mapping) else {}, "", said["name"] or said["rule"],
            steps[0], steps[0] if steps[1] is None else steps[1], said["state"],
        )  # fmt: skip

    def render(self) -> RenderableType:
        return Group(Text(str(self), COLOURS.get(self.severity, "")), Text(f"fix: {self.fix}", "dim"))

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {_shown(value)}" for name, value in self.evidence.items())
        place = " ".join(filter(None, [self.where or "the model", f"({self.source})" if self.source else ""]))
        when = f" ({self.when})" if self.when else ""
        return inert(visible(f"{self.rule} {self.severity} {place}: {self.message}{when}" + (f" [{numbers}]" if numbers else "")))


@dataclass(frozen=True)
class Repair:
    """What `apply` did for one finding; `change` is the largest change of the output, relative to its size."""

    rule: str
    where: str
    what: str
    change: float


@dataclass(frozen=True, repr=False)
class Findings(ResultSequence[Finding]):
    """All findings of one model, worst first, with the checks that ran and those that could not, and why."""

    schema = "normscope.doctor/1"

    found: tuple[Finding, ...]
    checked: tuple[str, ...]
    not_checked: dict[str, str]
    subject: Any = None  # what was examined, for repairs
    repairs: list[Repair] = field(default_factory=list)
    basis: dict[str, str] = field(default_factory=dict)  # of rules on a run: in which of its steps they could judge

    @property
    def left_out(self) -> list[str]:
        """What was not checked and why, a line per reason."""
        return _by_reason(self.not_checked)

    @property
    def worst(self) -> str | None:
        """The severity of the worst finding."""
        return min((finding.severity for finding in self.found), key=SEVERITIES.index, default=None)

    def without(self, known: set[str]) -> Findings:
        """Only what a baseline does not know already."""
        kept = tuple(finding for finding in self.found if finding.key not in known)
        return replace(self, found=kept, repairs=[])

    def apply(self, select: Sequence[str] = ()) -> torch.nn.Module:
        """A copy of the model with every mechanical fix made; `.repairs` says what each changed in the output.

        select: only the fixes of these rules, which may then replace what was trained (GroupNorm for BatchNorm: NS302, NS311).
        """
        from normscope._doctor.repair import repaired

        model, repairs = repaired(self._examined(), self.found, select)
        self.repairs[:] = repairs
        return model

    def optimizer_for(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """An optimizer like the one that was examined, for the model that `apply` returned.

        Parameters on which weight decay does harm (NS301) have none, and forgotten ones (NS305) are in it; its state is new.
        """
        from normscope._doctor.repair import optimizer_for

        if self._examined().optimizer is None:
            raise InputError("no optimizer was examined: call ns.doctor with optimizer=")
        return optimizer_for(self.subject, model)

    def _examined(self) -> Any:
        if self.subject is None:
            raise InputError("these findings have lost their model; call ns.doctor again")
        return self.subject

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "findings": [finding.to_dict() for finding in self.found],
            "checked": list(self.checked),
            "not_checked": dict(self.not_checked),
            **({"basis": dict(self.basis)} if self.basis else {}),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Findings:
        """The findings that `to_dict` described, without their model."""
        found = tuple(Finding(**finding) for finding in content["findings"])
        basis = dict(content.get("basis", {}))
        return Findings(found, tuple(content["checked"]), dict(content["not_checked"]), basis=basis)

    def render(self) -> RenderableType:
        """The findings grouped by severity; severities are words, so it reads without colour."""
        parts: list[RenderableType] = []
        for severity in SEVERITIES:
            group = [finding for finding in self.found if finding.severity == severity]
            if not group:
                continue
            parts.append(Text(f"{severity}s ({len(group)})" if severity != "info" else f"info ({len(group)})", COLOURS[severity]))
            for rule in dict.fromkeys(finding.rule for finding in group):
                alike = [finding for finding in group if finding.rule == rule]
                parts += [_indented(str(finding), 2) for finding in alike[:SHOWN]]
                if len(alike) > SHOWN:
                    parts.append(_indented(f"{rule} in {len(alike) - SHOWN} more places: {_places(alike[SHOWN:])}", 2))
                parts.append(_indented(f"fix: {alike[0].fix}", 6, "dim"))
        if not self.found:
            parts.append(Text(f"nothing found by {len(self.checked)} checks: {in_ranges(self.checked)}"))
        else:
            parts.append(Text(f"{len(self.found)} found by {len(self.checked)} checks"))
        parts += [Text(f"on the run, {line}", "dim") for line in _by_reason(self.basis)]
        parts += [Text(f"not checked: {line}", "dim") for line in self.left_out]
        return Group(*parts)


def _indented(text: str, columns: int, style: str = "") -> Padding:
    return Padding(Text(text, style, overflow="fold"), (0, 0, 0, columns), expand=False)


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    """One line per reason, with the rules that have it."""
    rules: dict[str, list[str]] = {}
    for rule, reason in reasons.items():
        rules.setdefault(reason, []).append(rule)
    return [f"{in_ranges(alike)}: {reason}" for reason, alike in rules.items()]


def in_ranges(rules: Sequence[str]) -> str:
    """Ids in order, three and more that follow each other as "NS501 to NS517"."""
    runs: list[list[str]] = []
    for rule in sorted(rules):
        if runs and int(rule[2:]) == int(runs[-1][-1][2:]) + 1:
            runs[-1].append(rule)
        else:
            runs.append([rule])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _places(findings: Sequence[Finding]) -> str:
    """The first few places, and an ellipsis; JSON lists them all."""
    return ", ".join(finding.where for finding in findings[:SHOWN]) + (", …" if len(findings) > SHOWN else "")


def _shown(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
