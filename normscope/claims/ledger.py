"""The ledger: every claim of both papers with its id, and what running them says."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType

from normscope.claims.verdicts import BOUND, FALSE, GAP, HOLDS, MEASURED, VERDICTS, Outcome
from normscope.core.errors import InputError
from normscope.core.rendering import Text

SCHEMA = "normscope.claim/1"
THAN, AKBAR = "Than 2025", "Akbar"
PAPERS = {
    THAN: "The Hidden Power of Normalization Layers in Neural Networks: Exponential Capacity Control (arXiv 2511.00958)",
    AKBAR: "Deep Network Normalization Through Gradient Flow Dynamics, Implicit Regularization, and Riemannian Geometry",
}
THEMES = (  # modules that register claims, in the order of the ledger
    "than2025.normalizers", "than2025.networks", "than2025.weights", "than2025.optimization", "than2025.generalization",
    "than2025.comparisons", "than2025.figures",
    "akbar.symmetry", "akbar.derivatives", "akbar.conditioning", "akbar.dynamics", "akbar.observations",
)  # fmt: skip
COLOURS = {HOLDS: "green", BOUND: "cyan", FALSE: "bold red", GAP: "yellow", MEASURED: "magenta"}

Check = Callable[..., Outcome]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper: where it stands, the mathematics of our check, and what is true instead, if anything."""

    id: str
    paper: str
    place: str
    statement: str
    correction: str
    mathematics: str
    long: bool
    check: Check

    def run(self, seed: int = 0, **changes: Any) -> Result:
        """Run the check; `changes` replaces parts of the statement, such as `stated=` a formula."""
        start = time.perf_counter()
        outcome = self.check(torch.Generator().manual_seed(seed), **changes)
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
        return "" if fine else self.claim.correction

    @property
    def label(self) -> str:
        """What the outcome's instance is."""
        return "counterexample" if self.outcome.verdict in (FALSE, GAP) else "instance"

    def to_dict(self) -> dict[str, Any]:
        evidence = dict(self.outcome.evidence)
        if self.outcome.instance:
            evidence[self.label] = self.outcome.instance
        return {
            "schema": SCHEMA,
            "id": self.claim.id,
            "paper": self.claim.paper,
            "place": self.claim.place,
            "statement": self.claim.statement,
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
        for paper, title in PAPERS.items():
            rows = [result for result in self.results if result.claim.paper == paper]
            parts += [Text(f"{paper}: {title}", "bold"), *(_row(result) for result in rows), Text("")] if rows else []
        counts = {verdict: sum(result.outcome.verdict == verdict for result in self.results) for verdict in VERDICTS}
        parts.append(Text(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)))
        if self.skipped:
            parts.append(Text(f"not run, for they are long (--long runs them): {', '.join(c.id for c in self.skipped)}", "dim"))
        return Group(*parts)


CLAIMS: dict[str, Claim] = {}


def claim(id: str, paper: str, place: str, statement: str, correction: str = "", long: bool = False) -> Callable[[Check], Check]:
    """Register a check; its docstring is the mathematics, its parameters after the generator are what the statement says."""

    def decorate(check: Check) -> Check:
        if id in CLAIMS:
            raise ValueError(f"{id} is taken by {CLAIMS[id].check.__name__}")
        CLAIMS[id] = Claim(id, paper, place, statement, correction, inspect.getdoc(check) or "", long, check)
        return check

    return decorate


def load() -> dict[str, Claim]:
    """All claims, theme by theme."""
    modules = [import_module(f"normscope.claims.{theme}").__name__ for theme in THEMES]
    return dict(sorted(CLAIMS.items(), key=lambda item: modules.index(item[1].check.__module__)))


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
    return "\n".join(f"{claim.id:<16}{claim.paper}, {claim.place}: {claim.statement}" for claim in load().values())


def explanation(id: str) -> str:
    """A claim in full: statement, place, mathematics and correction."""
    claim = find(id)
    parts = [f"{claim.id} ({claim.paper}, {claim.place})", claim.statement, claim.mathematics]
    parts += [f"Correction: {claim.correction}"] if claim.correction else []
    parts += ["Long: runs only when it is named or with --long."] if claim.long else []
    return "\n\n".join(parts)


def _row(result: Result) -> RenderableType:
    claim, outcome = result.claim, result.outcome
    head = Text.assemble((f"{claim.id:<16}", "bold"), (f"{outcome.verdict:<17}", COLOURS[outcome.verdict]), claim.statement)
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
