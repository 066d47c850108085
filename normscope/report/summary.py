"""A run in words: what is not right, at which layer, what to do about it, and what is fine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from normscope._watch.columns import PRODUCTS
from normscope._watch.reading import Run
from normscope.core.errors import InputError
from normscope.core.rendering import Group, RenderableType, Text
from normscope.core.text import inert, visible
from normscope.findings.finding import Finding
from normscope.findings.over_time import WINDOW
from normscope.findings.rows import RULES, USUAL
from normscope.report.quantities import quantity
from normscope.report.runs import HEATMAPS, Recording
from normscope.report.snapshot import Snapshot

SYMPTOMS = ("NS501", "NS509", "NS515", "NS504", "NS503", "NS502", "NS505")  # what a training shows, worst first
CAUSES = (  # and what can be behind it; of several that began at the same step, the first
    "NS510", "NS518", "NS507", "NS512", "NS506", "NS309", "NS516", "NS513", "NS511", "NS403", "NS517", "NS508", "NS519",
    "NS514",
)  # fmt: skip
NOT_BEHIND = {"NS309": ("NS501", "NS509", "NS504", "NS503", "NS502")}  # steps that become small make nothing explode
ORDER = (*SYMPTOMS, *CAUSES)
CLEAN = {rule: clean for rule in ORDER if (clean := RULES[rule].clean) is not None}
COLUMNS = tuple(
    dict.fromkeys([*HEATMAPS, *PRODUCTS.values(), *(clean.column for clean in CLEAN.values()), "samples"])
)  # what is read
BEFORE, AFTER = 10, 4  # steps before a symptom until which its cause must have lasted, and after it in which it may be seen first
MOST_OUTLIERS = 5  # that are named
APART, SPREADS = 1.0, 6.0  # decades from the median, and multiples of the usual distance from it, of what stands out


@dataclass(frozen=True)
class Problem:
    """All findings of one rule in one state: the layer where it was seen first, how many others, what it means, what to try."""

    rule: str
    name: str
    layer: str | None
    others: int
    step: int | None
    last: int | None
    when: str
    now: bool
    message: str
    fix: str

    @property
    def where(self) -> str:
        return f"{self.layer or 'the whole network'}{f' and {self.others} more' if self.others else ''}"

    def __str__(self) -> str:
        return inert(visible(f"{self.where}: {self.message}")) + (f" ({self.when})" if self.when else "")


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
    """problems: what holds now first, then what is over, worst first each. outliers: furthest first.

    fine: what was looked for and not found, with what that rests on. not_judged: what too little was seen of.
    """

    problems: tuple[Problem, ...]
    outliers: tuple[Outlier, ...]
    fine: tuple[str, ...]
    not_judged: tuple[str, ...]
    layers: int
    samples: int
    last_step: int
    steps: int

    @property
    def worst_layer(self) -> str | None:
        """The layer to look at first."""
        cause = [self.cause] if self.cause is not None else []
        named = [problem.layer for problem in (*cause, *self.problems) if problem.layer is not None]
        return next(iter([*named, *(outlier.layer for outlier in self.outliers)]), None)

    @property
    def cause(self) -> Problem | None:
        """What is behind the worst problem: of a symptom, what began first of all that held when it began; of anything else that
        holds now, what began before it in the same window.

        Samples come later than what is read on every step, so what was seen in the samples right after a symptom counts.
        """
        end = self.problems[0] if self.problems else None
        if end is None or end.step is None:
            return None
        step = end.step
        since = step - (USUAL if end.rule == "NS503" else BEFORE)  # NS503 is seen late, as a median over so many steps
        if end.rule not in SYMPTOMS:
            since = step - WINDOW  # what it compares with is up to so old
            earlier = [one for one in self.problems if (one.step or step) < step and (one.last or 0) >= since]
            return min(earlier, key=lambda one: (one.step or 0, _rank(one.rule)), default=None)
        others = [
            one for one in self.problems if one.rule in ORDER and end.rule not in NOT_BEHIND.get(one.rule, ()) and one is not end
        ]
        held = [one for one in others if (one.last or 0) >= since and (one.step or 0) <= step + AFTER]
        before = [one for one in held if one.rule in CAUSES] or [one for one in held if _rank(one.rule) > _rank(end.rule)]
        return min(before, key=lambda one: (one.step or 0, _rank(one.rule)), default=None)

    @property
    def headline(self) -> str:
        if self.problems:
            return self._of_problems()
        if self.outliers:
            return f"No warning in {self.basis}; the layer that stands out most is {self.outliers[0]}."
        return f"Nothing stands out among {self.layers} layers in {self.basis}."

    def _of_problems(self) -> str:
        worst, cause = self.problems[0], self.cause
        if not worst.now:
            return f"No finding holds at step {self.last_step:,}, the last one sampled; {worst.when}, {_of(worst)}."
        said = (
            f"{_of(worst)[:1].upper()}{_of(worst)[1:]} ({worst.when})."
            if worst.when
            else f"{_of(worst)[:1].upper()}{_of(worst)[1:]}."
        )
        if cause is not None and cause is not worst:
            began = "It began with this" if (cause.step or 0) <= (worst.step or 0) else "What was seen with it"
            if (cause.last or 0) < (worst.step or 0) and worst.rule not in SYMPTOMS:
                began = "Before it"
            return f"{said} {began}, {cause.when}: {_of(cause)}."
        return said

    @property
    def basis(self) -> str:
        """How much was looked at."""
        return _basis(self.samples, self.steps, self.last_step)


def _of(problem: Problem) -> str:
    return problem.message if problem.layer is None else f"look at layer {problem.layer}: {problem.message}"


def _basis(samples: int, steps: int, last: int) -> str:
    if samples >= steps:
        return f"all {steps:,} steps" if steps != 1 else "1 step"
    return f"{samples:,} of {steps:,} steps sampled, the last at step {last:,}"


def summarize(run: Recording, samples: int | None = None, steps: int | None = None) -> Summary:
    """Of the findings that were written as it trained, and of the last values of the main metrics.

    samples: rows, where `run` does not hold all of them. steps: of the training, sampled or not.
    """
    taken = run.arrays("samples")
    last = int(taken["step"][-1]) if len(taken["step"]) else 0
    counted = _taken(taken["samples"])
    samples = counted or (len(taken["step"]) if samples is None else samples)
    steps = max(steps or 0, last, samples)
    problems = sorted(_problems(run), key=_order)
    found = {problem.rule for problem in problems}
    fine, not_judged = [], []
    for rule, clean in CLEAN.items():
        judged = run.judged.get(rule)
        if rule in found:
            continue
        if judged is None:
            if _recorded(run, clean.column):
                not_judged.append(f"{clean.sentence}: not judged, in how many steps it was looked for is not on record.")
        elif judged.enough(steps):
            fine.append(f"{clean.sentence} ({judged.of(steps)}).")
        else:
            not_judged.append(f"{clean.sentence}: not judged, {judged.of(steps)}.")
    return Summary(tuple(problems), tuple(_outliers(run)), tuple(fine), tuple(not_judged), len(run.layers), samples, last, steps)


def _taken(samples: np.ndarray) -> int:
    """In all recordings of a run: the count begins anew with each, and is missing in rows of older ones, which are samples each."""
    known = samples[np.isfinite(samples)]
    ends = np.append(known[1:] < known[:-1], True)[: len(known)]
    return int(known[ends].sum()) + (len(samples) - len(known) if len(known) else 0)


def rendered_run(run: Run) -> RenderableType:
    """A run in the words of its report, for a terminal or a notebook."""
    try:
        snapshot = Snapshot.of(run, COLUMNS)
    except InputError as error:
        return Text(str(error))
    summary = summarize(snapshot, steps=snapshot.life.step)
    parts = [Text(f"{snapshot.name}: {extent(snapshot, summary)}"), Text(summary.headline, "bold")]
    parts += [Text(f"· {note}", "red") for note in snapshot.notes]
    parts += [Text.of_lines([f"· {problem.name} at {problem}", f"    {problem.fix}"], "yellow") for problem in summary.problems]
    parts += [Text(f"· {outlier}") for outlier in summary.outliers[:MOST_OUTLIERS]]
    parts += [Text(f"· {sentence}", "green") for sentence in summary.fine]
    return Group(*parts, *(Text(f"· {sentence}", "dim") for sentence in summary.not_judged))


def described_run(run: Run) -> dict[str, Any]:
    """What `rendered_run` says, as plain values; `problem` says why there is nothing to say."""
    about = {"name": run.name, "status": run.status}
    try:
        snapshot = Snapshot.of(run, COLUMNS)
    except InputError as error:
        return {**about, "problem": str(error)}
    summary = summarize(snapshot, steps=snapshot.life.step)
    return {
        **about,
        "extent": extent(snapshot, summary),
        "headline": summary.headline,
        "steps": summary.steps,
        "samples": summary.samples,
        "last_step": summary.last_step,
        "notes": list(snapshot.notes),
        "problems": [{**asdict(problem), "where": problem.where} for problem in summary.problems],
        "outliers": [asdict(outlier) for outlier in summary.outliers],
        "fine": list(summary.fine),
        "not_judged": list(summary.not_judged),
        "layers": snapshot.layers,
    }


def extent(run: Snapshot, summary: Summary) -> str:
    """How much of a run there is."""
    model = run.manifest.get("model", "a model")
    return f"{model}, {summary.layers} layers; {summary.basis}; {run.life}"


def _problems(run: Recording) -> list[Problem]:
    groups: dict[tuple[str, bool], list[Finding]] = {}
    for finding in run.findings:
        groups.setdefault((finding.rule, finding.state != "was"), []).append(finding)
    made = []
    for (rule, now), found in groups.items():
        first = min(found, key=lambda finding: finding.first_step or 0)
        others = len({finding.where for finding in found if finding.where} | _listed(first)) - bool(first.where)
        steps = first.first_step, max(finding.last_step or 0 for finding in found), first.when
        said = first.message or rule, first.fix.rstrip(".")
        made.append(Problem(rule, first.name, first.where or None, others, *steps, now, *said))
    return made


def _listed(finding: Finding) -> set[str]:
    """Layers that a finding of an older run lists beside its own."""
    listed: Any = finding.evidence.get("layers")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _order(problem: Problem) -> tuple[bool, int, int, int]:
    """What holds now first; then symptoms, worst first; then causes, the one that began first."""
    rank = _rank(problem.rule)
    return not problem.now, min(rank, len(SYMPTOMS)), problem.step or 0, rank


def _rank(rule: str) -> int:
    return ORDER.index(rule) if rule in ORDER else len(ORDER)


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
