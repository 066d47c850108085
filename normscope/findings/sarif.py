"""Findings as SARIF 2.1.0, for code scanning, and as GitHub annotations."""

from __future__ import annotations

from typing import Any

from normscope.core.text import annotation, sarif_message, uri, visible
from normscope.findings.catalogue import RULES
from normscope.findings.finding import Finding, Findings
from normscope.version import __version__

LEVELS = {"error": "error", "warning": "warning", "info": "note"}
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(findings: Findings, target: str) -> dict[str, Any]:
    """One run of one tool; `target` is the model as the user named it, the place where no source line is known."""
    rules = sorted({finding.rule for finding in findings})
    driver = {
        "name": "normscope",
        "version": __version__,
        "rules": [_rule(rule) for rule in rules],
    }
    results = [_result(finding, rules.index(finding.rule), target) for finding in findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _rule(rule: str) -> dict[str, Any]:
    check = RULES[rule]
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in check.find.__name__.split("_")),
        "shortDescription": {"text": check.title},
        "fullDescription": {"text": check.why},
        "help": {"text": f"{check.fix} Reference: {check.reference}."},
        "defaultConfiguration": {"level": LEVELS[check.severity]},
    }


def _result(finding: Finding, index: int, target: str) -> dict[str, Any]:
    file, _, line = finding.source.rpartition(":")
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri(file or target.rpartition(":")[0] or target)}}
    if file and line.isdigit():
        physical["region"] = {"startLine": int(line)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": sarif_message(_sentence(finding))},
        "locations": [
            {
                "physicalLocation": physical,
                "logicalLocations": [{"fullyQualifiedName": visible(finding.where or target), "kind": "module"}],
            }
        ],
        "partialFingerprints": {"ruleAndModule/v1": visible(finding.key)},
        "properties": {name: visible(value) if isinstance(value, str) else value for name, value in finding.evidence.items()},
    }


def to_github(findings: Findings) -> list[str]:
    """Workflow commands that annotate a pull request."""
    levels = {"error": "error", "warning": "warning", "info": "notice"}
    lines = []
    for finding in findings:
        file, _, line = finding.source.rpartition(":")
        place = f"file={annotation(file, name=True)},line={line}," if file and line.isdigit() else ""
        lines.append(f"::{levels[finding.severity]} {place}title={finding.rule}::{annotation(_sentence(finding))}")
    return lines


def _sentence(finding: Finding) -> str:
    return f"{finding.where or 'the model'}: {finding.message}. {finding.fix}"
