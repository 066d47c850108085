"""Observations of the papers: experiments of the lab in a size that takes seconds, judged as the lab judges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from normscope.claims.claim import claim
from normscope.claims.verdicts import Ruling, measured
from normscope.lab.experiment import Comparison, Results, find
from normscope.lab.runner import AGREES, run_trials, verdict

Changes = Mapping[str, str]  # of an experiment's settings, as words on a command line
Alteration = Callable[[Results], Results]  # of what was measured, before it is judged: mutants state something else


def as_measured(results: Results) -> Results:
    return results


def exchanged(results: Results) -> Results:
    """What was measured with the first normalizer is said to have been measured without, and the other way round."""
    first = next(t.parameters["normalizer"] for t in results if t.parameters["normalizer"] != "none")
    other = {first: "none", "none": first}

    def said(name: str) -> str:
        return other.get(name, name)

    return Results([replace(t, parameters={**t.parameters, "normalizer": said(t.parameters["normalizer"])}) for t in results])


def observe(theme: str, observations: Mapping[str, tuple[str, Changes, str]], long: bool = False) -> None:
    """Register what a module of claims takes from the lab: id → (experiment, changes of its settings, what is measured)."""
    for id, (experiment, changes, mathematics) in observations.items():

        def check(
            generator: torch.Generator, stated: Alteration = as_measured, experiment: str = experiment, changes: Changes = changes
        ) -> Ruling:
            return observation(experiment, generator.initial_seed(), changes, stated)

        check.__doc__, check.__module__, check.__name__ = f"`{experiment}`{mathematics}", theme, id
        claim(id, long=long)(check)


def observation(experiment: str, seed: int, changes: Changes, stated: Alteration = as_measured) -> Ruling:
    """What the lab says of a small run: every row of its judgement, and whether all in which the paper says something agree."""
    results = run_trials(experiment, {**changes, "seeds": f"[{seed}]"}, directory())
    rows = list(find(experiment).judge(stated(results)))
    said = [row for row in rows if row.agrees is not None]
    settings = ", ".join(f"{name} {value}" for name, value in changes.items())
    theirs = "; ".join(dict.fromkeys(row.paper for row in said))
    answers = {"rows that agree": f"{sum(bool(row.agrees) for row in said)} of {len(said)}"}
    shown = {row.quantity: _shown(row) for row in rows}
    return measured(theirs, verdict(rows) == AGREES, f"lab run {experiment} with {settings}", **answers, **shown)


def directory() -> Path:
    """Where trials are kept while this process runs: claims share those that are equal."""
    return Path(_temporary().name)


@lru_cache(1)
def _temporary() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="normscope-claims-")


def _shown(row: Comparison) -> str:
    return row.ours if row.agrees is None else f"{row.ours} ({'as' if row.agrees else 'not'} {row.paper})"
