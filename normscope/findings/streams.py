"""NS403 and NS512 to NS519: what breaks large trainings, judged on samples: growth, attention, blocks, layers out of line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from normscope.findings.over_time import FEWEST, LEAST_SPAN, WINDOW, History, Row, line
from normscope.findings.table import Clean, Find, Hit, rule

At = tuple[History, Row]

RISE, RISE_PER_LAYER, STRAIGHT = 1.0, 0.01, 0.9  # decades over the window, and r² of their line
KEPT_UP = 1 / 3  # of the rise is in the second half: what grows exponentially has half of it there, what settles has little
PRODUCTS = {"log10_weight_product": "spectral_norm", "log10_gain_tight": "gain_tight"}  # judged, and what they multiply
LOGIT = 100.0  # the limit that Kimi K2 (2025) clips queries and keys at
IDLE, IDLE_AFTER = 0.003, 200  # share of its input that a block adds, and steps that it has to begin
JUMP = 10.0  # times what is usual for the layer
LARGE_STEP, SETTLED = 0.1, 50  # share of a weight that one step changes, a hundred times the usual, and steps for weights to grow
SMALL_BATCH = 8  # samples, below which batch statistics are noise (Wu & He 2018, figure 1)


@rule(
    "NS512", "attention logits that saturate softmax", "warning", name="attention-saturation", needs=("rows",),
    fix="Normalize queries and keys (QK-norm), clip them, or lower the learning rate.",
    reference="Dehghani et al. 2023; Zhai et al. 2023; Kimi K2 2025, QK-clip",
    clean=Clean("No recorded attention logit exceeded a hundred", "attention_logit"),
)  # fmt: skip
def saturated_attention(at: At) -> Iterator[Hit]:
    """A logit of a hundred makes softmax a hard choice: gradients to queries and keys vanish, entropy collapses, and the loss
    diverges soon after. Logits grow with the product of two weights, so once they grow, they grow fast."""
    history, row = at
    logit, entropy = history.metric(row, "attention_logit"), history.metric(row, "attention_entropy")
    for index in history.worst(logit > LOGIT, -logit):
        message = f"its largest logit is {logit[index]:.3g}, and the entropy of its sharpest head {entropy[index]:.2g} of uniform"
        yield Hit(history.names[index], message, {"attention_logit": float(logit[index]), "entropy": float(entropy[index])})


@rule(
    "NS514", "blocks that do nothing", "info", name="idle-block", needs=("rows",),
    fix="Scale the residual stream down with depth, normalize what blocks add, or use fewer blocks.",
    reference="Sun et al. 2025 (the curse of depth); Gromov et al. 2024",
    clean=Clean("Every recorded block added to its input", "write_ratio"),
)  # fmt: skip
def idle_block(at: At) -> Iterator[Hit]:
    """A block that adds less than 0.3 % to its input after 200 steps is the identity: it could be left out. Where the residual
    stream grows with depth, deep blocks end like this one after another. Blocks that begin as the identity have 200 steps to
    leave it."""
    history, row = at
    if history.first_step is None or row["step"] - history.first_step < IDLE_AFTER:
        history.only(False)
        return
    ratio = history.metric(row, "write_ratio")
    for index in history.worst(ratio < IDLE, ratio):
        message = f"it adds {ratio[index]:.2g} of its input's length to it"
        yield Hit(history.names[index], message, {"write_ratio": float(ratio[index])})


@rule(
    "NS515", "ranks whose replicas differ", "error", name="rank-divergence", needs=("rows",),
    fix="Find what differs between the ranks (a seed, a skipped all-reduce, a parameter DDP does not know); broadcast rank 0's.",
    reference="docs/watch.md#several-processes",
    clean=Clean("γ and β were the same on all ranks", "differing_ranks"),
)  # fmt: skip
def diverging_rank(at: At) -> Iterator[Hit]:
    """Data-parallel training keeps one copy of each replicated parameter per rank, and they must be the same to the bit. Once one
    differs, every rank trains another model, and no average of gradients brings them together again."""
    _, row = at
    for name, ranks in row.get("differing", {}).items():
        message = f"{name} differs on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        yield Hit(name, message, {"ranks": ", ".join(map(str, ranks))})


@rule(
    "NS518", "steps that are large against the weights", "warning", name="large-step", needs=("rows",),
    fix="Lower the learning rate (by ten to begin with), or warm it up.",
    reference="Kosson et al. 2024 (rotational equilibrium)",
    clean=Clean("No step changed a recorded weight by a tenth of its length", "update_ratio"),
)  # fmt: skip
def large_step(at: At) -> Iterator[Hit]:
    """A step usually changes a weight by about a thousandth of its length. One that changes it by a tenth replaces what the weight
    has learned within some ten steps: the learning rate is too high. Weights that begin at zero have 50 steps to grow. Steps whose
    gradient is ten times its median over 200 steps are not judged: there the gradient is at fault, not the rate."""
    history, row = at
    gradient, recent = float(row.get("total_gradient_norm", math.nan)), history.recent("gradients of steps")
    usual = float(np.median(recent.values)) if len(recent) >= FEWEST else math.inf
    recent.add(int(row["step"]), gradient)
    if history.first_step is None or row["step"] - history.first_step < SETTLED or not gradient <= JUMP * usual:
        history.only(False)
        return
    ratio = history.metric(row, "update_ratio")
    for index in history.worst(np.isfinite(ratio) & (ratio > LARGE_STEP), -ratio):
        yield Hit(history.names[index], f"one step changed it by {ratio[index]:.2g} of its length: the learning rate is too high",
                  {"update_ratio": float(ratio[index]), "learning_rate": float(row.get("learning_rate", math.nan))})  # fmt: skip


@rule(
    "NS519", "batch statistics of few samples", "warning", name="small-batch", needs=("rows",),
    fix="Use larger batches per device, SyncBatchNorm, or a normalizer that does not depend on the batch.",
    reference="Wu & He 2018, figure 1",
    clean=Clean(f"Every recorded batch normalizer saw at least {SMALL_BATCH} samples", "batch_size"),
)  # fmt: skip
def small_batch(at: At) -> Iterator[Hit]:
    """Statistics of a few samples are noisy estimates: training sees one function per batch, the running statistics describe
    none of them, and accuracy falls steeply below about eight samples per device. Judged where a batch normalizer trains with
    statistics of its own; with gradient accumulation, on the first micro-batch of a step."""
    history, row = at
    samples = history.metric(row, "batch_size")
    for index in history.worst(samples < SMALL_BATCH, samples):
        yield Hit(history.names[index], f"its statistics are those of {samples[index]:.0f} samples",
                  {"batch_size": int(samples[index])})  # fmt: skip


@rule(
    "NS403", "a product over depth that grows exponentially", "warning", name="growing-product", needs=("rows",),
    fix="Lower the learning rate, add weight decay, or normalize the layers whose norm grows most.",
    reference="Than 2025, figures 1 and 2",
    clean=Clean("No product over depth grew exponentially", "log10_weight_product"),
)  # fmt: skip
def growing_product(at: At) -> Iterator[Hit]:
    """The product of all weights' norms, and that of all normalizers' gains, bound how gradients scale with depth. One that rises
    by a decade (and 0.01 per layer) within 200 steps, on a straight line and without slowing down, leaves the range in which one
    learning rate fits."""
    history, row = at
    history.only(False)
    for name, metric in PRODUCTS.items():
        value, recent = row.get(name, math.nan), history.recent(name)
        if not math.isfinite(value):
            continue
        recent.add(int(row["step"]), (value, history.metric(row, metric)))
        rise, span, straight = _rise([(step, value) for step, (value, _) in recent.held])
        if name == "log10_weight_product" and len(recent) >= FEWEST and recent.span >= LEAST_SPAN:
            history.only(True)
        if rise > RISE + RISE_PER_LAYER * history.multiplied:
            with np.errstate(all="ignore"):
                growth = np.log(recent.held[-1][1][1] / recent.held[0][1][1])
            most = history.names[int(np.nanargmax(growth))] if np.isfinite(growth).any() else ""
            place = history.kept.setdefault(f"growing {name}", most)
            what = "weights' norms" if metric == "spectral_norm" else "normalizers' gains"
            said = f", {place}'s factor most of all" if place else ""
            yield Hit(place, f"the product of all {what} grew by {rise:.1f} decades in {span} steps{said}",
                      {"decades": rise, "steps": span, "r_squared": straight, name: value})  # fmt: skip


def _rise(points: list[tuple[int, float]]) -> tuple[float, int, float]:
    """Rise, steps and r² over the last 200 steps, else the last 50; no rise where neither is on a straight line, or where it slows.

    The rise is that of the line or of its ends, whichever is less: samples are dense at the beginning of a training, where weights
    grow fast for a while, and tilt the line.
    """
    for window in (WINDOW, WINDOW // 4):
        held = [point for point in points if point[0] > points[-1][0] - window]
        held = held if len(held) >= FEWEST else points[-FEWEST:]
        span = held[-1][0] - held[0][0]
        if len(held) >= (FEWEST if window == WINDOW else 2 * FEWEST) and span >= LEAST_SPAN:
            slope, straight = line(held)
            last, middle = held[-1], next(point for point in held if point[0] - held[0][0] >= span / 2)
            rise = min(slope * span, last[1] - held[0][1])
            if straight > STRAIGHT and last[1] - middle[1] >= KEPT_UP * rise:
                return rise * min(span, window) / span, min(span, window), straight
    return 0.0, 0, math.nan


def _jumps(what: str, column: str, normalized: bool = False) -> Find:
    """Values of a layer against their median over the last 200 steps. normalized: by the learning rate; a schedule is no jump."""

    def find(at: Any) -> Iterator[Hit]:
        history, row = at
        values = history.metric(row, column)
        rate = row.get("learning_rate", math.nan) if normalized else 1.0
        recent = history.recent(f"jumps of {column}")
        if not rate > 0:
            history.only(False)
            return
        if len(recent) < FEWEST:
            history.only(False)
            recent.add(int(row["step"]), values / rate)
            return
        with np.errstate(all="ignore"):
            held = np.stack(recent.values)
            known = (~np.isnan(held)).sum(0) >= FEWEST
            usual = np.median(held, 0)  # NaN where a value is missing
            factor = values / rate / usual
        history.only(known & np.isfinite(factor))
        jumped = known & np.isfinite(factor) & (factor > JUMP)
        if column == "largest_input":
            jumped &= ~(factor <= JUMP * _lengthening(history, row))
        for index in history.worst(jumped, -factor):
            message = f"its {what} is {values[index]:.3g}, {factor[index]:.0f} times what it usually is"
            yield Hit(history.names[index], message, {column: float(values[index]), "factor": float(factor[index])})
        if not jumped.any():  # what jumped does not become usual
            recent.add(int(row["step"]), values / rate)

    return find


def _lengthening(history: History, row: Row) -> np.ndarray:
    """By layer: how many times its usual length the scale-free weight before a normalizer has, else 1.

    The normalizer removes that factor, and NS309 is about it.
    """
    places = {name: index for index, name in enumerate(history.names)}
    norms, recent = history.metric(row, "frobenius_norm"), history.recent("lengths of weights")
    recent.add(int(row["step"]), norms)
    with np.errstate(all="ignore"):
        grown, factors = norms / np.median(np.stack(recent.values), 0), np.ones(len(history.names))
    for index, layer in enumerate(history.layers):
        behind = places.get(layer.get("normalizer") or "")
        if layer.get("scale_free") and behind is not None and np.isfinite(grown[index]):
            factors[behind] = grown[index]
    return factors


def _register(id: str, title: str, name: str, sentence: str, fix: str, reference: str, why: str, find: Find) -> None:
    find.__doc__ = why
    rule(id, title, "warning", fix, reference, ("rows",), name, Clean(sentence, COLUMN_OF[id]))(find)


COLUMN_OF = {"NS513": "update_rms", "NS516": "spectral_norm", "NS517": "largest_input"}
_register(
    "NS513", "a step of the optimizer out of line", "update-jump", "No recorded weight's step was ten times its usual size",
    "Lower Adam's β₂ or the learning rate, or clip updates (AdaFactor, StableAdamW).", "Wortsman et al. 2023, section 3.4",
    """The length of a weight's step per learning rate hardly changes from step to step. If it grows tenfold, Adam's second
    moments are out of date: the gradient outgrew them, and a spike of the loss follows some steps later.""",
    _jumps("step", "update_rms", normalized=True),
)  # fmt: skip
_register(
    "NS516", "a weight out of line", "weight-jump", "No recorded weight's norm was ten times its usual size",
    "Look at what writes to this weight; lower the learning rate, clip gradients, or add weight decay.", "docs/watch.md",
    """A spectral norm grows by a few per cent in 200 steps of a healthy training. If it grows tenfold, the layer amplifies ten
    times as much, and so does everything behind it.""",
    _jumps("spectral norm", "spectral_norm"),
)  # fmt: skip
_register(
    "NS517", "an input out of line", "input-jump", "No recorded largest input was ten times its usual size",
    "Look at the layer that writes what enters here, and at the batch of this step.", "Sun et al. 2024 (massive activations)",
    """The largest entry that enters a layer is ten times its median over the last 200 steps: a batch is out of range, or the layer
    before has begun to explode. Behind a scale-free weight, what its length explains does not count: the normalizer removes it.""",
    _jumps("largest input", "largest_input"),
)  # fmt: skip
