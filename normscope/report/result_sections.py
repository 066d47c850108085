"""One section per kind of result: a sentence, figures and tables from the records of its JSON. SECTIONS is the table of kinds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from normscope._checkpoint.difference import Difference, DiffRow
from normscope._checkpoint.report import CheckpointReport
from normscope._watch.reading import Run
from normscope.auditing import Audit
from normscope.bounds.bound import MEASURE, RISK, Bound, shown
from normscope.bounds.comparison import FamilyComparison
from normscope.bounds.flatness import Flatness
from normscope.bounds.generalization import Guarantees
from normscope.bounds.iterations import TrainingCost
from normscope.bounds.margins import Margins
from normscope.certify.ablation import Ablation
from normscope.certify.robustness import LocalBrackets, Robustness
from normscope.certify.weights import Sensitivities
from normscope.core.bracket import Bracket
from normscope.core.codec import encode
from normscope.core.errors import InputError
from normscope.core.gap_curve import GapCurve
from normscope.core.papers import CLAIM_SCHEMA, CLAIM_VERDICTS, LAB_SCHEMA, LEDGER_SCHEMA, Comparison
from normscope.core.result import Result
from normscope.curvature.estimators import Density, Estimate
from normscope.curvature.landscape import Landscape
from normscope.curvature.spectrum import Condition, Curvature
from normscope.findings.finding import SEVERITIES, Findings
from normscope.geometry.flow import Path
from normscope.report import audit_page
from normscope.report.bounds import bound_comparison
from normscope.report.curvature import densities, eigenvalues
from normscope.report.html import Drawing, number, titled, words
from normscope.report.markup import Child, Markup, element, table
from normscope.symmetry.report import SymmetryReport

Record = Mapping[str, Any]
Part = Union[Drawing, Child]


@dataclass(frozen=True)
class Section:
    """headline: the result in one sentence. parts: what is shown, in order."""

    title: str
    headline: str
    parts: Sequence[Part]


# audit and doctor ----------------------------------------------------------------------------------------------------


def audit_section(records: Sequence[Record]) -> Section:
    """An audit: its verdict, figures, ledger and notes."""
    audit = Audit.from_dict(_one(records))
    parts = [
        audit_page.verdict(audit, None),
        *audit_page.drawings(audit),
        *audit_page.ledger(audit),
        titled("Notes", list(audit.notes), "notes"),
    ]
    return Section(f"Audit of {audit.model}", audit_page.headline(audit), parts)


def doctor_section(records: Sequence[Record]) -> Section:
    """The findings of the doctor in a table, counted by severity."""
    findings = Findings.from_dict(_one(records))
    counts = Counter(finding.severity for finding in findings)
    told = [f"{counts[severity]} of severity {severity}" for severity in SEVERITIES if counts[severity]]
    headline = f"{len(findings.checked)} checks found {', '.join(told) or 'nothing'}."
    return Section("Findings of the doctor", headline, audit_page.findings_table(findings))


# checkpoints ---------------------------------------------------------------------------------------------------------


def difference_section(records: Sequence[Record]) -> Section:
    """Two checkpoints or models: the verdict, what it rests on, and a table of tensors, those that differ first."""
    found = Difference.from_dict(_one(records))
    apart = [row for row in found.rows if not row.same]
    parts: list[Part] = [
        element("p", f"A is {found.sources[0]}, B is {found.sources[1]}. Basis: {found.mode}."),
        element(
            "p",
            f"The largest measured defect is {found.defect:.2g}." + (f" First to differ: {found.first}." if found.first else ""),
        ),
        titled("Notes", list(found.notes), "notes"),
        _differing(apart, f"{len(apart)} of {len(found.rows)} tensors differ"),
    ]
    if same := [row for row in found.rows if row.same]:
        parts.append(element("details", element("summary", f"{len(same)} tensors agree"), _differing(same, "Tensors that agree")))
    return Section("Difference", found.explanation, parts)


def _differing(rows: Sequence[DiffRow], caption: str) -> Markup | None:
    head = ["tensor", "role", "‖Δ‖/‖W‖", "‖Δ‖₂", "angle in °", "largest change", "stable rank of Δ", "how"]
    cells = [
        [
            row.name,
            row.role,
            *map(number, (row.change, row.spectral_change, row.rotation, row.largest_change, row.rank)),
            words(row.how),
        ]
        for row in rows
    ]
    return table(head, cells, caption) if rows else None


# curvature -----------------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[float, float]]  # eigenvalues, each with its error


def curvature_section(records: Sequence[Record]) -> Section:
    """Plain and quotient side by side, where there are both."""
    named = {"quotient" if record["quotient"] else "plain": record for record in records}
    if len(named) < len(records):
        raise InputError("two of its records have the same kind")
    pairs = {
        f"{name}, {which}": [(float(pair["value"]), float(pair["error"])) for pair in found]
        for name, record in named.items()
        for which, found in record["eigenvalues"].items()
        if found
    }
    spread = {name: _density(record["density"]) for name, record in named.items() if "density" in record}
    parts: list[Part] = [table(["quantity", *named], _measured(list(named.values())), "What was measured, and what came out")]
    if pairs:
        caption = "Each with the interval that holds it. A negative one is a direction in which the loss curves down."
        parts.append(Drawing("Outermost eigenvalues", eigenvalues(pairs), caption, _pairs_table(pairs)))
    if spread:
        caption = "How many eigenvalues lie where, on a logarithmic scale."
        parts.append(Drawing("Density of the eigenvalues", densities(spread), caption, _density_table(spread)))
    return Section(f"Curvature of {records[0]['model']}", _curvature_headline(records[0], pairs), parts)


def _curvature_headline(record: Record, pairs: Mapping[str, Pairs]) -> str:
    about = f"{record['matrix']}, {record['parameters']:,} parameters, {record['mode']} mode"
    outermost = [f"{name} eigenvalue {_interval(own[0])}" for name, own in pairs.items()]
    return f"{about}: {'; '.join(outermost) or 'no eigenvalue was computed'}."


def _measured(records: Sequence[Record]) -> list[list[Child]]:
    """A row per quantity, a column per record."""
    rows: dict[str, Callable[[Record], str]] = {
        "loss": lambda record: f"{record['loss']:.6g}",
        "samples": lambda record: f"{sum(record['batch_sizes']):,}, in batches of at most {max(record['batch_sizes']):,}",
        "normalizers on batch statistics": lambda record: str(len(record["batch_statistics"])),
        "trace": lambda record: str(Estimate(**record["trace"])) if "trace" in record else "–",
        "condition": lambda record: str(Condition(**record["condition"])) if "condition" in record else "–",
    }
    return [[name, *(words(cell(record)) for record in records)] for name, cell in rows.items()]


def _density(content: Record) -> Density:
    nodes, weights = (np.asarray(content[name], dtype=np.float64) for name in ("nodes", "weights"))
    if not nodes.shape == weights.shape == (nodes.size,) or not nodes.size:
        raise InputError("its density needs one weight per node")
    return Density(nodes, weights, float(content["width"]))


def _pairs_table(named: Mapping[str, Pairs]) -> Markup:
    rows = [[f"{name} {place}", _interval(pair)] for name, own in named.items() for place, pair in enumerate(own, start=1)]
    return table(["eigenvalue", "value"], rows, "Outermost eigenvalues")


def _density_table(named: Mapping[str, Density]) -> Markup:
    levels = (0.0, 0.1, 0.5, 0.9, 1.0)
    rows = [[name, *(f"{value:.4g}" for value in _quantiles(density, levels))] for name, density in named.items()]
    return table(["matrix", *(f"{level:.0%} lie below" for level in levels)], rows, "Quantiles of the eigenvalues")


def _quantiles(density: Density, levels: Sequence[float]) -> np.ndarray:
    order = np.argsort(density.nodes)
    reached = np.cumsum(density.weights[order])
    places = np.searchsorted(reached, np.asarray(levels) * reached[-1])
    return density.nodes[order][places.clip(max=len(order) - 1)]


def _interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.5g} ± {pair[1]:.1g}"


# generalization ------------------------------------------------------------------------------------------------------


def generalization_section(records: Sequence[Record]) -> Section:
    """Bounds side by side, with what goes into each."""
    found = Guarantees.from_dict(_one(records))
    caption = (
        "Certified: a theorem whose ingredients are proved. Estimate: a theorem whose ingredients were measured. "
        "Measure: a number to compare by, without a scale. Left of the dashed line a bound says something."
    )
    missing = [f"{name}: {reason}" for name, reason in found.not_given.items()]
    parts: list[Part] = [
        element("p", f"{found.size:,} training samples, mean loss {found.empirical:.4g}."),
        Drawing("Bounds side by side", bound_comparison(found, found.held_out), caption, _bounds_table(found)),
        _ingredients_table(found),
        titled("Not given", missing, "notes"),
    ]
    return Section("Generalization", _guarantee(found), parts)


def _guarantee(found: Guarantees) -> str:
    certified = [bound for bound in found if bound.certified and bound.quantity == RISK]
    telling = [bound for bound in certified if not bound.vacuous]
    if telling:
        best = telling[0]
        return f"With probability {1 - found.delta:g} the mean {best.loss} loss is at most {best.value} ({best.name}, certified)."
    vacuous = f"{len(certified)} are vacuous" if certified else "there is none"
    return f"No certified bound on the risk says anything: {vacuous}."


def _bounds_table(found: Guarantees) -> Markup:
    rows = [
        [bound.name, bound.quantity, bound.loss, str(bound.value), _trivial(bound), bound.status, bound.verdict] for bound in found
    ]
    return table(["bound", "of", "loss", "value", "trivial", "status", "verdict"], rows, f"{len(rows)} bounds and measures")


def _ingredients_table(found: Guarantees) -> Markup:
    rows = [
        [
            bound.name,
            words("; ".join(f"{name} = {shown(part)}" for name, part in bound.parts.items())),
            words("; ".join(bound.assumptions)),
        ]
        for bound in found
    ]
    made = table(["bound", "ingredients", "assumes"], rows, "What each bound is made of")
    return element("details", element("summary", "Ingredients and assumptions"), made)


def _trivial(bound: Bound) -> str:
    return "–" if bound.status == MEASURE else f"{bound.trivial:.3g}"


# claims and experiments ----------------------------------------------------------------------------------------------


def claims_section(records: Sequence[Record]) -> Section:
    """The ledger, a table per verdict."""
    alike = {verdict: [record for record in records if record["verdict"] == verdict] for verdict in CLAIM_VERDICTS}
    if sum(map(len, alike.values())) < len(records):
        raise InputError(f"a verdict must be one of {', '.join(CLAIM_VERDICTS)}")
    counts = ", ".join(f"{len(own)} {verdict}" for verdict, own in alike.items() if own)
    tables = [_claims_table(verdict, own) for verdict, own in alike.items() if own]
    return Section("Claims of the papers", f"{len(records)} claims: {counts}.", tables)


def _claims_table(verdict: str, records: Sequence[Record]) -> Markup:
    rows = [
        [record["id"], f"{record['paper']}, {_where(record)}", words(record["statement"]), words(_correction(record)),
         words(_facts(record["evidence"]))]
        for record in records
    ]  # fmt: skip
    return table(["claim", "where", "statement", "instead", "evidence"], rows, f"{verdict}: {len(rows)}")


def _where(record: Record) -> str:
    return str(record["where" if "where" in record else "place"])


def _correction(record: Record) -> str:
    state = {True: " (checked)", False: " (not confirmed by this run)", None: ""}[record["correction_confirmed"]]
    return f"{record['correction']}{state}"


def ledger_section(records: Sequence[Record]) -> Section:
    """The ledger as `run_claims` gives it."""
    return claims_section(_one(records)["claims"])


def lab_section(records: Sequence[Record]) -> Section:
    """What the paper says beside what was measured."""
    record = _one(records)
    compared = [Comparison(**row) for row in record["comparisons"]]
    rows = [[words(row.quantity), words(row.paper), words(row.ours), row.answer or "–"] for row in compared]
    failures = [f"{failure['label']}, seed {failure['seed']}: {failure['error']}" for failure in record["failures"]]
    settings: list[list[Child]] = [[name, words(str(value))] for name, value in record["settings"].items()]
    parts: list[Part] = [
        element("p", record["statement"]),
        table(["quantity", "theirs", "ours", "verdict"], rows, f"The paper and {len(record['trials'])} trials"),
        titled("Trials that failed", failures, "wrong"),
        table(["setting", "value"], settings, f"{record['mode']} settings"),
    ]
    headline = f"{record['source']}, {record['mode']} settings: {record['verdict']}."
    return Section(f"Experiment {record['experiment']}", headline, parts)


def _facts(evidence: Record) -> str:
    said = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in evidence.items()}
    return "; ".join(f"{name}: {value}" for name, value in said.items())


def _one(records: Sequence[Record]) -> Record:
    if len(records) != 1:
        raise InputError(f"it has {len(records)} records, not one")
    return records[0]


# any other result ----------------------------------------------------------------------------------------------------

STORED: tuple[type[Result], ...] = (
    Ablation, Bound, Bracket, CheckpointReport, FamilyComparison, Flatness, GapCurve, Landscape, LocalBrackets, Margins,
    Path, Robustness, Sensitivities, TrainingCost,
)  # fmt: skip


def symmetries_section(records: Sequence[Record]) -> Section:
    """The groups of a report of `ns.symmetries` in a table."""
    record = _one(records)
    rows = [
        [group["kind"], str(group["count"]), words(", ".join(group["parameters"])), words(" → ".join(group["path"]))]
        for group in record["groups"]
    ]
    free = f"{100 * float(record['scale_free']):.1f} % of {record['parameters']:,} parameters are scale-free"
    parts = [table(["kind", "count", "parameters", "path"], rows, f"{len(rows)} groups")]
    return Section(f"Symmetries of {record['model']}", f"{len(rows)} groups in {record['mode']} mode; {free}.", parts)


def run_section(records: Sequence[Record]) -> Section:
    """What a run's report says in words; `normscope report DIRECTORY` has its figures."""
    record = _one(records)
    if "problem" in record:
        return Section(f"Run {record['name']}", str(record["problem"]), [])
    problems: list[Child] = [
        [element("code", str(found["rule"])), f" at {found['where']}: {found['message']} ({found['fix']})"]
        for found in record["problems"]
    ]
    parts: list[Part] = [
        element("p", str(record["extent"])),
        titled("Notes", list(map(str, record["notes"])), "notes"),
        titled("What is not fine", problems, "wrong"),
        titled("What is fine", list(map(str, record["fine"])), "right", fold=True),
        titled("Not judged", list(map(str, record["not_judged"])), "apart"),
    ]
    return Section(f"Run {record['name']}", str(record["headline"]), parts)


def section_of(result: Result) -> Section:
    """Of any result: by its schema, or else its text and its figures."""
    if result.schema in SECTIONS and type(result) not in STORED:
        return SECTIONS[result.schema]([json.loads(encode(result.to_dict()))])
    lines = str(result).splitlines() or [""]
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(result).__name__).capitalize()
    text = element("pre", "\n".join(lines))
    drawings = [Drawing(figure.capitalize(), result.figure(figure), "", text) for figure in result.figures]
    return Section(name, lines[0], [text, *drawings])


def _stored(kind: type[Result]) -> Callable[[Sequence[Record]], Section]:
    return lambda records: section_of(kind.from_dict(_one(records)))


SECTIONS: dict[str, Callable[[Sequence[Record]], Section]] = {
    Audit.schema: audit_section,
    Findings.schema: doctor_section,
    Difference.schema: difference_section,
    Curvature.schema: curvature_section,
    Guarantees.schema: generalization_section,
    CLAIM_SCHEMA: claims_section,
    "normscope.claim/1": claims_section,  # of earlier versions
    LEDGER_SCHEMA: ledger_section,
    LAB_SCHEMA: lab_section,
    Run.schema: run_section,
    SymmetryReport.schema: symmetries_section,
    **{kind.schema: _stored(kind) for kind in STORED},
}
