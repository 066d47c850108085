"""Changes of every statement, and what becomes of each: a check has teeth where a wrong statement gets another verdict.

Each claim has mutants of scale (its formula × 0.9 and × 1.1) and, in the tables below, others: a term left out, a sign, a power.
Where a statement does not hold as it stands, the mutants are those of the mended one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normscope.claims.akbar import conditioning, derivatives, discussion, extensions, symmetry, theory
from normscope.claims.answers import noise
from normscope.claims.calculus import scalar, spectral_product
from normscope.claims.claim import Claim, load
from normscope.claims.observed import exchanged
from normscope.claims.statement import OBSERVED
from normscope.claims.than2025 import comparisons, figures, generalization, networks, normalizers, optimization, weights
from normscope.claims.verdicts import MEASURED, Ruling

Changes = dict[str, Any]
FACTORS = (0.9, 1.1)


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: its verdict beside that of the statement that it changes."""

    id: str
    mutant: str
    scale: bool
    before: Ruling
    after: Ruling

    @property
    def killed(self) -> bool:
        if self.before.verdict == MEASURED:
            return self.before.evidence != self.after.evidence
        return self.before.verdict != self.after.verdict

    @property
    def blunt(self) -> bool:
        """Whether the statement's evidence says that it is not sharp here."""
        return any("not sharp here" in str(value) for value in self.before.evidence.values())

    def __str__(self) -> str:
        fate = "killed" if self.killed else "survives"
        return f"{self.id:<18}{self.mutant:<34}{fate:<10}{self.before.verdict} → {self.after.verdict}"


def times(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The formula with a spare factor; of a pair, in both."""

    def scaled(*arguments: Any) -> Any:
        value = function(*arguments)
        return tuple(factor * part for part in value) if isinstance(value, tuple) else factor * value

    return scaled


def stretched(name: str, factor: float) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: lambda x: factor * networks.NAMED_ACTIVATIONS[name](x)}


SUMS = {  # of empirical loss, Lipschitz or sensitivity term and g: each counts, and with its sign
    "minus the local term": {"stated": lambda empirical, spread, uncertain: empirical - spread + uncertain},
    "no local term": {"stated": lambda empirical, spread, uncertain: empirical + uncertain},
    "no g": {"stated": lambda empirical, spread, uncertain: empirical + spread},
    "g × 0.05": {"stated": lambda empirical, spread, uncertain: empirical + spread + 0.05 * uncertain},
}
LARGEST = {"stated": lambda s: (1 / s).abs().max()}

MENDED: dict[str, Changes] = {  # what holds instead, of statements that do not hold with equality
    "T-L1": LARGEST,
    "T-S-BN": LARGEST,
    "T-L3": LARGEST,
    "T-S-LN": {"stated": lambda x, g: (1 - 1 / x.shape[-1]) ** 0.5 * g.abs().max() / normalizers.layer_deviation(x).min()},
    "T-S-GN": {"stated": lambda x, g: (1 - 1 / x.shape[-1]) ** 0.5 * g.abs().max() / normalizers.layer_deviation(x).min()},
    "T-D-LN": {"stated": lambda x, g: g.abs().max() / normalizers.layer_deviation(x).min()},
    "T-L5-residual": {"stated": networks.product_of_blocks},
    "T-C10": {"stated": networks.weights_and_constants},
    "T-C10-variance": {"stated": lambda factor, layers: 1.0},
    "T-C11-reduction": {"stated": lambda epsilon: epsilon**-0.5},
    "T-headline": {"stated": lambda weights, normalizers: weights + normalizers},
    "T-T13": {"stated": lambda features, widths: features.norm()},
    "T-C14": {"stated": lambda active: active**0.5},
    "T-C14-11": {"stated": lambda features, widths: features.norm()},
    "T-R17": {"stated": lambda norms, i: networks.product_of_factors([*norms[:i], *norms[i + 1 :]])},
    "T-C18": {"stated": lambda norms, alpha: 0.0},
    "T-C19": {"stated": optimization.cited_evaluations},
    "T-T20-partition": {"stated": lambda size, risk: risk},
    "T-C22-labels": {"stated": comparisons.one_label},
    "T-HKK": {"stated": lambda distance, cells, size: comparisons.sum_of_filled(cells, size)},
    "T-LLA": {"stated": comparisons.sum_of_lyu, "dimensions": (1,)},
    "A-P4.1-gamma": {"stated": symmetry.scale_all},
    "A-S4.1-group": {"stated": lambda layers, neurons: neurons},
    "A-P4.3": {"stated": lambda v, g, c: (c * v, g)},
    "A-Tab1": {"stated": symmetry.freedoms},
    "A-Eq1": {"stated": derivatives.backward_with_gamma},
    "A-A.1.1": {"stated": derivatives.right_jacobian},
    "A-LN-backward": {"stated": derivatives.right_layer_norm_backward},
    "A-WN-3.2": {"stated": derivatives.right_weight_norm},
    "A-WN-4.3": {"stated": derivatives.right_weight_norm},
    "A-WN-radial": {"stated": lambda g, of_g: scalar(0.0)},
    "A-A.1.2-matrix": {"stated": derivatives.right_hessian},
    "A-A.1.2-gradient": {"stated": lambda gamma, sigma, deltas: gamma / sigma * deltas},
    "A-S3.2-eigen": {"stated": lambda slope, w: -slope},
    "A-S6.1": {"stated": conditioning.with_statistics_moving},
    "A-S7.1": {"stated": conditioning.variance_of_correlated},
    "A-Ex5.1": {"stated": lambda size, c: size / c},
    "A-L5.1-LN": {"stated": lambda weight, bias: (weight.square().sum() + bias.square().sum()).sqrt()},
    "A-WD": {"stated": 2.0},
    "A-S7.1-saddles": {"stated": lambda least, variance: variance},
    "A-S7.2-norms": {"stated": discussion.sum_of_scale_free_norms},
    "A-S7.2-margin": {"stated": lambda growth: 1.0},
    "A-S10-VC": {"stated": lambda number: number},
    "A-S9.5-clipping": {"stated": lambda start, plain: plain},
    "A-S9.5-training": {"stated": extensions.variance_of_target},
}

OTHERS: dict[str, dict[str, Changes]] = {
    "T-L1": {"min": {"stated": lambda s: (1 / s).min()}, "variances, no root": {"stated": lambda s: (1 / s**2).max()}},
    "T-S-BN": {"without |·|": {"stated": lambda s: (1 / s).max()}},
    "T-L23": {
        "+ 0.001 I": {"stated": lambda x: normalizers.layer_norm_jacobian(x) + 1e-3 * torch.eye(len(x))},
        "sign": {"stated": times(normalizers.layer_norm_jacobian, -1)},
    },
    "T-L3": {"mean": {"stated": lambda s: (1 / s).mean()}},
    "T-D4": {"SiLU, GELU, Mish": {"stated": networks.STEEPER_ACTIVATIONS}},
    "T-T6": {
        "sum": {"stated": lambda factors: scalar(sum(factors))},
        "root": {"stated": lambda factors: networks.product_of_factors(factors) ** 0.5},
    },
    "T-T9": {
        "inverse of the normalizers": {"stated": lambda w, d: spectral_product(w) ** 2 / networks.weights_and_constants(w, d)}
    },
    "T-C10": {
        "no normalizers": {"stated": lambda w, d: spectral_product(w)},
        "inverse power form": {
            "stated": networks.weights_and_constants,
            "power_form": lambda w, d: 1 / networks.weights_and_powers(w, d),
        },
    },
    "T-C10-variance": {"c^-0.01": {"stated": lambda factor, layers: factor**-0.01}},
    "T-C11": {
        "ε^(+K/2)": {"stated": lambda w, e: spectral_product(w) * e ** (len(w) / 2)},
        "ε^-K": {"stated": lambda w, e: spectral_product(w) * e ** -len(w)},
    },
    "T-T12": {
        "1/σ inverted": {"stated": lambda w, d, i: weights.product_from(w, [1 / x for x in d], i)},
        "one layer later": {"stated": lambda w, d, i: weights.product_from(w, d, i + 1)},
    },
    "T-T13-y": {"largest factor": {"stated": lambda factors: scalar(max(factors))}},
    "T-C14": {"n instead of √n": {"stated": lambda active: active}},
    "T-T15": {
        "all rows": {"stated": lambda s, slopes, on, h, rows: weights.extreme_gradient(s, slopes, on, h, len(on[0]))},
        "sign": {"stated": times(weights.extreme_gradient, -1)},
    },
    "T-R16": {"(∏a)^0.9": {"stated": lambda growth: growth**0.9}},
    "T-R17": {
        "all norms": {"stated": lambda norms, i: networks.product_of_factors(norms)},
        "earlier norms": {"stated": lambda norms, i: networks.product_of_factors(norms[:i])},
    },
    "T-S5.1": {
        "strongly convex as convex": {
            "stated": lambda strong, constant, radius, t: optimization.least_gap(False, constant, radius, t)
        },
        "no root": {"stated": lambda strong, constant, radius, t: constant * radius / (4 if strong else 2) / t**0.25},
    },
    "T-C18": {"one iteration": {"stated": lambda norms, alpha: 1 / optimization.HIDDEN_CONSTANT}},
    "T-T20": SUMS,
    "T-Eq66": SUMS,
    "T-T20-local": {name: SUMS[name] for name in ("no g", "minus the local term")},
    "T-C21": {name: SUMS[name] for name in ("no g", "minus the local term", "no local term")},
    "T-S-T1": {"minus the local term": {"stated": lambda spread, uncertain: uncertain - spread}},
    "T-S-errors": {"sup once": {"stated": lambda optimization, deviation: optimization + deviation}},
    "T-C22": {
        "BN inverted": {"batch": lambda d: 1 / generalization.batch_norm_factor(d)},
        "LN inverted": {"layer": lambda layers: 1 / generalization.layer_norm_factor(layers)},
    },
    "T-C22-labels": {
        "one of two labels × 0.9": {"stated": lambda x: comparisons.one_label(x) * (1 - 0.1 * comparisons.two_labels(x))},
        "labels exchanged": {"stated": lambda x: 1 - comparisons.two_labels(x)},
    },
    "T-HKK": {"as stated, most cells empty": {"stated": comparisons.sum_of_hou}},
    "T-LLA": {"m^-½": {"stated": lambda size: size**-0.5, "dimensions": (1,)}},
    "A-P4.1": {
        "γ × 0.9": {"stated": lambda layer, c: replace(layer.scaled(c), gamma=0.9 * layer.gamma)},
        "c < 0": {"stated": lambda layer, c: layer.scaled(-c)},
        "γ/c": {"stated": symmetry.scale_and_divide_gamma},
    },
    "A-P4.1-gamma": {"γ × 0.9": {"stated": lambda layer, c: replace(layer.scaled(c), gamma=0.9 * layer.gamma)}},
    "A-S4.1-group": {"2N": {"stated": lambda layers, neurons: 2 * neurons}},
    "A-S9.1-bias": {"statistics held": {"statistics": "fixed"}, "mean removes 0.9 of it": {"removed": 0.9}},
    "A-C4.1.1": {
        "one weight × 0.9": {
            "stated": lambda weight, bias: (weight * (1 - 0.1 * torch.eye(*weight.shape, dtype=weight.dtype)), bias)
        },
        "squares": {"stated": lambda weight, bias: (weight**2, bias)},
    },
    "A-P4.2": {
        "bias × 0.9": {"stated": lambda layer, c: replace(layer.scaled(c), bias=0.9 * c * layer.bias)},
        "one scale per neuron": {"stated": lambda layer, c: layer.scaled(c * torch.arange(1.0, 5.0, dtype=torch.float64))},
        "c < 0": {"stated": lambda layer, c: layer.scaled(-c)},
    },
    "A-P4.3": {"g × 0.9": {"stated": lambda v, g, c: (c * v, 0.9 * g)}, "g·α": {"stated": lambda v, g, c: (c * v, g * c)}},
    "A-Tab1": {"2 + d for all": {"stated": lambda kind, inputs: 2 + inputs}},
    "A-Eq1": {"sign": {"stated": times(derivatives.backward_with_gamma, -1)}},
    "A-A.1.1-end": {"no γ": {"stated": derivatives.backward_without_gamma}},
    "A-A.1.1-W": {"γ²": {"stated": lambda d, z, x, gamma: derivatives.weight_gradient(d, z, x, gamma**2)}},
    "A-LN-backward": {"γ²": {"stated": lambda d, z, g: derivatives.right_layer_norm_backward(d, z, g**2)}},
    "A-WN-3.2": {"as printed": {"stated": derivatives.without_cross_terms}},
    "A-WN-4.3": {"as printed": {"stated": derivatives.with_spare_norm}},
    "A-WN-radial": {"0.9 of what is printed": {"stated": lambda g, of_g: 0.9 * g * of_g}},
    "A-A.1.2": {"1 − m along ẑ": {"stated": lambda z, gamma: torch.linalg.eigvalsh(derivatives.printed_hessian(z, gamma))}},
    "A-A.1.2-gradient": {"zero": {"stated": derivatives.zero_gradient}},
    "A-S3.2-flat": {"one weight × 0.9": {"stated": lambda w: torch.cat([0.9 * w[:1], w[1:]])}},
    "A-S3.2-eigen": {"sign": {"stated": lambda slope, w: slope}},
    "A-S7.1": {"ρ²": {"stated": lambda correlation, u: conditioning.variance_of_correlated(correlation**2, u)}},
    "A-metric": {
        "no yᵀy": {"stated": lambda y, first, second: first @ second},
        "‖y‖ once": {"stated": lambda y, first, second: first @ second / y.norm()},
        "one entry × 0.9": {"stated": lambda y, first, second: first @ second / (y @ y - 0.1 * y[0].abs())},
    },
    "A-grad-scale": {"gradient as 1/‖w‖²": {"stated": (2.0, 2.0)}, "curvature as 1/‖w‖": {"stated": (1.0, 1.0)}},
    "A-L5.1-LN": {
        "‖W‖² + 0.9‖b‖²": {"stated": lambda weight, bias: (weight.square().sum() + 0.9 * bias.square().sum()).sqrt()},
        "bias alone": {"stated": lambda weight, bias: bias.norm()},
    },
    "A-R5.1": {"statistics of the data": {"statistics": "data"}, "σ^0.9": {"power": 0.9}},
    "A-S7.1-rate": {
        "√κ": {"stated": lambda condition, epsilon: theory.condition_times_logarithm(condition**0.5, epsilon)},
        "1 + ln 1/ε": {"stated": lambda condition, epsilon: condition + theory.condition_times_logarithm(1.0, epsilon)},
    },
    "A-S7.2-norms": {"as printed": {"stated": discussion.sum_of_norms}},
    "A-S9.2-noise": {"statistics of the data": {"statistics": "data"}, "σ^0.9": {"power": 0.9}},
    "A-S9.3-shift": {"mean 0.1": {"stated": (0.1, 1.0)}},
    "A-S9.5-tangent": {"one weight × 0.9": {"stated": lambda w: torch.cat([0.9 * w[:1], w[1:]])}},
    "A-S5.1-saddle": {"1/m²": {"stated": lambda size: size**-2.0}, "no push": {"stated": lambda size: 0.0}},
    "A-S9.5-clipping": {"one weight × 0.9": {"stated": lambda start, plain: torch.cat([0.9 * plain[:1], plain[1:]])}},
    "A-S9.5-free": {"gain 0.9": {"gain": 0.9}, "gain 1.1": {"gain": 1.1}},
    "A-S9.5-training": {
        "deviation, not variance": {"stated": lambda size, share: size**share},
        "hidden layers keep 1": {"stated": lambda size, share: size**2 if share == 1 else 1.0},
    },
    "A-S4.3-fisher": {"one weight × 0.9": {"stated": lambda w: torch.cat([0.9 * w[:1], w[1:]])}},
    "L-explosion": {"2^depth": {"stated": lambda depth: 2.0**depth}},
    "O-floor-BN": {"n_K, no root": {"stated": lambda last, trace: len(last) / trace.sqrt()}},
    "O-affine": {"√n_K": {"stated": lambda last, trace: (len(last) / trace).sqrt()}},
    "O-floor-LN": {"√n_K/‖x‖ with γ": {"stated": lambda output, x: len(output) ** 0.5 / x.norm()}},
    "O-small-variance": {"‖S⁻¹W‖/2": {"stated": lambda w, s, epsilon: torch.linalg.matrix_norm(w / s[:, None], 2) / 2}},
    "O-residual": {"1 + ½ℓ/σ": {"stated": lambda ratios: torch.stack([1 + ratio / 2 for ratio in ratios]).prod()}},
    "O-depth": {"log depth": {"stated": lambda branch, growth, depth: 1 + float(torch.tensor(depth).log())}},
    "O-batch-noise": {
        "no bias": {"stated": lambda m, slope, random: (slope, noise.mean_and_variance(m, slope, random)[1])},
        "variance/m": {"stated": lambda m, slope, random: (noise.shrinkage(m) * slope, (slope**2 + random**2) / m)},
        "variance × 0.9": {
            "stated": lambda m, slope, random: (noise.shrinkage(m) * slope, 0.9 * noise.mean_and_variance(m, slope, random)[1])
        },
    },
    "T-F1": {"the product is 10^50": {"stated": figures.inflated}},
    "T-F2": {"training goes backwards": {"stated": figures.backwards}},
    "T-F1-resnet18": {"the product is 10^50": {"stated": figures.inflated}},
    "T-F2-resnet18": {"training goes backwards": {"stated": figures.backwards}},
    "T-F3": {"1/σ amplifies": {"stated": figures.grow_but_amplify}},
    "T-S5.2-guide": {"penalty and none exchanged": {"stated": figures.unpenalized}},
    "T-S-data": {"saves no more when deeper": {"stated": figures.saves_no_more_when_deeper}},
    **{
        f"A-{name}": {"normalizer and none exchanged": {"stated": exchanged}}
        for name in ("E1", "E2", "E3", "E4", "noise", "large-lr", "smooth", "S6-others", "S7.3-decay")
    },
}
NO_FORMULA = {  # `stated` is not a number or vector whose size matters: the tables hold their mutants of scale
    "A-P4.1", "A-P4.1-gamma", "A-S9.1-bias", "A-C4.1.1", "A-P4.2", "A-P4.3", "A-S3.2-flat", "A-R5.1", "A-S4.3-fisher", "A-metric",
    "A-S9.2-noise", "A-S9.5-tangent",
    "T-D4", "T-C22-labels", "A-WN-radial", "A-L5.1-LN",
}  # fmt: skip


def base(claim: Claim) -> Changes:
    """The statement that mutants change: as it stands, or mended."""
    return MENDED.get(claim.id, {})


def mutants(claim: Claim) -> Iterator[tuple[str, bool, Changes]]:
    """(name, whether of scale, changes) of a claim."""
    formula = base(claim).get("stated", _default(claim))
    if claim.form.quantifier != OBSERVED and claim.id not in NO_FORMULA:
        for factor in FACTORS:
            yield f"× {factor:g}", True, {**base(claim), "stated": _scaled(formula, factor)}
    if claim.id == "T-D4":
        yield "ReLU × 1.1", True, {"stated": stretched("ReLU", 1.1)}
    for name, changes in OTHERS.get(claim.id, {}).items():
        yield name, "0.9" in name, changes


def fates(claim: Claim, seed: int = 0) -> list[Fate]:
    """What becomes of every mutant of a claim."""
    before = unchanged(claim.id, seed)
    return [Fate(claim.id, name, scale, before, claim.run(seed, **changes).outcome) for name, scale, changes in mutants(claim)]


@cache
def unchanged(id: str, seed: int) -> Ruling:
    """The outcome of the statement that mutants change."""
    claim = load()[id]
    return claim.run(seed, **base(claim)).outcome


def _default(claim: Claim) -> Any:
    parameter = inspect.signature(claim.check).parameters.get("stated")
    return None if parameter is None else parameter.default


def _scaled(formula: Any, factor: float) -> Any:
    if callable(formula):
        return times(formula, factor)
    return tuple(factor * part for part in formula) if isinstance(formula, tuple) else factor * formula


def report(claims: Mapping[str, Claim], seed: int, progress: Callable[[str, int, int], None]) -> Iterator[str]:
    """One line per mutant, with the reason where it survives; then how many were killed, and what survives without a reason."""
    killed = 0
    survivors: dict[str, list[Fate]] = {}
    for done, claim in enumerate(claims.values()):
        progress(claim.id, done, len(claims))
        found = fates(claim, seed)
        killed += sum(fate.killed for fate in found)
        for fate in found:
            why = "" if fate.killed else reason(fate, found)
            survivors.setdefault(why, []).append(fate)
            yield f"{fate} ({why})" if why else str(fate)
    del survivors[""]
    yield f"{killed} mutants killed; " + "; ".join(f"{len(group)} survive, {why}" for why, group in survivors.items())
    left = [f"{fate.id} {fate.mutant}" for fate in survivors.get(UNEXPLAINED, [])]
    yield f"survive without a reason: {', '.join(left) or 'none'}"


UNEXPLAINED = "unexplained"


def reason(fate: Fate, found: Sequence[Fate]) -> str:
    """Why a mutant survives: a bound that no instance reaches, or a weaker statement than one that does hold."""
    if fate.blunt:
        return "not sharp here"
    if fate.scale and any(other.scale and other.killed for other in found):
        return "weaker than what holds; its counterpart is killed"
    return UNEXPLAINED
