"""For every claim: its verdict, and changes of its statement (a sign, an exponent, a factor) with the verdict that each must give.

A measured claim is judged on what was measured with BN and without exchanged, on what the paper says was measured, or by a statement
with a sign changed; some answer must change.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from normscope.claims.akbar import conditioning, derivatives, symmetry
from normscope.claims.calculus import scalar, spectral_product
from normscope.claims.than2025 import comparisons, figures, generalization, networks, normalizers, optimization, weights
from normscope.claims.verdicts import BOUND, FALSE, GAP, HOLDS, MEASURED
from normscope.lab.experiment import Results


def times(function, factor):
    """The stated formula with a spare factor."""
    return lambda *arguments: factor * function(*arguments)


def measured(stated):
    return MEASURED, [({"stated": stated}, MEASURED)]


def exchanged(results):
    """What was measured with BN is said to have been measured without, and the other way round."""
    other = {"batch": "none", "none": "batch"}
    return Results([replace(t, parameters={**t.parameters, "normalizer": other[t.parameters["normalizer"]]}) for t in results])


def backwards(results):
    """Training is said to have gone the other way."""
    return Results([replace(t, numbers={**t.numbers, "history": _renumbered(t.numbers["history"][::-1])}) for t in results])


def inflated(results):
    """The product of spectral norms is said to have reached the paper's 10^50."""
    changed = copy.deepcopy(list(results))
    for trial in changed:
        trial.numbers["history"][-1]["products"]["weights_matrix"] = 50.0
    return Results(changed)


def _renumbered(history):
    return [{**record, "epoch": epoch} for epoch, record in enumerate(history)]


def grow_but_amplify(numbers):
    """Norms and variances grow, and the product of 1/σ is above 1: Figure 3's statement with a sign changed."""
    name = "log10 of 1/σ, one σ a layer"
    return figures.norms_and_variances({**numbers, name: -numbers[name]})


def saves_no_more_when_deeper(needed):
    shallow, deep = (needed[f"none, depth {depth}"] / needed[f"batch, depth {depth}"] for depth in (2, 6))
    return deep <= shallow


def wrong_rows(scale, slopes, active, features, rows):
    return weights.extreme_gradient(scale, slopes, active, features, len(active[0]))


BROKEN_SUMS = (  # empirical loss, Lipschitz or sensitivity term, g: each counts, and with its sign
    lambda empirical, spread, uncertain: empirical - spread + uncertain,
    lambda empirical, spread, uncertain: empirical + uncertain,
    lambda empirical, spread, uncertain: empirical + spread,
)

VERDICTS = {
    "T-L1": (BOUND, [
        ({"stated": lambda s: (1 / s).max()}, HOLDS),
        ({"stated": lambda s: (1 / s).min()}, FALSE),
        ({"stated": lambda s: (1 / s**2).norm()}, FALSE),
    ]),
    "T-S-BN": (BOUND, [({"stated": lambda s: (1 / s).abs().max()}, HOLDS), ({"stated": lambda s: (1 / s).max()}, FALSE)]),
    "T-L2": (HOLDS, [({"stated": times(normalizers.inverse_deviation, 0.9)}, FALSE), ({"stated": times(normalizers.inverse_deviation, 1.1)}, BOUND)]),
    "T-L23": (HOLDS, [({"stated": lambda x: normalizers.layer_norm_jacobian(x) + 1e-3 * torch.eye(len(x))}, FALSE), ({"stated": times(normalizers.layer_norm_jacobian, -1)}, FALSE)]),
    "T-L3": (BOUND, [({"stated": lambda s: (1 / s).max()}, HOLDS), ({"stated": lambda s: (1 / s).mean()}, FALSE)]),
    "T-S-LN": (FALSE, [({"stated": lambda x, g: x.shape[-1] / (x.shape[-1] - 1) * normalizers.shrunk_by_width(x, g)}, HOLDS), ({"stated": times(normalizers.shrunk_by_width, 2)}, BOUND)]),
    "T-S-GN": (FALSE, [({"stated": lambda x, g: x.shape[-1] / (x.shape[-1] - 1) * normalizers.shrunk_by_width(x, g)}, HOLDS), ({"stated": times(normalizers.shrunk_by_width, 2)}, BOUND)]),
    "T-D4": (HOLDS, [
        ({"stated": networks.STEEPER_ACTIVATIONS}, FALSE),
        ({"stated": {"sigmoid": torch.sigmoid, "tanh of 0.9 x": lambda x: torch.tanh(0.9 * x)}}, BOUND),
    ]),
    "T-L5": (HOLDS, [({"stated": times(spectral_product, 0.9)}, FALSE), ({"stated": times(spectral_product, 2)}, BOUND)]),
    "T-L5-residual": (FALSE, [({"stated": networks.product_of_blocks}, BOUND)]),
    "T-T6": (HOLDS, [({"stated": lambda factors: scalar(sum(factors))}, FALSE), ({"stated": lambda factors: networks.product_of_factors(factors) ** 0.5}, FALSE)]),
    "T-T9": (HOLDS, [({"stated": lambda w, d: spectral_product(w) ** 2 / networks.weights_and_constants(w, d)}, FALSE), ({"stated": times(networks.weights_and_constants, 3)}, BOUND)]),
    "T-C10": (BOUND, [
        ({"stated": networks.weights_and_constants}, HOLDS),
        ({"stated": lambda w, d: spectral_product(w)}, FALSE),
        ({"power_form": lambda w, d: 1 / networks.weights_and_powers(w, d)}, FALSE),
    ]),
    "T-C10-variance": (GAP, [({"stated": lambda factor, layers: 1.0}, HOLDS), ({"stated": lambda factor, layers: factor**-0.01}, GAP)]),
    "T-C11": (HOLDS, [({"stated": lambda w, e: spectral_product(w) * e ** (len(w) / 2)}, FALSE), ({"stated": lambda w, e: spectral_product(w) * e ** -len(w)}, BOUND)]),
    "T-T12": (HOLDS, [
        ({"stated": lambda w, d, i: weights.product_from(w, [1 / x for x in d], i)}, FALSE),
        ({"stated": lambda w, d, i: weights.product_from(w, d, i + 1)}, FALSE),
        ({"stated": times(weights.product_from, 2)}, BOUND),
    ]),
    "T-T13": (FALSE, [({"stated": lambda features, widths: features.norm()}, HOLDS), ({"stated": lambda features, widths: 2 * features.norm()}, BOUND)]),
    "T-T13-y": (HOLDS, [({"stated": lambda factors: scalar(max(factors))}, FALSE)]),
    "T-C14": (FALSE, [({"stated": lambda active: active**0.5}, HOLDS), ({"stated": lambda active: active}, BOUND)]),
    "T-T15": (HOLDS, [({"stated": wrong_rows}, FALSE), ({"stated": times(weights.extreme_gradient, -1)}, FALSE)]),
    "T-R16": (GAP, [({"activation": lambda u: u}, HOLDS), ({"stated": lambda growth: 0.0}, HOLDS), ({"activation": torch.sigmoid}, GAP)]),
    "T-R17": (FALSE, [
        ({"stated": lambda norms, i: networks.product_of_factors([*norms[:i], *norms[i + 1 :]])}, HOLDS),
        ({"stated": lambda norms, i: networks.product_of_factors(norms)}, BOUND),
        ({"stated": lambda norms, i: networks.product_of_factors(norms[:i])}, FALSE),
    ]),
    "T-C18": (GAP, [({"stated": lambda norms, alpha: 0.0}, HOLDS)]),
    "T-C19": (GAP, [({"stated": optimization.cited_evaluations}, HOLDS), ({"stated": lambda constant, alpha: constant**3}, HOLDS)]),
    "T-T20": (HOLDS, [({"stated": change}, FALSE) for change in BROKEN_SUMS]),
    "T-Eq66": (HOLDS, [({"stated": change}, FALSE) for change in BROKEN_SUMS]),
    "T-T20-local": (FALSE, [({"stated": lambda sample, loss: sample.constants(loss)}, HOLDS)]),
    "T-C21": (HOLDS, [({"stated": change}, FALSE) for change in BROKEN_SUMS]),
    "T-S-T1": (HOLDS, [({"stated": lambda spread, uncertain: uncertain - spread}, FALSE)]),
    "T-C22": (HOLDS, [
        ({"stated": times(spectral_product, 0.5)}, FALSE),
        ({"batch": lambda d: 1 / generalization.batch_norm_factor(d)}, FALSE),
        ({"layer": lambda layers: 1 / generalization.layer_norm_factor(layers)}, FALSE),
    ]),
    "T-C22-labels": (FALSE, [({"stated": comparisons.one_label}, HOLDS), ({"stated": lambda x: 1 - comparisons.two_labels(x)}, FALSE)]),
    "T-HKK": (GAP, [
        ({"partitions": [(100, 1, 10_000), (1000, 10, 10**6)]}, HOLDS),  # most cells are empty
        ({"stated": lambda distance, cells, size: 10 * comparisons.sum_of_hou(distance, cells, size)}, HOLDS),
    ]),
    "T-LLA": (GAP, [({"dimensions": (1,)}, HOLDS), ({"stated": lambda size: 1.0}, HOLDS), ({"stated": lambda size: size**-0.5}, GAP)]),
    "T-F1": measured(inflated),
    "T-F2": measured(backwards),
    "T-F3": measured(grow_but_amplify),
    "T-S-data": measured(saves_no_more_when_deeper),
    "A-P4.1": (HOLDS, [({"stated": lambda layer, c: layer.scaled(-c)}, FALSE), ({"stated": symmetry.scale_and_divide_gamma}, FALSE)]),
    "A-P4.1-gamma": (FALSE, [({"stated": symmetry.scale_all}, HOLDS)]),
    "A-S4.1-group": (FALSE, [({"stated": lambda layers, neurons: neurons}, HOLDS), ({"stated": lambda layers, neurons: 2 * neurons}, FALSE)]),
    "A-S9.1-bias": (FALSE, [({"statistics": "fixed"}, HOLDS)]),
    "A-C4.1.1": (HOLDS, [({"stated": lambda weight, bias: (weight**2, bias)}, FALSE), ({"stated": lambda weight, bias: (weight.roll(1, 1), bias)}, FALSE)]),
    "A-P4.2": (HOLDS, [
        ({"stated": lambda layer, c: layer.scaled(c * torch.arange(1.0, 5.0, dtype=torch.float64))}, FALSE),
        ({"stated": lambda layer, c: layer.scaled(-c)}, FALSE),
    ]),
    "A-P4.3": (FALSE, [({"stated": lambda v, g, c: (c * v, g)}, HOLDS), ({"stated": lambda v, g, c: (c * v, g * c)}, FALSE)]),
    "A-Tab1": (FALSE, [({"stated": symmetry.freedoms}, HOLDS), ({"stated": lambda kind, inputs: 2 + inputs}, FALSE)]),
    "A-Eq1": (FALSE, [({"stated": derivatives.backward_with_gamma}, HOLDS), ({"stated": times(derivatives.backward_with_gamma, -1)}, FALSE)]),
    "A-A.1.1-end": (HOLDS, [({"stated": derivatives.backward_without_gamma}, FALSE)]),
    "A-A.1.1-W": (HOLDS, [
        ({"stated": times(derivatives.weight_gradient, -1)}, FALSE),
        ({"stated": lambda d, z, x, gamma: derivatives.weight_gradient(d, z, x, gamma**2)}, FALSE),
        ({"stated": lambda d, z, x, gamma: derivatives.weight_gradient(d, z, x - x.mean(0), gamma) + d @ x.mean(0).expand_as(x)}, FALSE),
    ]),
    "A-A.1.1": (FALSE, [({"stated": derivatives.right_jacobian}, HOLDS), ({"stated": lambda z: -derivatives.right_jacobian(z)}, FALSE)]),
    "A-LN-backward": (FALSE, [({"stated": derivatives.right_layer_norm_backward}, HOLDS), ({"stated": lambda d, z, g: derivatives.right_layer_norm_backward(d, z, g**2)}, FALSE)]),
    "A-WN": (FALSE, [({"stated": derivatives.right_weight_norm}, HOLDS), ({"stated": lambda s, v, g: (derivatives.right_weight_norm(s, v, g)[0], s @ v)}, FALSE)]),
    "A-WN-radial": (FALSE, [({"stated": lambda g, of_g: scalar(0.0)}, HOLDS), ({"stated": lambda g, of_g: -g * of_g}, FALSE)]),
    "A-A.1.2": (FALSE, [
        ({"stated": lambda gamma, sigma, deltas: gamma / sigma * deltas, "stated_hessian": derivatives.right_hessian}, HOLDS),
        ({"stated": lambda gamma, sigma, deltas: gamma / sigma * deltas}, FALSE),
        ({"stated_hessian": derivatives.right_hessian}, FALSE),
    ]),
    "A-S3.2-flat": (FALSE, [({"stated": lambda slope, w: -slope}, HOLDS), ({"stated": lambda slope, w: slope}, FALSE)]),
    "A-S6.1": (FALSE, [({"stated": conditioning.with_statistics_moving}, HOLDS), ({"stated": times(conditioning.with_statistics_held, -1)}, FALSE)]),
    "A-S7.1": (FALSE, [
        ({"stated": conditioning.condition_of_correlated}, HOLDS),
        ({"correlations": (0.0,)}, HOLDS),
        ({"stated": lambda correlation: conditioning.condition_of_correlated(correlation) ** 2}, FALSE),
    ]),
    "A-metric": (HOLDS, [({"stated": lambda y, first, second: first @ second}, FALSE), ({"stated": lambda y, first, second: first @ second / y.norm()}, FALSE)]),
    "A-grad-scale": (HOLDS, [({"stated": (2.0, 2.0)}, FALSE), ({"stated": (1.0, 1.0)}, FALSE), ({"stated": (-1.0, 2.0)}, FALSE)]),
    "A-Ex5.1": (FALSE, [({"stated": lambda size, c: size / c}, HOLDS), ({"stated": lambda size, c: size * c}, FALSE)]),
    "A-L5.1": (HOLDS, [({"stated": lambda norm, time: norm * (1 + 1e-3 * time)}, FALSE), ({"stated": lambda norm, time: norm * (1 - 1e-3 * time)}, FALSE)]),
    "A-L5.1-LN": (FALSE, [({"stated": lambda weight, bias: (weight.square().sum() + bias.square().sum()).sqrt()}, HOLDS), ({"stated": lambda weight, bias: bias.norm()}, FALSE)]),
    "A-WD": (FALSE, [({"stated": 2.0}, HOLDS), ({"stated": -2.0}, FALSE)]),
    "A-R5.1": (FALSE, [({"statistics": "data"}, HOLDS)]),
    "A-E1": measured(exchanged),
    "A-E2": measured(exchanged),
    "A-E3": measured(exchanged),
    "A-E4": measured(exchanged),
    "A-noise": measured(exchanged),
    "A-large-lr": measured(exchanged),
    "A-smooth": measured(exchanged),
}  # fmt: skip
LONG = {"T-F1-resnet18": inflated, "T-F2-resnet18": backwards}
