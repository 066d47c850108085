"""Early warnings: what in a row, or in its history, says that training is heading for trouble."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from normscope.recorder.columns import PRODUCTS, Row

WINDOW = 20  # samples that a trend is fitted to
FEWEST = 6  # samples that a trend, or a typical value, needs
LISTED = 10  # layers that a finding names

RISE, RISE_PER_LAYER, STRAIGHT = 1.0, 0.01, 0.9  # decades over the window, and the r² of their line
COLLAPSE = 10.0  # × ε
DRIFT = 10.0
EXPLOSION, VANISHING = 100.0, 1e-7
DEAD = 0.5
DIVERGENCE, SHIFT, RUNNING_IN = math.log(4), 2.0, 100


@dataclass(frozen=True)
class EarlyWarning:
    """rule, step, the layer where it is worst, the numbers behind it, what it means and what to try."""

    rule: str
    step: int
    layer: str | None
    evidence: dict[str, Any]
    message: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Symptom:
    """What a rule sees in one row: the layers that it affects (all, if empty) with the worst first."""

    rule: str
    layers: Sequence[int]
    evidence: Mapping[str, Any]
    message: str
    fix: str


class Watchman:
    """Reads the rows in order and warns of every rule and layer once."""

    def __init__(self, layers: Sequence[Mapping[str, Any]]) -> None:
        self.layers = layers
        self.epsilon = np.array([np.nan if layer.get("epsilon") is None else layer["epsilon"] for layer in layers])
        self.multiplied = sum(bool(layer.get("in_product")) for layer in layers)
        self.history: dict[str, deque[tuple[int, float]]] = {name: deque(maxlen=WINDOW) for name in PRODUCTS}
        self.gradients: deque[float] = deque(maxlen=WINDOW)
        self.first_rate: np.ndarray | None = None
        self.first_step: int | None = None
        self._warned: set[tuple[str, int | None]] = set()

    def trends(self, row: Row) -> dict[str, float]:
        """Slope of each log10 product over the recent samples, in decades a step; the row joins the history."""
        found = {}
        for name, history in self.history.items():
            value = row.get(name, math.nan)
            if math.isfinite(value):
                history.append((row["step"], value))
            slope, _ = line(history)
            found[f"{name}_trend"] = slope
        return found

    def look(self, row: Row) -> list[EarlyWarning]:
        """What is new in this row. `trends` has seen the row before."""
        if self.first_step is None:
            self.first_step = row["step"]
        return [warning for rule in RULES for symptom in rule(self, row) if (warning := self._warn(symptom, row)) is not None]

    def _warn(self, symptom: Symptom, row: Row) -> EarlyWarning | None:
        keys: list[int | None] = [*symptom.layers] or [None]
        fresh = [key for key in keys if (symptom.rule, key) not in self._warned]
        if not fresh:
            return None
        self._warned |= {(symptom.rule, key) for key in fresh}
        names = [self.layers[key]["name"] for key in fresh if key is not None]
        evidence = {**symptom.evidence, **({"layers": names[:LISTED], "affected": len(names)} if names else {})}
        return EarlyWarning(symptom.rule, row["step"], names[0] if names else None, evidence, symptom.message, symptom.fix)


def line(history: Sequence[tuple[int, float]] | deque[tuple[int, float]]) -> tuple[float, float]:
    """Slope and r² of the least-squares line; NaN with fewer than two different steps."""
    if len(history) < 2:
        return math.nan, math.nan
    x, y = np.array(history, dtype=float).T
    x, y = x - x.mean(), y - y.mean()
    if not x.any():
        return math.nan, math.nan
    slope = float(x @ y / (x @ x))
    return slope, float((slope * x) @ (slope * x) / (y @ y)) if y.any() else 1.0


def _growing_product(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    for name, history in watchman.history.items():
        slope, straight = line(history)
        if len(history) < FEWEST:
            continue
        rise = slope * (history[-1][0] - history[0][0])
        if rise > RISE + RISE_PER_LAYER * watchman.multiplied and straight > STRAIGHT:
            evidence = {"decades": rise, "steps": history[-1][0] - history[0][0], "r_squared": straight, "log10": history[-1][1]}
            yield Symptom(
                f"growing-{name.removeprefix('log10_').replace('_', '-')}", (), evidence,
                f"the product over depth ({name}) grows exponentially with the steps",
                "lower the learning rate, add weight decay, or normalize the layers whose norm grows most",
            )  # fmt: skip


def _collapsing_variance(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    variance = _metric(row, "input_variance_median", watchman)
    low = variance <= COLLAPSE * watchman.epsilon
    if low.any():
        order = _worst(low, variance)
        yield Symptom(
            "variance-collapse", order, {"variance": float(variance[order[0]]), "epsilon": float(watchman.epsilon[order[0]])},
            "the variance that enters a normalizer is close to its ε: its gain nears 1/√ε and scale invariance ends",
            "raise the scale of what enters (initialization, residual weight), or lower ε",
        )  # fmt: skip


def _drifting_rate(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    scheduled = row.get("learning_rate", math.nan)
    if not scheduled or not math.isfinite(scheduled):
        return
    rate = _metric(row, "effective_lr", watchman) / scheduled  # what the schedule does is intended
    if watchman.first_rate is None:
        watchman.first_rate = rate
        return
    with np.errstate(all="ignore"):
        factor = rate / watchman.first_rate
        drift = np.abs(np.log(factor))
    far = drift >= math.log(DRIFT)
    if far.any():
        order = _worst(far, -drift)
        yield Symptom(
            "effective-learning-rate-drift", order, {"factor": float(factor[order[0]])},
            "the norm of a scale-free weight has changed its effective learning rate tenfold since the first sample",
            "weight decay holds the norm where growth froze the layer; a lower learning rate where it shrank too far",
        )  # fmt: skip


def _gradients(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    norms = _metric(row, "gradient_norm", watchman)
    infinite = np.isinf(norms) | (np.isnan(norms) & np.asarray(row.get("gradient_seen", False)))
    total = float(np.sqrt(np.nansum(norms[np.isfinite(norms)] ** 2)))
    typical = float(np.median(watchman.gradients)) if len(watchman.gradients) >= FEWEST else math.nan
    watchman.gradients.append(total)
    fix = "clip gradients, lower the learning rate, or warm it up"
    if infinite.any():
        yield Symptom(
            "exploding-gradient", np.flatnonzero(infinite).tolist(), {"gradient_norm": math.inf}, "a gradient is not finite", fix
        )
    elif 0 < EXPLOSION * typical < total:  # where it was zero, nothing is usual
        order = [int(np.nanargmax(norms))]
        evidence = {"gradient_norm": total, "typical": typical}
        message = f"the gradient is {total / typical:.0f} times its usual norm"
        yield Symptom("exploding-gradient", order, evidence, message, fix)
    largest = float(norms[np.isfinite(norms)].max(initial=0))
    recent = list(watchman.gradients)
    if any(recent) and not any(recent[-FEWEST:]) and (norms == 0).any():
        yield Symptom(
            "vanishing-gradient", np.flatnonzero(norms == 0).tolist(), {"gradient_norm": 0.0, "samples": FEWEST},
            "every gradient is zero: training stands still",
            "look for a rectifier whose units are all off, or a loss that is saturated; go back and lower the learning rate",
        )  # fmt: skip
    tiny = norms < VANISHING * largest
    if tiny.any():
        order = _worst(tiny, norms)
        yield Symptom(
            "vanishing-gradient", order, {"gradient_norm": float(norms[order[0]]), "largest": largest},
            "a layer's gradient has vanished beside the largest one",
            "normalize between the layers, use residual connections, or an initialization that keeps variances",
        )  # fmt: skip


def _dying_units(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    dead = _metric(row, "dead_fraction", watchman)
    many = dead > DEAD
    if many.any():
        order = _worst(many, -dead)
        yield Symptom(
            "dead-units", order, {"dead_fraction": float(dead[order[0]])}, "most units of a rectifier are off for the whole batch",
            "lower the learning rate, normalize before the activation, or use one with a slope everywhere",
        )  # fmt: skip


def _diverging_statistics(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    if watchman.first_step is None or row["step"] - watchman.first_step < RUNNING_IN:
        return  # running statistics have not yet caught up with their initial values
    divergence, shift = _metric(row, "running_divergence", watchman), _metric(row, "running_shift", watchman)
    far = (divergence > DIVERGENCE) | (shift > SHIFT)
    if far.any():
        order = _worst(far, -divergence)
        yield Symptom(
            "running-statistics", order, {"divergence": float(divergence[order[0]]), "shift": float(shift[order[0]])},
            "BN's running statistics differ from the batch's: evaluation uses another function than training",
            "larger batches, a larger momentum, or a normalizer without running statistics",
        )  # fmt: skip


def _loss(watchman: Watchman, row: Row) -> Iterator[Symptom]:
    loss = row.get("loss", math.nan)
    if math.isinf(loss) or (math.isnan(loss) and row.get("loss_given", False)):
        fix = "look at the findings before this step; lower the learning rate"
        yield Symptom("loss-not-finite", (), {"loss": loss}, "the loss is not finite", fix)


Rule = Callable[[Watchman, Row], Iterator[Symptom]]
RULES: tuple[Rule, ...] = (
    _loss, _growing_product, _collapsing_variance, _drifting_rate, _gradients, _dying_units, _diverging_statistics,
)  # fmt: skip


def _metric(row: Row, name: str, watchman: Watchman) -> np.ndarray:
    values = row.get(name)
    return np.full(len(watchman.layers), np.nan) if values is None else np.asarray(values, np.float64)


def _worst(affected: np.ndarray, value: np.ndarray) -> list[int]:
    """The affected layers, smallest value first."""
    where = np.flatnonzero(affected)
    return [int(index) for index in where[np.argsort(value[where], kind="stable")]]
