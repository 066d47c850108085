"""docs/claims.md, made from a run of the claims: `python -m normscope.claims`."""

from __future__ import annotations

from normscope.claims.claim import PAPERS, Checked, Claim, Ledger, load
from normscope.claims.statement import SOURCES, STATED
from normscope.claims.verdicts import REFUTED

INTRODUCTION = """\
# Claims

Statements of two papers about normalization, of the first one's slides and of a digest of it, each beside a function that tries to
confirm it and to refute it, on random and adversarial instances in float64 against automatic differentiation or a dense reference.
The numbers decide: the same function, given the corrected formula, says *holds*. Two more chapters are executable in the same way:
what later work says, and our answers to the papers' [open questions](open-questions.md).

```
normscope claims                     every claim but the long ones, and the verdicts by source
normscope claims --select T-T13      one of them; --select may be repeated
normscope claims --list              every id, with where it stands and what it says
normscope claims --explain T-T13     the statement's logical form beside our reading, and what is true instead
normscope claims --mutants           changes of every statement (a factor 0.9, a sign, a term), and what becomes of each
normscope claims --json -            an object with the list `claims`: id, source, where, quantifier, statement, verdict, …
normscope claims --long              the long ones too
```

Each record says where a statement stands, its quantifier (*for all*, *there exists*, *can*, *with probability 1 − δ*, *observed*),
what it assumes, and whether the source states it, suggests it, or doubts it itself. All of it is in our words.

Verdicts: *holds*; *holds as a bound* (not an equality, or reached by no instance that was tried); *false as stated* (with what
is true instead, and a counterexample); *does not follow* (the argument has a gap); *not so, but hedged* (the numbers refute it, and
the source does not state it outright: not counted as false); *measured* (an observation: the paper's figure and ours, which
`normscope claims --select ID` prints with its settings). Measured claims are experiments of the [lab](lab.md) with one seed, in a
size that takes seconds; the name in `code` is that of the experiment to run for more. A bound with probability 1 − δ cannot be
proved by trials: its section names the proof, and the trials say how far each term could shrink before a violation shows.

This page is made by `python -m normscope.claims`; a test fails when it is stale."""


def documentation(ledger: Ledger) -> str:
    """The introduction, a count of verdicts by source, then one section per claim."""
    results = {result.claim.id: result for result in ledger}
    counts = "\n".join(f"- {line}" for line in ledger.tallies())
    parts = [INTRODUCTION, "## Verdicts by source", counts]
    for paper, sources in PAPERS.items():
        parts += [f"## {paper}", "\n".join(f"- *{source}*: {SOURCES[source]}." for source in sources)]
        parts += [_section(claim, results.get(claim.id)) for claim in load().values() if claim.paper == paper]
    return "\n\n".join(parts) + "\n"


def _section(claim: Claim, result: Checked | None) -> str:
    verdict = "long, not run for this page" if result is None else result.outcome.verdict
    form = claim.form
    hedge = "" if form.hedge == STATED else f", {form.hedge}"
    lines = [f"### {claim.id}: {verdict}", f"{form.source}, {form.where}{hedge}. {form.quantifier.capitalize()}: {form.statement}"]
    lines.append(f"*Assumed:* {form.assumptions}.")
    if result is not None and result.correction:
        lines.append(f"*Instead.* {result.correction}")
    if result is not None and result.outcome.instance and result.outcome.verdict in REFUTED:
        lines.append(f"*Counterexample.* {result.outcome.instance}.")
    lines.append(f"*Check.* {' '.join(claim.mathematics.split())}")
    return "\n\n".join(lines)
