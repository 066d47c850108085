"""A run in words: what is not right, at which layer, what to do about it, and what is fine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType

from normscope.core.errors import InputError
from normscope.core.rendering import Text
from normscope.core.text import inert, visible
from normscope.recorder.columns import PRODUCTS
from normscope.recorder.reading import Run
from normscope.report.quantities import quantity
from normscope.report.runs import HEATMAPS, Recording
from normscope.report.snapshot import Snapshot

WORST_FIRST = (
    "loss-not-finite", "exploding-gradient", "variance-collapse", "vanishing-gradient", "growing-", "dead-units",
    "effective-learning-rate-drift", "running-statistics",
)  # fmt: skip
FINE = {  # rule → the column without which it sees nothing, and what may be said where it found nothing
    "loss-not-finite": ("loss", "The loss stayed finite."),
    "exploding-gradient": ("gradient_norm", "No gradient exploded."),
    "vanishing-gradient": ("gradient_norm", "No layer's gradient vanished."),
    "variance-collapse": ("gain_tight", "The variance of what enters each normalizer stayed well above its ε."),
    "growing-": ("log10_weight_product", "No product over depth grew exponentially."),
    "effective-learning-rate-drift": (
        "effective_lr",
        "Effective learning rates stayed within a factor of ten of where they began.",
    ),
    "dead-units": ("dead_fraction", "At least half of every rectifier's channels stayed alive."),
    "running-statistics": ("running_divergence", "BN's running statistics agree with the batches'."),
}
COLUMNS = tuple(dict.fromkeys([*HEATMAPS, *PRODUCTS.values(), *(column for column, _ in FINE.values())]))  # what is read
MOST_OUTLIERS = 5  # that are named
APART, SPREADS = 1.0, 6.0  # decades from the median, and multiples of the usual distance from it, of what stands out


@dataclass(frozen=True)
class Problem:
    """All findings of one rule: the layer where it was first seen, how many others, what it means and what to try."""

    rule: str
    layer: str | None
    others: int
    step: int | None
    message: str
    fix: str

    @property
    def where(self) -> str:
        return f"{self.layer or 'the whole network'}{f' and {self.others} more' if self.others else ''}"

    def __str__(self) -> str:
        return inert(visible(f"{self.where}: {self.message}")) + (
            f" (first at step {self.step:,})" if self.step is not None else ""
        )


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number:.1e}"


@dataclass(frozen=True)
class Outlier:
    """A layer whose last value of a metric is far from the other layers' median."""

    layer: str
    metric: str
    value: float
    factor: float  # of the median

    def __str__(self) -> str:
        if self.factor == 0:
            size = "0 against"
        else:
            size = f"{_count(self.factor)} times" if self.factor >= 1 else f"1/{_count(1 / self.factor)} of"
        return f"{self.layer}: {quantity(self.metric).words} {self.value:.3g}, {size} the median"


@dataclass(frozen=True)
class Summary:
    """problems: worst first. outliers: furthest first. fine: what was looked for and not found."""

    problems: tuple[Problem, ...]
    outliers: tuple[Outlier, ...]
    fine: tuple[str, ...]
    layers: int
    samples: int
    last_step: int

    @property
    def worst_layer(self) -> str | None:
        """The layer to look at first."""
        named = [problem.layer for problem in self.problems if problem.layer is not None]
        return next(iter([*named, *(outlier.layer for outlier in self.outliers)]), None)

    @property
    def headline(self) -> str:
        if self.problems:
            worst = self.problems[0]
            named = next((problem for problem in self.problems if problem.layer is not None), None)
            cause = "" if named is None else f"Look at layer {named.layer} first: {named.message}."
            return cause if worst is named else f"{worst.message[:1].upper()}{worst.message[1:]}. {cause}".strip()
        if self.outliers:
            return f"No warning; the layer that stands out most is {self.outliers[0]}."
        return f"Nothing stands out among {self.layers} layers in {_steps(self.samples)}."


def summarize(run: Recording) -> Summary:
    """Of the findings that were written as it trained, and of the last values of the main metrics."""
    steps = run.arrays()["step"]
    problems = sorted(_problems(run), key=lambda problem: (_rank(problem.rule), problem.step or 0))
    found = {WORST_FIRST[_rank(problem.rule)] for problem in problems if _rank(problem.rule) < len(WORST_FIRST)}
    fine = tuple(sentence for rule, (column, sentence) in FINE.items() if rule not in found and _recorded(run, column))
    last = int(steps[-1]) if len(steps) else 0
    return Summary(tuple(problems), tuple(_outliers(run)), fine, len(run.layers), len(steps), last)


def rendered_run(run: Run) -> RenderableType:
    """A run in the words of its report, for a terminal or a notebook."""
    try:
        snapshot = Snapshot.of(run, COLUMNS)
    except InputError as error:
        return Text(str(error))
    summary = summarize(snapshot)
    parts = [Text(f"{snapshot.name}: {extent(snapshot, summary)}"), Text(summary.headline, "bold")]
    parts += [Text(f"· {note}", "red") for note in snapshot.notes]
    parts += [Text.of_lines([f"· {problem.rule} at {problem}", f"    {problem.fix}"], "yellow") for problem in summary.problems]
    parts += [Text(f"· {outlier}") for outlier in summary.outliers[:MOST_OUTLIERS]]
    return Group(*parts, *(Text(f"· {sentence}", "green") for sentence in summary.fine))


def extent(run: Snapshot, summary: Summary) -> str:
    """How much of a run there is."""
    model = run.manifest.get("model", "a model")
    return f"{model}, {summary.layers} layers; {_steps(summary.samples)} up to step {summary.last_step:,}; {run.life}"


def _steps(samples: int) -> str:
    return f"{samples:,} sampled step{'' if samples == 1 else 's'}"


def _problems(run: Recording) -> list[Problem]:
    by_rule: dict[str, list[Mapping[str, Any]]] = {}
    for finding in run.findings:
        by_rule.setdefault(str(finding.get("rule", "")), []).append(finding)
    made = []
    for rule, found in by_rule.items():
        first = found[0]
        layer, message = first.get("layer"), str(first.get("message", rule))
        if layer is None and (layer := _growing_layer(run, rule)) is not None:
            message += ", this layer's factor most of all"
        others = len({name for finding in found for name in _affected(finding)} - {layer})
        step = first["step"] if isinstance(first.get("step"), int) else None
        made.append(Problem(rule, None if layer is None else str(layer), others, step, message, str(first.get("fix", ""))))
    return made


def _affected(finding: Mapping[str, Any]) -> list[str]:
    evidence = finding.get("evidence")
    listed = evidence.get("layers") if isinstance(evidence, Mapping) else None
    names = [finding.get("layer"), *(listed if isinstance(listed, Sequence) and not isinstance(listed, str) else ())]
    return [name for name in names if isinstance(name, str)]


def _growing_layer(run: Recording, rule: str) -> str | None:
    """Of a product that grows, the layer whose factor grew most."""
    metric = PRODUCTS.get(f"log10_{rule.removeprefix('growing-').replace('-', '_')}")
    if metric is None or not rule.startswith("growing-"):
        return None
    values = run.arrays(metric)[metric]
    with np.errstate(all="ignore"):
        growth = np.log(values[-1] / values[0]) if len(values) else np.empty(0)
    return str(run.layers[int(np.nanargmax(growth))]["name"]) if np.isfinite(growth).any() else None


def _rank(rule: str) -> int:
    return next((rank for rank, known in enumerate(WORST_FIRST) if rule.startswith(known)), len(WORST_FIRST))


def _recorded(run: Recording, column: str) -> bool:
    return bool(np.isfinite(run.arrays(column)[column]).any())


def _outliers(run: Recording) -> list[Outlier]:
    found: list[tuple[float, Outlier]] = []
    for metric in HEATMAPS:
        values = run.arrays(metric)[metric]
        if not len(values):
            continue
        last = values[-1].astype(np.float64)
        logs = np.log10(last, out=np.full(len(last), np.nan), where=last > 0)
        seen = np.isfinite(logs)
        if seen.sum() < 3:
            continue
        median = float(np.median(logs[seen]))
        spread = float(np.median(np.abs(logs[seen] - median)))
        distance = np.abs(logs - median)
        for index in map(int, np.flatnonzero(distance > max(APART, SPREADS * spread))):
            factor = 10 ** min(float(logs[index]) - median, 300.0)
            found.append((float(distance[index]), Outlier(str(run.layers[index]["name"]), metric, float(last[index]), factor)))
    return [outlier for distance, outlier in sorted(found, key=lambda pair: -pair[0]) if math.isfinite(distance)]
