"""What an experiment is: settings, trials, what the paper says, a judgement and plots; one small module each.

A module in `normscope/lab/experiments/` ends with `EXPERIMENT = Experiment(…)` and is found by that; nothing else to register.
"""

from __future__ import annotations

import json
import math
import pkgutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from normscope.core.errors import InputError
from normscope.core.papers import Comparison as Comparison
from normscope.core.papers import Plot as Plot

if TYPE_CHECKING:
    from normscope.lab.workspace import Workspace

Numbers = dict[str, Any]  # what one trial measured: numbers, words, and lists and mappings of them


@dataclass(frozen=True)
class Settings:
    """What an experiment may be run with; subclasses add fields, each with a default. Values are plain JSON."""

    data: str = "digits"
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not all(type(seed) is int and seed >= 0 for seed in self.seeds):
            raise InputError(f"seeds must be whole numbers from 0, such as 0,1,2, got {', '.join(map(str, self.seeds))}")

    def changed(self, changes: Mapping[str, str]) -> Settings:
        """With fields replaced by what a command line says: JSON, a word, or names separated by commas for tuples and mappings.

        >>> Settings().changed({"seeds": "1,2"}).seeds
        (1, 2)
        """
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise InputError(f"no setting {', '.join(unknown)}: choose from {', '.join(known)}")
        return replace(self, **{name: _parsed(name, text, known[name]) for name, text in changes.items()})


def side_by_side(with_bn: float, without: float, form: str = ".3g") -> str:
    """What was measured with BN and without, for a comparison."""
    return f"{with_bn:{form}} BN, {without:{form}} no BN"


def power(log10: float) -> str:
    """A number by its logarithm.

    >>> power(-8.04), power(math.inf), power(-math.inf)
    ('10^-8.0', '∞', '0')
    """
    return f"10^{log10:.1f}" if math.isfinite(log10) else {math.inf: "∞", -math.inf: "0"}.get(log10, "not a number")


@dataclass(frozen=True)
class TrialResult:
    """A finished trial: its label, its parameters as plain values (options of a network among them), and what it measured."""

    label: str
    seed: int
    parameters: Mapping[str, Any]
    numbers: Numbers


class Results(Sequence[TrialResult]):
    """The trials of an experiment, in order."""

    def __init__(self, trials: Sequence[TrialResult]) -> None:
        self.trials = tuple(trials)

    def __getitem__(self, index: Any) -> Any:
        return self.trials[index]

    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials)

    def where(self, **parameters: Any) -> Results:
        """Those whose parameters have these values."""
        return Results([t for t in self.trials if all(t.parameters.get(name) == value for name, value in parameters.items())])

    def groups(self, *names: str) -> dict[tuple[Any, ...], Results]:
        """By the values of some parameters, in order; in each group only the rest varies, such as the seed."""
        keys = dict.fromkeys(tuple(t.parameters[name] for name in names) for t in self.trials)
        return {key: self.where(**dict(zip(names, key, strict=True))) for key in keys}

    def by_seed(self) -> list[Results]:
        """The trials of each seed."""
        return [Results([t for t in self.trials if t.seed == seed]) for seed in dict.fromkeys(t.seed for t in self.trials)]

    def by_label(self) -> dict[str, Results]:
        """By what the trials are called; in each group only the seed varies."""
        return {
            label: Results([t for t in self.trials if t.label == label]) for label in dict.fromkeys(t.label for t in self.trials)
        }

    def values_of(self, parameter: str) -> list[Any]:
        """A parameter of every trial."""
        return [trial.parameters[parameter] for trial in self.trials]

    def values(self, *path: str) -> list[float]:
        """A number of every trial, by its name or a path of names; NaN where a trial lacks it."""
        return [_number(trial.numbers, path) for trial in self.trials]

    def mean(self, *path: str) -> float:
        """Mean over the trials; NaN where there is none."""
        return statistics.fmean(self.values(*path)) if self.trials else math.nan

    def least(self, name: str, *path: str) -> Results:
        """The trials with the value of one parameter with the smallest mean of a number; NaN is taken as the largest."""
        groups = self.groups(name)
        means = {key: group.mean(*path) for key, group in groups.items()}
        return groups[min(means, key=lambda key: math.inf if math.isnan(means[key]) else means[key])]

    def track(self, *path: str) -> tuple[list[int], list[float]]:
        """A number epoch by epoch, averaged over the trials that came so far: (epochs, means)."""
        histories = [trial.numbers["history"] for trial in self.trials]
        epochs = sorted({record["epoch"] for history in histories for record in history})
        means = [
            statistics.fmean(_number(record, path) for history in histories for record in history if record["epoch"] == epoch)
            for epoch in epochs
        ]
        return epochs, means


def less(first: float, second: float, by: float = 0.0) -> bool | None:
    """Whether `first` lies below `second` by more than `by`; None where one of them is not a number, as when it was not measured.

    >>> less(1, 2), less(1, 2, by=1), less(1, math.nan)
    (True, False, None)
    """
    return None if math.isnan(first) or math.isnan(second) else first + by < second


S = TypeVar("S", bound=Settings)
T = TypeVar("T")


@dataclass(frozen=True)
class Experiment(Generic[S, T]):
    """quick: settings that take under two minutes on digits; full: those of the paper.

    trials: for one seed, label → parameters (a frozen dataclass of JSON values). measure: runs one trial, resumable through
    its workspace; trials with the same parameters and the same `measure` are shared between experiments. judge: what the
    paper says beside what was measured. plots: name → figure.
    """

    name: str
    source: str
    statement: str
    quick: S
    full: S
    trials: Callable[[S, int], Mapping[str, T]]
    measure: Callable[[T, Workspace], Numbers]
    judge: Callable[[Results], Iterable[Comparison]]
    plots: Callable[[Results], Mapping[str, Plot]]


@lru_cache(1)
def experiments() -> dict[str, Experiment[Any, Any]]:
    """Every experiment, by name, in alphabetical order."""
    package = import_module("normscope.lab.experiments")
    modules = [import_module(f"{package.__name__}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    found = [module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda experiment: experiment.name)}


def find(name: str) -> Experiment[Any, Any]:
    if name not in experiments():
        raise InputError(f"no experiment {name!r}: choose from {', '.join(experiments())}")
    return experiments()[name]


def _number(numbers: Mapping[str, Any], path: Sequence[str]) -> float:
    """What stands at the end of a path; JSON's "inf" and "nan" are floats again."""
    value: Any = numbers
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return math.nan
        value = value[name]
    return float(value)


def _parsed(name: str, text: str, current: Any) -> Any:
    """What a command line says of a setting, in the form of its current value."""
    if isinstance(current, Mapping):
        value = _word(text)
        return value if isinstance(value, dict) else {key: _entry(name, key, current) for key in text.split(",")}
    if isinstance(current, tuple):
        value = _word(text)
        return tuple(value) if isinstance(value, list) else tuple(_word(part) for part in text.split(","))
    value = text if isinstance(current, str) else _word(text)
    numbers = isinstance(current, (int, float)) and isinstance(value, (int, float))
    if current is not None and type(value) is not type(current) and not (numbers and bool not in (type(value), type(current))):
        raise InputError(f"{name} must be a value such as {current!r}, got {text!r}")
    return value


def _entry(name: str, key: str, current: Mapping[str, Any]) -> Any:
    if key not in current:
        raise InputError(f"{name} has no {key!r}: choose from {', '.join(current)}, or give it as JSON")
    return current[key]


def _word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
