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
    "refused: the model": "the model itself has no constant per sample: it draws noise, mixes samples, or sizes depend on values",
    "refused: no rule": "an operation has no rule, or its rule does not cover the case",
    "refused: not traceable": "torch.export does not accept the model",
    "refused: other": "another reason that the error states",
    "crash": "an error that is not ours",
    "too slow": "more than the time allowed",
    "too large": "more than the memory allowed",
    "not built": "no shrunk configuration ran; not counted",
}


ROW = re.compile(r"^\| (?P<name>\S+) \| (?P<outcome>[^|]+) \| (?P<said>.*) \| (?P<local>[^|]*) \| (?P<seconds>[^|]*) \|$")
LATE = "Doctor or symmetries did not end in time for "


def section(page: str, package: str) -> str:
    """What a page says of a package, from its headline on."""
    parts = re.split("^(?=## )", page, flags=re.MULTILINE)
    return next((part for part in parts if part.startswith(f"## {package}\n")), "")


def recorded(text: str) -> list[dict[str, Any]]:
    """The models of a section as far as it shows them: what a run of some models is merged with."""
    late = text.partition(LATE)[2].partition("\n")[0].partition(": ")[2].rstrip(".").split(", ")
    said = re.findall(r"^- (\S+): (.*)$", text, flags=re.MULTILINE)
    found: list[dict[str, Any]] = []
    for row in filter(None, map(ROW.match, text.splitlines())):
        if row["outcome"] not in OUTCOMES:
            continue
        record = {"name": row["name"], "outcome": row["outcome"], "local": row["local"].strip() or None}
        record["wrong"] = [wrong for name, wrong in said if name == row["name"]]
        lower, _, upper = row["said"].partition(" to ")
        record |= {"lower": lower, "upper": upper} if row["outcome"] == "finite" else {"why": row["said"].replace("\\|", "|")}
        record |= {"seconds": float(row["seconds"])} if row["seconds"].strip() else {}
        found.append(record | ({"unfinished": ""} if row["name"] in late else {}))
    return found


def summary(records: Sequence[dict[str, Any]], earlier: str = "") -> list[str]:
    """Counts by outcome, contradictions, and times, as lines of Markdown. earlier: the section that they were merged with."""
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
    ]  # fmt: skip
    late = sorted(record["name"] for record in records if "unfinished" in record)
    unnamed = re.search(rf"^(An earlier run|{LATE}([1-9]\d*) models\.$).*", earlier, flags=re.MULTILINE)
    lines.append(f"{LATE}{len(late)} models{': ' if late else ''}{', '.join(late)}.")
    if unnamed:
        lines.append(unnamed[0] if unnamed[2] is None else f"An earlier run had {unnamed[2]} such models, which it did not name.")
    if audited:
        lines.append(f"An audit takes {median(audited):.1f} s of processor time in the median, {max(audited):.1f} s at most.")
    return lines


def page(results: dict[str, Sequence[dict[str, Any]]], listed: dict[str, int], before: str = "") -> str:
    """The whole page: for each package its counts, contradictions, and models by outcome. listed: how many models each list has.

    before: the page as it is, of which every model without a result stays.
    """
    lines = [
        "# In the wild: architectures", "",
        "Every architecture with a plain model class, shrunk by its configuration, with random weights: audited, examined by the",
        "doctor, searched for symmetries, and checked against what the model's own tensors say. This page is written by",
        "`python -m bench wild`; `bench/wild/checks.py` says what is checked. Results are kept from run to run, so that a row may",
        "be older than the code.",
    ]  # fmt: skip
    for package, records in results.items():
        earlier = section(before, package)
        if not records:
            lines += ["", earlier.rstrip()] if earlier else []
            continue
        merged = {record["name"]: record for record in (*recorded(earlier), *records)}
        records = list(merged.values())
        covered = f"{len(records)} of the {listed[package]} models on the list were run; nothing is said about the others."
        lines += ["", f"## {package}", "", covered, "", *summary(records, earlier)]
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
