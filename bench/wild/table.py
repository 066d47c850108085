"""The sweep as a page: how many models had which outcome, then every model with its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.wild.trial import OUTCOMES

MEANING = {
    "finite": "a certified bound over all inputs",
    "infinite": "no finite bound over all inputs: the reason names the operation, and inputs show it",
    "refused: unproved": "no finite bound was found, nor inputs that rule one out; the reason names the operation",
    "refused: the model": "the model itself has no constant per sample: it draws noise or mixes samples",
    "refused: no rule": "an operation has no rule, or its rule does not cover the case",
    "refused: not traceable": "torch.export does not accept the model",
    "refused: other": "another reason that the error states",
    "crash": "an error that is not ours",
    "too slow": "more than the time allowed",
    "too large": "more than the memory allowed",
    "not built": "no shrunk configuration ran; not counted",
}


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """Counts by outcome, contradictions, and times, as lines of Markdown."""
    counts = Counter(record["outcome"] for record in records)
    built = len(records) - counts["not built"]
    wrong = sum(len(record.get("wrong", ())) for record in records)
    audited = [record["seconds"] for record in records if "seconds" in record]
    lines = ["| outcome | models | share of those that run | meaning |", "|---|---:|---:|---|"]
    for outcome in OUTCOMES:
        share = f"{100 * counts[outcome] / max(built, 1):.1f} %" if outcome != "not built" else ""
        lines.append(f"| {outcome} | {counts[outcome]} | {share} | {MEANING[outcome]} |")
    near = sum(record.get("local") not in (None, "inf") for record in records)
    lines += [
        "", f"{len(records)} models, of which {built} run. Contradictions with what is known independently: {wrong}.",
        f"Around the example's first sample {near} models have a finite bracket.",
        f"Doctor or symmetries did not end in time for {sum('unfinished' in record for record in records)} models.",
    ]  # fmt: skip
    if audited:
        lines.append(f"An audit takes {median(audited):.1f} s of processor time in the median, {max(audited):.1f} s at most.")
    return lines


def page(results: dict[str, Sequence[dict[str, Any]]], listed: dict[str, int], before: str = "") -> str:
    """The whole page: for each package its counts, contradictions, and models by outcome. listed: how many models each list has.

    before: the page as it is, of which the section of a package without results stays.
    """
    lines = [
        "# In the wild: architectures", "",
        "Every architecture with a plain model class, shrunk by its configuration, with random weights: audited, examined by the",
        "doctor, searched for symmetries, and checked against what the model's own tensors say. This page is written by",
        "`python -m bench wild`; `bench/wild/checks.py` says what is checked. Results are kept from run to run, so that a row may",
        "be older than the code.",
    ]  # fmt: skip
    for package, records in results.items():
        if not records:
            sections = (part for part in re.split("^(?=## )", before, flags=re.MULTILINE) if part.startswith(f"## {package}\n"))
            lines += ["", next(sections).rstrip()] if f"\n## {package}\n" in before else []
            continue
        covered = f"{len(records)} of the {listed[package]} models on the list were run; nothing is said about the others."
        lines += ["", f"## {package}", "", covered, "", *summary(records)]
        said = [f"- {record['name']}: {text}" for record in records for text in record.get("wrong", ())]
        lines += ["", "### Contradictions", "", *said] if said else []
        lines += ["", "### Models", "", *_models(records)]
    return "\n".join(lines) + "\n"


def _models(records: Iterable[dict[str, Any]]) -> list[str]:
    lines = ["| model | outcome | bracket, or why | around the example | audit, s |", "|---|---|---|---|---:|"]
    for record in sorted(records, key=lambda record: (OUTCOMES.index(record["outcome"]), record["name"])):
        said = f"{record['lower']} to {record['upper']}" if "upper" in record else record.get("why", "")
        said = " ".join(said.split()).replace("|", "\\|")
        said = said if len(said) <= 160 else said[:159] + "…"
        lines.append(
            f"| {record['name']} | {record['outcome']} | {said} | {record.get('local') or ''} | {record.get('seconds', '')} |"
        )
    return lines
