"""Results of a tiny run with some of their numbers overwritten, to see a verdict change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from normscope.lab.experiment import Results, TrialResult

Numbers = Mapping[str, Any]  # path of names and indices, separated by slashes → value
Rule = Callable[[Mapping[str, Any]], Numbers]  # of a trial's parameters


def tampered(results: Results, rule: Rule) -> Results:
    """Every trial with the numbers that `rule` gives for its parameters; "history/-1/x" is x of the last epoch."""
    return Results([_overwritten(trial, rule(trial.parameters)) for trial in results])


def _overwritten(trial: TrialResult, numbers: Numbers) -> TrialResult:
    changed: Any = copy.deepcopy(trial.numbers)
    for path, value in numbers.items():
        *way, last = path.split("/")
        place = changed
        for name in way:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = value
    return TrialResult(trial.label, trial.seed, trial.parameters, changed)
