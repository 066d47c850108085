"""The ledger: every claim of both papers with its id, and what running them says."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from normscope.claims.statement import AKBAR, ANSWER, DIGEST, HEDGES, LATER, SLIDES, SOURCES, STATED, THAN, Statement
from normscope.claims.verdicts import BOUND, FALSE, GAP, HEDGED, HOLDS, MEASURED, REFUTED, VERDICTS, Ruling
from normscope.core.codec import number
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.papers import CLAIM_SCHEMA, LEDGER_SCHEMA, Plot
from normscope.core.progress import Progress, shown
from normscope.core.rendering import Group, RenderableType, Text
from normscope.core.result import ResultSequence

PAPERS = {  # what the claims stand under, and the sources of each
    "Than 2025": (THAN, SLIDES, DIGEST),
    "Akbar": (AKBAR,),
    "Later work": (LATER,),
    "Open questions": (ANSWER,),
}
THEMES = (  # modules that register claims, in the order of the ledger
    "than2025.normalizers", "than2025.networks", "than2025.weights", "than2025.optimization", "than2025.generalization",
    "than2025.comparisons", "than2025.figures",
    "akbar.symmetry", "akbar.derivatives", "akbar.conditioning", "akbar.dynamics", "akbar.theory", "akbar.discussion",
    "akbar.extensions", "akbar.observations",
    "answers.later", "answers.floors", "answers.residual", "answers.noise",
)  # fmt: skip
STATEMENTS = ("than2025.statements", "akbar.statements", "answers.statements")
COLOURS = {HOLDS: "green", BOUND: "cyan", FALSE: "bold red", GAP: "yellow", HEDGED: "blue", MEASURED: "magenta"}

Check = Callable[..., Ruling]


@dataclass(frozen=True)
class Claim:
    """A statement, the mathematics of our check, and the check."""

    id: str
    form: Statement
    mathematics: str
    long: bool
    check: Check

    @property
    def paper(self) -> str:
        return next(paper for paper, sources in PAPERS.items() if self.form.source in sources)

    def run(self, seed: int = 0, **changes: Any) -> Checked:
        """Run the check in torch's usual dtype; `changes` replaces parts of the statement, such as `stated=` a formula."""
        start, default = time.perf_counter(), torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            outcome = self.check(torch.Generator().manual_seed(seed), **changes)
        finally:
            torch.set_default_dtype(default)
        if self.form.hedge != STATED and outcome.verdict in REFUTED:
            outcome = replace(outcome, verdict=HEDGED)
        return Checked(self, outcome, time.perf_counter() - start)


@dataclass(frozen=True)
class Checked:
    """A claim with what running it said."""

    claim: Claim
    outcome: Ruling
    seconds: float

    @property
    def correction(self) -> str:
        """What is true instead; empty where the statement holds, or where what was measured agrees with it."""
        fine = self.outcome.verdict == HOLDS or self.outcome.evidence.get("agrees")
        return "" if fine else self.claim.form.correction

    @property
    def label(self) -> str:
        """What the outcome's instance is."""
        return "counterexample" if self.outcome.verdict in REFUTED else "instance"

    def to_dict(self) -> dict[str, Any]:
        evidence = dict(self.outcome.evidence)
        if self.outcome.instance:
            evidence[self.label] = self.outcome.instance
        return {
            "schema": CLAIM_SCHEMA,
            "id": self.claim.id,
            "paper": self.claim.paper,
            **asdict(self.claim.form),
            "verdict": self.outcome.verdict,
            "correction": self.correction,
            "correction_confirmed": self.outcome.confirmed if self.correction else None,
            "evidence": evidence,
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Checked:
        """What `to_dict` described, as a claim that cannot be run again."""
        evidence, verdict = dict(content["evidence"]), content["verdict"]
        instance = str(evidence.pop("counterexample" if verdict in REFUTED else "instance", ""))
        read = {name: number(value) if value in (None, "inf", "-inf", "nan") else value for name, value in evidence.items()}
        form = Statement(**{part.name: content[part.name] for part in fields(Statement)})
        outcome = Ruling(verdict, read, instance, content["correction_confirmed"])
        return Checked(Claim(content["id"], form, "", False, _not_here), outcome, float(content["seconds"]))


def _not_here(*_: Any, **__: Any) -> Ruling:
    raise InputError("this claim was read from a file: find it by its id with normscope claims --select ID")


@dataclass(frozen=True, repr=False)
class Ledger(ResultSequence[Checked]):
    """What was found, by paper; `skipped` are the ids of long claims that were not asked for."""

    schema = LEDGER_SCHEMA

    results: tuple[Checked, ...]
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """`claims`: objects with schema, id, paper, statement, verdict, correction and evidence. `skipped`: ids."""
        return {"schema": self.schema, "claims": [result.to_dict() for result in self], "skipped": list(self.skipped)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_dict` described. Earlier versions wrote the list of claims alone: pass {"claims": that list}."""
        return cls(tuple(map(Checked.from_dict, content["claims"])), tuple(content.get("skipped", ())))

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """verdicts: how many claims of each source have each verdict."""
        from normscope.report.plots import plot

        counts = self.counts()
        series = {
            verdict: (list(counts), [float(counts[source][verdict]) for source in counts])
            for verdict in VERDICTS
            if any(counts[source][verdict] for source in counts)
        }
        return {"verdicts": partial(plot, Plot("Verdicts by source", "", "claims", series, kind="bars"))} if series else {}

    def render(self) -> RenderableType:
        parts: list[RenderableType] = []
        for paper in PAPERS:
            rows = [result for result in self.results if result.claim.paper == paper]
            parts += [Text(paper, "bold"), *(_row(result) for result in rows), Text("")] if rows else []
        parts += [Text(line) for line in self.tallies()]
        if self.skipped:
            parts.append(Text(f"not run because they are long (--long runs them): {', '.join(self.skipped)}", "dim"))
        return Group(*parts)

    def tallies(self) -> list[str]:
        """The verdicts by source, one line each."""
        return [
            f"{source}: " + ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
            for source, counted in self.counts().items()
        ]

    def counts(self) -> dict[str, Counter[str]]:
        """By source, how many claims have each verdict."""
        found = {source: Counter(r.outcome.verdict for r in self.results if r.claim.form.source == source) for source in SOURCES}
        return {source: counted for source, counted in found.items() if counted}


CHECKS: dict[str, tuple[Check, bool]] = {}


def claim(id: str, long: bool = False) -> Callable[[Check], Check]:
    """Register the check of a statement; its docstring is the mathematics, its parameters after the generator are what is said."""

    def decorate(check: Check) -> Check:
        if id in CHECKS:
            raise ValueError(f"{id} is taken by {CHECKS[id][0].__name__}")
        CHECKS[id] = check, long
        return check

    return decorate


@cache
def load() -> dict[str, Claim]:
    """All claims, theme by theme."""
    modules = [import_module(f"normscope.claims.{theme}").__name__ for theme in THEMES]
    forms: dict[str, Statement] = {}
    for part in STATEMENTS:
        forms |= import_module(f"normscope.claims.{part}").STATEMENTS
    if unmatched := forms.keys() ^ CHECKS.keys():
        raise ValueError(f"statements without a check, or checks without a statement: {', '.join(sorted(unmatched))}")
    ordered = sorted(CHECKS.items(), key=lambda item: modules.index(item[1][0].__module__))
    return {id: Claim(id, forms[id], inspect.getdoc(check) or "", long, check) for id, (check, long) in ordered}


def find(id: str) -> Claim:
    """The claim of that id, in any case of letters."""
    for known, claim in load().items():
        if known.lower() == id.strip().lower():
            return claim
    raise InputError(f"no claim {id!r}: choose from {', '.join(load())}")


@earlier(positional=3, only="select", report="progress")
def run_claims(select: Sequence[str] = (), *, long: bool = False, seed: int = 0, progress: Progress = None) -> Ledger:
    """Run the claims named by `select`, else all; the long ones only where they are named or `long` is set.

    select: ids of claims, such as ["T-T13"].
    long: also run those that take minutes.
    seed: of every random instance and training.
    progress: True for a bar on stderr, or a callable (what, done, total).
    """
    select = [select] if isinstance(select, str) else select
    chosen = list({claim.id: claim for claim in map(find, select)}.values()) or list(load().values())
    wanted = [claim for claim in chosen if long or select or not claim.long]
    results = []
    with shown("claims", progress, len(wanted)) as meter:
        for claim in wanted:
            meter.at(claim.id)
            results.append(claim.run(seed))
            meter.done += 1
    return Ledger(tuple(results), tuple(claim.id for claim in chosen if claim not in wanted))


def contents() -> str:
    """Every claim in a line: its id, where it stands, and what it says."""
    return "\n".join(f"{claim.id:<18}{claim.form.source}, {claim.form.where}: {claim.form.statement}" for claim in load().values())


def explanation(id: str) -> str:
    """A claim in full: the statement's logical form beside our reading of it, and what is true instead."""
    claim = find(id)
    form = claim.form
    rows = {"source": f"{form.source} ({SOURCES[form.source]})", "where": form.where, "quantifier": form.quantifier}
    rows |= {"assumptions": form.assumptions, "hedge": f"{form.hedge} ({HEDGES[form.hedge]})", "statement": form.statement}
    parts = [claim.id, "\n".join(f"{name + ':':<13}{text}" for name, text in rows.items()), f"Check: {claim.mathematics}"]
    parts += [f"Correction: {form.correction}"] if form.correction else []
    parts += ["Long: runs only when it is named or with --long."] if claim.long else []
    return "\n\n".join(parts)


def _row(result: Checked) -> RenderableType:
    claim, outcome = result.claim, result.outcome
    head = Text.assemble((f"{claim.id:<18}", "bold"), (f"{outcome.verdict:<19}", COLOURS[outcome.verdict]), claim.form.statement)
    lines = [head]
    if result.correction:
        state = {True: " (checked)", False: " (NOT confirmed by this run)", None: ""}[outcome.confirmed]
        lines.append(Text(f"    instead: {result.correction}{state}"))
    if outcome.instance:
        lines.append(Text(f"    {result.label}: {outcome.instance}"))
    numbers = "; ".join(f"{name} = {_shown(value)}" for name, value in outcome.evidence.items())
    lines.append(Text(f"    {numbers}", "dim"))
    return Group(*lines)


def _shown(value: float | int | bool | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
