"""docs/claims.md, made from a run of the claims: `python -m normscope.claims`."""

from __future__ import annotations

from collections import Counter

from normscope.claims.ledger import PAPERS, Claim, Ledger, Result, load
from normscope.claims.verdicts import FALSE, GAP, VERDICTS

INTRODUCTION = """\
# Claims

Every statement of two papers as a function that tries to confirm it and to refute it, on random and adversarial instances in
float64 against automatic differentiation or a dense reference. The numbers decide: the same function, given the corrected
formula, says *holds*.

```
normscope claims                     every claim but the long ones, by paper
normscope claims --only T-T13        one of them; --only may be repeated
normscope claims --list              every id, with where it stands and what it says
normscope claims --explain T-T13     the statement, the mathematics, where it stands, what is true instead
normscope claims --json -            a list of objects with id, paper, statement, verdict, correction, evidence
normscope claims --long              the long ones too
```

Verdicts: *holds*; *holds as a bound* (not an equality, or reached by no instance that was tried); *false as stated* (with what is
true instead, and a counterexample); *does not follow* (the argument has a gap); *measured* (an observation: the paper's figure and
ours, which `normscope claims --only ID` prints with its settings). Measured claims are experiments of the [lab](lab.md) with one
seed, in a size that takes seconds; the name in `code` is that of the experiment to run for more.

This page is made by `python -m normscope.claims`; a test fails when it is stale."""


def documentation(ledger: Ledger) -> str:
    """The introduction, a count of verdicts by paper, then one section a claim."""
    results = {result.claim.id: result for result in ledger}
    parts = [INTRODUCTION]
    for paper, title in PAPERS.items():
        claims = [claim for claim in load().values() if claim.paper == paper]
        counts = Counter(results[claim.id].outcome.verdict for claim in claims if claim.id in results)
        summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        parts += [f"## {paper}", f"*{title}*: {summary}."]
        parts += [_section(claim, results.get(claim.id)) for claim in claims]
    return "\n\n".join(parts) + "\n"


def _section(claim: Claim, result: Result | None) -> str:
    verdict = "long, not run for this page" if result is None else result.outcome.verdict
    lines = [f"### {claim.id}: {verdict}", f"{claim.place}. {claim.statement}"]
    if result is not None and result.correction:
        lines.append(f"*Instead.* {result.correction}")
    if result is not None and result.outcome.instance and result.outcome.verdict in (FALSE, GAP):
        lines.append(f"*Counterexample.* {result.outcome.instance}.")
    lines.append(f"*Check.* {' '.join(claim.mathematics.split())}")
    return "\n\n".join(lines)
