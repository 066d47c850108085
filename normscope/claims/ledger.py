"""The ledger: every claim of both papers with its id, and what running them says."""

from __future__ import annotations

import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType

from normscope.claims.statement import AKBAR, ANSWER, DIGEST, HEDGES, LATER, SLIDES, SOURCES, STATED, THAN, Statement
from normscope.claims.verdicts import BOUND, FALSE, GAP, HEDGED, HOLDS, MEASURED, REFUTED, VERDICTS, Outcome
from normscope.core.errors import InputError
from normscope.core.rendering import Text

SCHEMA = "normscope.claim/2"
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

Check = Callable[..., Outcome]


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

    def run(self, seed: int = 0, **changes: Any) -> Result:
        """Run the check in torch's usual dtype; `changes` replaces parts of the statement, such as `stated=` a formula."""
        start, default = time.perf_counter(), torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            outcome = self.check(torch.Generator().manual_seed(seed), **changes)
        finally:
            torch.set_default_dtype(default)
        if self.form.hedge != STATED and outcome.verdict in REFUTED:
            outcome = replace(outcome, verdict=HEDGED)
        return Result(self, outcome, time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """A claim with what running it said."""

    claim: Claim
    outcome: Outcome
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
            "schema": SCHEMA,
            "id": self.claim.id,
            "paper": self.claim.paper,
            **asdict(self.claim.form),
            "verdict": self.outcome.verdict,
            "correction": self.correction,
            "correction_confirmed": self.outcome.confirmed if self.correction else None,
            "evidence": evidence,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Ledger(Sequence[Result]):
    """Results by paper; `skipped` are the long claims that were not asked for."""

    results: tuple[Result, ...]
    skipped: tuple[Claim, ...] = ()

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def to_json(self, path: str | Path | None = None) -> str:
        """A list of objects with schema, id, paper, statement, verdict, correction and evidence."""
        text = json.dumps([_finite(result.to_dict()) for result in self.results], indent=2, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def render(self) -> RenderableType:
        parts: list[RenderableType] = []
        for paper in PAPERS:
            rows = [result for result in self.results if result.claim.paper == paper]
            parts += [Text(paper, "bold"), *(_row(result) for result in rows), Text("")] if rows else []
        parts += [Text(line) for line in self.tallies()]
        if self.skipped:
            parts.append(Text(f"not run, for they are long (--long runs them): {', '.join(c.id for c in self.skipped)}", "dim"))
        return Group(*parts)

    def tallies(self) -> list[str]:
        """The verdicts by source, one line each."""
        counts: dict[str, Counter[str]] = {}
        for result in self.results:
            counts.setdefault(result.claim.form.source, Counter())[result.outcome.verdict] += 1
        return [
            f"{source}: " + ", ".join(f"{counts[source][verdict]} {verdict}" for verdict in VERDICTS if counts[source][verdict])
            for source in SOURCES
            if source in counts
        ]


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


def run_claims(
    only: Sequence[str] = (), long: bool = False, seed: int = 0, report: Callable[[str, int, int], None] | None = None
) -> Ledger:
    """Run the claims named by `only`, else all; the long ones only where they are named or `long` is set.

    report: called with the claim's id, how many are done and how many there are.
    """
    only = [only] if isinstance(only, str) else only
    chosen = list({claim.id: claim for claim in map(find, only)}.values()) or list(load().values())
    wanted = [claim for claim in chosen if long or only or not claim.long]
    results = []
    for done, claim in enumerate(wanted):
        if report is not None:
            report(claim.id, done, len(wanted))
        results.append(claim.run(seed))
    return Ledger(tuple(results), tuple(claim for claim in chosen if claim not in wanted))


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


def _row(result: Result) -> RenderableType:
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


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return str(value) if isinstance(value, float) and not torch.tensor(value).isfinite() else value
