"""NS5xx and what else is judged on the rows of a training, as it trains or after it. Windows are in steps, whatever the cadence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from normscope.findings.over_time import FEWEST, LEAST_SPAN, Chronicle, History, Row
from normscope.findings.streams import PRODUCTS  # its rules are on rows, too
from normscope.findings.table import RULES, Clean, Hit, rule

COLLAPSE = 10.0  # × ε
DRIFT = 10.0
EXPLOSION, VANISHING = 100.0, 1e-7
DEAD = 0.5
DIVERGENCE, SHIFT, RUNNING_IN = math.log(4), 2.0, 100
USUAL = 50  # steps that the usual loss is taken from
DEVIATIONS, OF_LOGARITHM = 10.0, 4.0  # of a spike, over the usual spread of losses and, where all are above 0, of their logarithms
UNDONE, OF_START = 0.25, 0.05  # and the share of the progress that it undoes, and of the first loss
OF_HIGHEST = 2.0  # and times as far above the usual loss as the highest of the usual ones: some batches are hard
STILL = 20  # steps without a change
MASSIVE = 100.0  # times the first largest input
FIRST, ABOVE, ERRORS = 10, 1.1, 3.0  # first losses, and from how many times their median, and standard errors of it, on it diverged

At = tuple[History, Row]


@rule(
    "NS501", "a loss that is not finite", "error", name="loss-not-finite", needs=("rows",),
    fix="Look at the findings before this step; lower the learning rate, or warm it up.",
    reference="docs/watch.md",
    clean=Clean("The loss stayed finite", "loss"),
)  # fmt: skip
def loss_not_finite(at: At) -> Iterator[Hit]:
    """After a loss that is NaN or infinite every parameter that the optimizer moves is NaN as well, and training from there on is
    useless."""
    _, row = at
    loss = row["loss"]
    if math.isinf(loss) or (math.isnan(loss) and row.get("loss_given", False)):
        yield Hit("", "the loss is not finite", {"loss": loss})


@rule(
    "NS502", "a loss that jumps", "warning", name="loss-spike", needs=("rows",),
    fix="Look at the batch of this step; clip gradients, or lower the learning rate or Adam's β₂.",
    reference="Wortsman et al. 2023; Chowdhery et al. 2022, section 5.1",
    clean=Clean("The loss did not jump", "loss"),
)  # fmt: skip
def loss_spike(at: At) -> Iterator[Hit]:
    """A loss ten deviations above what was usual in the last 50 steps, which undoes a quarter of what training had gained, comes
    from a bad batch or from a step that was too large. Deviations are medians, so the noise of batches does not count. Small
    losses scatter by factors, as a single wrong answer in a batch can. So the loss must also be four deviations above the median
    of the logarithms, and twice as far above the median as the highest of those 50."""
    history, row = at
    loss, kept = row["loss"], history.kept
    if not math.isfinite(loss):
        return
    recent = history.recent("loss", USUAL)
    if len(recent) >= 4 * FEWEST or (recent.span >= USUAL and len(recent) >= FEWEST):
        if row["step"] >= kept.get("usual until", -1):  # medians of the window move slowly
            logs = [math.log(value) for value in recent.values] if min(*recent.values, loss) > 0 else [0.0]
            kept["usual"], kept["usual until"] = (*_usual(recent.values), *_usual(logs)), row["step"] + 5
        usual, spread, middle, breadth = kept["usual"]
        rise, gained = loss - usual, kept["first loss"] - min(usual, kept.get("best", usual))
        kept["best"] = min(usual, kept.get("best", usual))
        least = max(UNDONE * gained, OF_START * abs(kept["first loss"]), 0.0 if gained > 0 else UNDONE * abs(usual))
        far = breadth == 0 or (loss > 0 and math.log(loss) - middle > OF_LOGARITHM * breadth)
        if rise > max(DEVIATIONS * spread, least) > 0 and far and rise > OF_HIGHEST * (max(recent.values) - usual):
            yield Hit("", f"the loss jumped from about {usual:.3g} to {loss:.3g}", {"loss": loss, "usual": usual})
            return  # and does not count as usual
    else:
        history.only(False)
    recent.add(int(row["step"]), loss)
    if "first loss" not in kept:
        firsts = history.recent("first losses", FIRST)
        firsts.add(int(row["step"]), loss)
        if len(firsts) >= FIRST or (len(firsts) >= FEWEST and firsts.span >= FIRST):
            kept["first loss"], kept["first losses"] = float(np.median(firsts.values)), len(firsts)


def _usual(values: list[float]) -> tuple[float, float]:
    """Median, and the spread about it as a standard deviation."""
    usual = median(values)
    return usual, 1.4826 * median([abs(value - usual) for value in values])


@rule(
    "NS503", "a loss above where it began", "error", name="loss-diverged", needs=("rows",),
    fix="Lower the learning rate (by ten to begin with), or warm it up.",
    reference="Cohen et al. 2021; Wortsman et al. 2023",
    clean=Clean("The loss did not rise above where it began", "loss"),
)  # fmt: skip
def loss_diverged(at: At) -> Iterator[Hit]:
    """The median loss over 50 steps is a tenth above that of the first steps, and by at least three standard errors, so the noise
    of batches does not count: the training has unlearned more than it learned. Noise is estimated from the differences between
    successive losses, so a steady rise does not hide itself. The learning rate is the first suspect: beyond 2 over the curvature
    each step makes the loss larger."""
    history, row = at
    if not math.isfinite(row["loss"]) or "first loss" not in history.kept:
        history.only(False)
        return
    recent, first = history.recent("all losses", USUAL), history.kept["first loss"]
    limit = first + (ABOVE - 1) * abs(first)
    gone = recent.add(int(row["step"]), row["loss"])
    above = history.kept["above"] = history.kept.get("above", 0) + (row["loss"] > limit) - sum(value > limit for value in gone)
    ready = len(recent) >= FEWEST and recent.span >= LEAST_SPAN
    history.only(ready)
    if not ready or 2 * above <= len(recent):  # that is, the median is not above it
        return
    usual = median(recent.values)
    noise = 1.4826 / math.sqrt(2) * median(abs(right - left) for left, right in pairwise(recent.values))
    if usual - first > ERRORS * 1.25 * noise / math.sqrt(history.kept["first losses"]):
        yield Hit("", f"the loss is {usual:.3g}, above the {first:.3g} that training began with", {"loss": usual, "first": first})


@rule(
    "NS504", "gradients that explode", "error", name="exploding-gradient", needs=("rows",),
    fix="Clip gradients, lower the learning rate, or warm it up.",
    reference="Pascanu, Mikolov & Bengio 2013",
    clean=Clean("No gradient exploded", "total_gradient_norm"),
)  # fmt: skip
def exploding_gradient(at: At) -> Iterator[Hit]:
    """A gradient a hundred times its usual norm, or one that is not finite, throws the weights away from where training had
    brought them; with Adam it also spoils the second moments for hundreds of steps."""
    history, row = at
    total, recent = float(row["total_gradient_norm"]), history.recent("gradients")
    typical = median(recent.values) if len(recent) >= FEWEST and _due(history, row) else history.kept.get("typical", math.nan)
    history.kept["typical"] = typical
    if not math.isfinite(total):
        norms = history.metric(row, "gradient_norm")
        infinite = np.isinf(norms) | (np.isnan(norms) & np.asarray(row.get("gradient_seen", False)))
        places, seen = np.flatnonzero(infinite), int(np.count_nonzero(row.get("gradient_seen", np.isfinite(norms))))
        if 0 < len(places) < seen:  # what is not finite flows from the loss to the first layer
            message = f"the gradient is not finite in {len(places)} of {seen} layers, of which this is the one nearest to the loss"
            yield Hit(history.names[places[-1]], message, {"layers": len(places)})
        else:
            yield Hit("", f"the gradient is not finite{' in any layer' * bool(len(places))}", {"total_gradient_norm": total})
        return
    if 0 < EXPLOSION * typical < total:  # where it was zero, nothing is usual
        norms = history.metric(row, "gradient_norm")
        most = history.names[int(np.nanargmax(norms))] if np.isfinite(norms).any() else ""
        place = history.kept.setdefault("exploding", most)  # where it began, as long as it lasts
        message = f"the gradient's norm is {total:.3g}, {total / typical:.0f} times what it usually is"
        yield Hit(place, message, {"total_gradient_norm": total, "typical": typical})
        return
    history.only(typical > 0)
    history.kept.pop("exploding", None)
    recent.add(int(row["step"]), total)


def _due(history: History, row: Row) -> bool:
    """Whether what is usual is to be computed again: not in every step, it moves slowly."""
    if row["step"] < history.kept.get("typical until", -1):
        return False
    history.kept["typical until"] = row["step"] + 5
    return True


@rule(
    "NS505", "gradients that vanish", "warning", name="vanishing-gradient", needs=("rows",),
    fix="Normalize between the layers, use residual connections, or an initialization that keeps variances.",
    reference="Glorot & Bengio 2010",
    clean=Clean("No recorded layer's gradient vanished", "gradient_norm"),
)  # fmt: skip
def vanishing_gradient(at: At) -> Iterator[Hit]:
    """A layer whose gradient is ten million times smaller than another's does not learn at a learning rate that fits the other. If
    every gradient is zero, training stands still: look for a rectifier whose units are all off, or for a saturated loss. The first
    sample is not judged: branches that begin at 0 or nearly so (LoRA, ConvNeXt's layer scales) hold gradients back on purpose."""
    history, row = at
    norms = history.metric(row, "gradient_norm")
    finite = norms[np.isfinite(norms)]
    largest = float(finite.max(initial=0))
    recent = history.recent("largest gradients")
    if len(finite):
        recent.add(int(row["step"]), largest)
    if any(recent.values) and len(recent) >= FEWEST and not any(recent.values[-FEWEST:]):
        for index in np.flatnonzero(norms == 0):
            yield Hit(history.names[index], "every gradient is zero: training stands still", {"gradient_norm": 0.0})
    begun = row["step"] != history.first_step
    history.only(begun)
    for place in history.worst(begun & (norms < VANISHING * largest), norms):
        yield Hit(history.names[place], f"its gradient is {norms[place]:.2g}, the largest layer's {largest:.2g}: it has vanished",
                  {"gradient_norm": float(norms[place]), "largest": largest})  # fmt: skip


@rule(
    "NS506", "a variance close to ε", "warning", name="variance-collapse", needs=("rows",),
    fix="Raise the scale of what enters (initialization, residual weight), or lower ε.",
    reference="Arora, Li & Lyu 2019; the defect of scale invariance is ε/(σ² + ε)",
    clean=Clean("The variance of what enters each recorded normalizer stayed well above its ε", "input_variance"),
)  # fmt: skip
def collapsing_variance(at: At) -> Iterator[Hit]:
    """Where the variance that enters a normalizer is close to its ε, its gain nears 1/√ε and scale invariance ends: the layer
    amplifies whatever is left of its input."""
    history, row = at
    variance = history.metric(row, "input_variance")
    history.only(np.isfinite(history.epsilon))
    for index in history.worst(variance <= COLLAPSE * history.epsilon, variance):
        epsilon = float(history.epsilon[index])
        yield Hit(history.names[index], f"the variance of its input is {variance[index]:.2g}, close to its ε = {epsilon:g}",
                  {"input_variance": float(variance[index]), "epsilon": epsilon})  # fmt: skip


@rule(
    "NS507", "rectifiers whose units are off", "warning", name="dead-units", needs=("rows",),
    fix="Lower the learning rate, normalize before the activation, or use one with a slope everywhere.",
    reference="Lu et al. 2020 (dying ReLU)",
    clean=Clean("At least half of the channels of every recorded rectifier were alive", "dead_fraction"),
)  # fmt: skip
def dead_units(at: At) -> Iterator[Hit]:
    """A unit that is off for the whole batch gets no gradient and, as a rule, never comes back: the width is wasted."""
    history, row = at
    dead = history.metric(row, "dead_fraction")
    for index in history.worst(dead > DEAD, -dead):
        yield Hit(history.names[index], f"{dead[index]:.0%} of its channels are off for the whole batch",
                  {"dead_fraction": float(dead[index])})  # fmt: skip


@rule(
    "NS508", "running statistics that the batches do not have", "warning", name="running-statistics", needs=("rows",),
    fix="Use larger batches, a larger momentum, or a normalizer without running statistics.",
    reference="Ioffe 2017",
    clean=Clean("BN's running statistics agreed with the batches'", "running_divergence"),
)  # fmt: skip
def diverging_statistics(at: At) -> Iterator[Hit]:
    """Evaluation uses BN's running statistics, training the batch's. Where they differ, the model that is evaluated is not the
    one that is trained. They have a hundred steps to catch up with their initial values."""
    history, row = at
    if history.first_step is None or row["step"] - history.first_step < RUNNING_IN:
        history.only(False)
        return
    divergence, shift = history.metric(row, "running_divergence"), history.metric(row, "running_shift")
    for index in history.worst((divergence > DIVERGENCE) | (shift > SHIFT), -divergence):
        factor = math.exp(min(float(divergence[index]), 300.0))
        off = f"its running variance is off by a factor of {factor:.3g}, its mean by {shift[index]:.2g} deviations"
        yield Hit(history.names[index], off,
                  {"running_divergence": float(divergence[index]), "running_shift": float(shift[index])})  # fmt: skip


@rule(
    "NS509", "weights that are not finite", "error", name="weight-not-finite", needs=("rows",),
    fix="Go back to a checkpoint from before this step, and lower the learning rate or clip gradients.",
    reference="docs/watch.md",
    clean=Clean("All recorded weights were finite", "frobenius_norm"),
)  # fmt: skip
def weight_not_finite(at: At) -> Iterator[Hit]:
    """A weight with a NaN in it makes every output NaN, and so every gradient: no further step repairs it."""
    history, row = at
    held = {layer["name"] for layer in history.layers if layer.get("parameter")}
    norms = history.metric(row, "frobenius_norm")
    if np.isfinite(norms).any() or row.get("weights_seen", False):
        for index in np.flatnonzero(~np.isfinite(norms)):
            if history.names[index] in held and (np.isinf(norms[index]) or row.get("weights_seen", False)):
                yield Hit(history.names[index], "its weight is not finite", {"frobenius_norm": math.inf})


@rule(
    "NS510", "γ that steps do not move", "error", name="unmoved-scale", needs=("rows",),
    fix="Keep γ in float32, or use an optimizer with float32 master copies: steps are rounded away in its type.",
    reference="speculators #765, flame #47, axolotl #3670",
    clean=Clean("Every recorded γ that had a gradient moved", "update_norm"),
)  # fmt: skip
def unmoved_scale(at: At) -> Iterator[Hit]:
    """A γ that has a gradient and a learning rate but does not change by a single bit in 20 steps is rounded back after each of
    them. In bfloat16 next to 1 that happens to every step below 0.002."""
    history, row = at
    moved, gradient = history.metric(row, "update_norm"), history.metric(row, "gradient_norm")
    still, steps = history.kept.setdefault("still", {}), int(row["step"])
    scales = np.array([layer.get("role") == "normalizer" and bool(layer.get("parameter")) for layer in history.layers], bool)
    history.only(scales & (moved > 0))
    for index in range(len(history.layers)):
        if not scales[index] or math.isnan(moved[index]):
            continue
        if moved[index] > 0 or not gradient[index] > 0 or not row.get("learning_rate", 0) > 0:
            still.pop(index, None)
            continue
        first, count = still.get(index, (steps, 0))
        still[index] = first, count + 1
        if count + 1 >= FEWEST and steps - first >= STILL:
            yield Hit(history.names[index], f"its γ has not changed since step {first:,}, though its gradient is not zero",
                      {"update_norm": 0.0, "gradient_norm": float(gradient[index]), "samples": count + 1})  # fmt: skip


@rule(
    "NS511", "activations far beyond what they were", "warning", name="massive-activation", needs=("rows",),
    fix="Look at the weights that write to this stream; normalize it, add weight decay, or lower the learning rate.",
    reference="Sun et al. 2024 (massive activations)",
    clean=Clean("No recorded input of a normalizer or activation grew a hundredfold", "largest_input"),
)  # fmt: skip
def massive_activation(at: At) -> Iterator[Hit]:
    """The largest entry that enters a normalizer or an activation, against its median over the first steps. A hundredfold growth
    ends in overflow in half precision, makes quantization impossible, and is carried through residual streams unseen."""
    history, row = at
    largest = history.metric(row, "largest_input")
    if "first inputs" not in history.kept:
        firsts = history.recent("first inputs", 10)
        firsts.add(int(row["step"]), largest)
        if len(firsts) >= FEWEST:
            with np.errstate(all="ignore"):
                history.kept["first inputs"] = np.median(np.stack(firsts.values), 0)
        history.only(False)
        return
    with np.errstate(all="ignore"):
        factor = largest / history.kept["first inputs"]
    for index in history.worst(np.isfinite(factor) & (factor > MASSIVE), -factor):
        message = f"its largest input is {largest[index]:.3g}, {factor[index]:.0f} times what it was at first"
        yield Hit(history.names[index], message, {"largest_input": float(largest[index]), "factor": float(factor[index])})


@rule(
    "NS309", "an effective learning rate that drifts", "warning", name="effective-learning-rate-drift",
    needs=("rows", "judged weights"),
    fix="Weight decay holds a norm that grew, a lower learning rate one that shrank; ns.optim has optimizers that keep it.",
    reference="van Laarhoven 2017",
    clean=Clean("Effective learning rates stayed within a factor of ten of where they began", "effective_lr"),
)  # fmt: skip
def drifting_rate(at: At) -> Iterator[Hit]:
    """What moves the function of a scale-free weight is lr/‖w‖², not lr. When its norm grows or shrinks tenfold, the schedule
    that acts is no longer the one that you set. Changes that the schedule itself makes are not counted."""
    history, row = at
    scheduled = row.get("learning_rate", math.nan)
    if not scheduled or not math.isfinite(scheduled):
        history.only(False)
        return
    history.only("first rate" in history.kept)  # the first is what others are compared with
    rate = history.metric(row, "effective_lr") / scheduled
    first = history.kept.setdefault("first rate", rate)
    with np.errstate(all="ignore"):
        factor = rate / first
        drift = np.abs(np.log(factor))
    for index in history.worst(drift >= math.log(DRIFT), -drift):
        size = f"{factor[index]:.3g} times" if not 0 < factor[index] < 1 else f"1/{1 / factor[index]:.3g} of"
        yield Hit(history.names[index], f"its effective learning rate is {size} what it was at first, beyond what the schedule did",
                  {"factor": float(factor[index])})  # fmt: skip


STEP_RULES = ("NS501", "NS502", "NS503", "NS504")  # what is cheap enough to be judged on every step
ROW_RULES = tuple(id for id in RULES if "rows" in RULES[id].needs and id not in STEP_RULES)


def replayed(run: Any) -> Chronicle:
    """What the rules say of the rows of a recorded run. run: an `ns.Run`, or what holds columns as one does."""
    columns = [RULES[id].clean.column for id in (*STEP_RULES, *ROW_RULES)]  # type: ignore[union-attr]
    others = ("gradient_norm", "running_shift", "learning_rate", "attention_entropy")
    wanted = dict.fromkeys([*columns, *PRODUCTS, *PRODUCTS.values(), *others])
    held = run.arrays(*[name for name in wanted if name in run.columns])
    chronicle = Chronicle(run.layers, (*STEP_RULES, *ROW_RULES))
    for place in range(len(held["step"])):
        row = {name: values[place] for name, values in held.items()}
        for name in ("loss", "total_gradient_norm"):  # NaN stands for not recorded, too
            if math.isnan(row.get(name, math.nan)):
                row.pop(name, None)
        chronicle.look(row)
    return chronicle
