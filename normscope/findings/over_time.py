"""Findings over time: what rules on rows may look back at, and since when each of their findings holds, or until when it did."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normscope.findings.finding import Finding
from normscope.findings.table import RULES, FindingRule

Row = Mapping[str, Any]

WINDOW = 200  # steps that a trend, or what is usual, is taken from
FEWEST = 6  # values that either needs; where so many are not in the window, it reaches further back
LEAST_SPAN = 49  # steps that what is compared with the beginning, or a line, covers
LEAST_JUDGED = 10  # steps, unless there are fewer, below which nothing is said to be fine
MOST_SAID = 8  # changes of one finding's state that are told as they happen


class Recent:
    """(step, value) of the last `window` steps, or of the last `fewest` values where those are fewer."""

    def __init__(self, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self.window, self.fewest = window, fewest
        self.held: deque[tuple[int, Any]] = deque()

    def add(self, step: int, value: Any) -> list[Any]:
        """The values that are no longer held."""
        self.held.append((step, value))
        gone = []
        while self.held[0][0] <= step - self.window and len(self.held) > self.fewest:
            gone.append(self.held.popleft()[1])
        return gone

    def __len__(self) -> int:
        return len(self.held)

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self.held]

    @property
    def span(self) -> int:
        return self.held[-1][0] - self.held[0][0] if self.held else 0


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and r² of the least-squares line; NaN with fewer than two different steps."""
    if len(points) < 2:
        return math.nan, math.nan
    x, y = np.array(points, dtype=float).T
    x, y = x - x.mean(), y - y.mean()
    if not x.any():
        return math.nan, math.nan
    slope = float(x @ y / (x @ x))
    return slope, float((slope * x) @ (slope * x) / (y @ y)) if y.any() else 1.0


class History:
    """The rows of a training so far, as far as rules look back. layers: the run's table of layers."""

    def __init__(self, layers: Sequence[Mapping[str, Any]]) -> None:
        self.layers = layers
        self.names = [str(layer["name"]) for layer in layers]
        self.epsilon = np.array([np.nan if layer.get("epsilon") is None else layer["epsilon"] for layer in layers])
        self.multiplied = sum(bool(layer.get("in_product")) for layer in layers)
        self.first_step: int | None = None
        self.kept: dict[str, Any] = {}  # what a rule remembers from one row to the next
        self._recent: dict[str, Recent] = {}
        self.seen: np.ndarray | bool = True  # which layers the rule that runs can judge

    def only(self, seen: np.ndarray | bool) -> None:
        """Said by a rule: of this row it judges these layers alone, or nothing, for want of what came before."""
        self.seen = seen

    def begin(self, row: Row) -> None:
        if self.first_step is None:
            self.first_step = int(row["step"])

    def recent(self, name: str, window: int = WINDOW) -> Recent:
        """The values that a rule has added under this name."""
        if name not in self._recent:
            self._recent[name] = Recent(window)
        return self._recent[name]

    def metric(self, row: Row, name: str) -> np.ndarray:
        values = row.get(name)
        return np.full(len(self.layers), np.nan) if values is None else np.asarray(values, np.float64)

    def worst(self, affected: np.ndarray, value: np.ndarray) -> list[int]:
        """The affected layers, smallest value first."""
        where = np.flatnonzero(affected)
        return [int(index) for index in where[np.argsort(value[where], kind="stable")]]


@dataclass
class Judged:
    """How often a rule judged. since: the last step before its recording.

    steps: in how many, of the layer that it judged least often.
    last: up to which step it judged every one of these layers. layers: 0 for what is about the whole network.
    """

    since: int = 0
    steps: int = 0
    last: int = 0
    layers: int = 0

    def enough(self, steps: int) -> bool:
        """Whether something may be said of a training of so many steps."""
        return self.steps >= min(LEAST_JUDGED, steps - self.since)

    def of(self, steps: int) -> str:
        """In words, of a training of so many steps."""
        of, before = steps - self.since, f" since step {self.since:,}" if self.since else ""
        layers = f"{self.layers:,} layer{'s' if self.layers != 1 else ''}, " if self.layers else ""
        if self.steps >= of:
            return f"{layers}all {of:,} steps{before}" if of != 1 else f"{layers}1 step{before}"
        upto = f", the last at step {self.last:,}" if self.steps else ""
        return f"{layers}{self.steps:,} of {of:,} steps{before}{upto}"


class _Counts:
    """Of one rule: for every layer the steps in which it was judged, and the last of them."""

    def __init__(self) -> None:
        self.steps: np.ndarray | int = 0
        self.last: np.ndarray | int = 0

    def add(self, step: int, seen: np.ndarray | bool) -> None:
        """seen: which layers, or whether it was, where it is about the whole network."""
        if seen is True:
            self.steps, self.last = self.steps + 1, step
        elif seen is not False:
            self.steps, self.last = self.steps + seen, np.where(seen, step, self.last)

    def judged(self, since: int) -> Judged:
        steps, last = np.atleast_1d(self.steps), np.atleast_1d(self.last)
        ever = steps > 0
        if not ever.any():
            return Judged(since)
        return Judged(since, int(steps[ever].min()), int(last[ever].min()), int(ever.sum()) if len(ever) > 1 else 0)


class Chronicle:
    """Runs rules on rows, in order, and keeps since when, and until when, each finding holds.

    A rule that reads a column which a row does not have says nothing about that step.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], rules: Iterable[str], since: int = 0) -> None:
        self.history, self.since = History(layers), since
        self._counts: dict[str, _Counts] = {}
        self.rules = [RULES[rule] for rule in rules]
        self._found: dict[tuple[str, str], Finding] = {}
        self._said: dict[tuple[str, str], int] = {}
        self._unsaid: set[tuple[str, str]] = set()

    @property
    def findings(self) -> list[Finding]:
        """By the step at which they began."""
        return sorted(self._found.values(), key=lambda finding: finding.first_step or 0)

    def look(self, row: Row) -> list[Finding]:
        """What begins or ends to hold at this row."""
        self.history.begin(row)
        changed: list[tuple[str, str]] = []
        for rule in self.rules:
            if rule.clean is not None and _holds(row, rule.clean.column):
                changed += self._judge(rule, row)
        told = [key for key in dict.fromkeys(changed) if self._said.get(key, 0) < MOST_SAID]
        for key in told:
            self._said[key] = self._said.get(key, 0) + 1
        self._unsaid -= set(told)
        return [self._found[key] for key in told]

    def _judge(self, rule: FindingRule, row: Row) -> Iterator[tuple[str, str]]:
        step, seen = int(row["step"]), set()
        self.history.seen = True
        for hit in rule.find((self.history, row)):
            key = rule.id, hit.where
            if key in seen:
                continue
            seen.add(key)
            before = self._found.get(key)
            self._unsaid.add(key)
            if before is not None and before.state == "now":
                self._found[key] = replace(before, last_step=step)
                continue
            if before is None:
                self._found[key] = replace(rule.finding(hit), first_step=step, last_step=step, state="now")
            else:  # again: what was said of the first time stands
                evidence = {**before.evidence, "times": int(before.evidence.get("times", 1)) + 1}
                self._found[key] = replace(before, evidence=evidence, last_step=step, state="now")
            yield key
        for key, found in self._found.items():
            if key[0] == rule.id and found.state == "now" and key not in seen:
                self._found[key] = replace(found, state="was")
                self._unsaid.add(key)
                yield key
        assert rule.clean is not None
        values, can = row[rule.clean.column], self.history.seen
        if isinstance(values, float):  # of the whole network
            judged: np.ndarray | bool = not math.isnan(values) and bool(can if isinstance(can, bool) else np.any(can))
        else:
            judged = ~np.isnan(np.asarray(values, np.float64)) & can
        self._counts.setdefault(rule.id, _Counts()).add(step, judged)

    @property
    def judged(self) -> dict[str, Judged]:
        """By rule, of those that had something to read."""
        return {rule: counts.judged(self.since) for rule, counts in list(self._counts.items())}

    def untold(self) -> list[Finding]:
        """Findings whose last step or state is another than when they were told last."""
        told, self._unsaid = self._unsaid, set()
        return [self._found[key] for key in self._found if key in told]


def _holds(row: Row, column: str) -> bool:
    """Whether a row says something of a column: a row of a step that was not sampled, or only in part, lacks some."""
    if column not in row or (column == "loss" and not row.get("loss_given", True)):
        return False
    if column == "frobenius_norm" and row.get("weights_seen", False):
        return True  # weights that are all NaN were seen
    return isinstance(row[column], float) or np.ndim(row[column]) == 0 or not np.isnan(row[column]).all()


def last_judged(events: Iterable[Mapping[str, Any]]) -> dict[str, Judged]:
    """Of events of kind "judged" what the last recording of the first process says, whatever else somebody wrote there."""
    found: dict[str, Judged] = {}
    for event in events:
        if event.get("process", 0) != 0:
            continue
        if event.get("kind") == "started":
            found = {}
        rules = event.get("rules")
        for rule, numbers in rules.items() if event.get("kind") == "judged" and isinstance(rules, Mapping) else ():
            if isinstance(numbers, list) and len(numbers) == 4 and all(type(number) is int for number in numbers):
                found[rule] = Judged(*numbers)
    return found


def last_states(events: Iterable[Mapping[str, Any]], last_step: int | None) -> list[Finding]:
    """Of events of kind "finding" the last of each rule and place; one that did not end held until the last step on record."""
    found: dict[tuple[str, str], Finding] = {}
    ids = {rule.name: id for id, rule in RULES.items() if rule.name}
    for event in events:
        finding = Finding.from_event(event)
        if finding.rule not in RULES:  # older runs have the name in its place, and one name per product
            known = ids.get("growing-product" if finding.rule.startswith("growing-") else finding.rule)
            finding = replace(finding, rule=known or finding.rule)
        found[finding.rule, finding.where] = finding
    if last_step is None:
        return list(found.values())
    return [
        replace(finding, last_step=max(finding.last_step or 0, last_step)) if finding.state == "now" else finding
        for finding in found.values()
    ]
