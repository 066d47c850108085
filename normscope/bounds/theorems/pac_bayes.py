"""PAC-Bayes (McAllester 1999; Langford & Seeger 2001; Maurer 2004) with Gaussian noise on the parameters.

For a prior P fixed before the data, with probability 1 − δ for all posteriors Q at once,

    kl(E_Q[error on D] ‖ E_Q[error on P]) ≤ (KL(Q‖P) + ln(2√m/δ))/m,

and by Pinsker's inequality E_Q[error] ≤ E_Q[error on D] + √((KL + ln(2√m/δ))/2m). Here Q = N(w, σ²I) with σ free, P = N(w₀, λ²I)
with w₀ zero or the initialization and λ on a grid, by a union bound, so that KL = d/2 (σ²/λ² − 1 − ln σ²/λ²) + ‖w − w₀‖²/2λ². The
error of Q on D is estimated from independent draws; a tenth of δ pays for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from normscope.bounds.bound import RANDOMIZED, Bound
from normscope.bounds.folding import folded
from normscope.bounds.grids import log_inverse_weight, on_grid, power_above
from normscope.bounds.losses import zero_one
from normscope.bounds.posterior import ErrorEstimate, GaussianPosterior, kl_inverse
from normscope.bounds.sample import leading
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.core.magnitude import Magnitude, Real, root_sum_square
from normscope.core.progress import shown
from normscope.core.twins import twin_of
from normscope.operators.dense import frobenius_norm

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "PAC-Bayes"
MOST_DRAWS, LEAST_DRAWS, NUMBERS = 1000, 100, 10**9  # independent draws of parameters: as many as so many random numbers make
CHUNK = 32  # samples that share a draw, at least
TRIED_SAMPLES, TRIED_CHUNK = 2048, 128  # of the training sample, for each σ tried
HALVINGS = 12  # σ tried, from twice the root mean square of w downwards
EXPONENT = 700.0  # whose exponential a float holds
SHARE_OF_DRAWS = 0.1  # of δ, for the estimate of E_Q[error on D]
PLACE = "the noise is on the parameters as they stand: not invariant under symmetries that change their scale"
CODE = "the model's code, with the numbers written in it, was fixed before the data; running statistics are counted as parameters"


def gaussian_kl(dimension: int, sigma: float, distance: float, prior: Magnitude) -> Magnitude:
    """KL(N(w, σ²I) ‖ N(w₀, λ²I)) = d/2 (σ²/λ² − 1 − ln σ²/λ²) + ‖w − w₀‖²/2λ²."""
    ratio = 2 * (math.log(sigma) - prior.log)  # ln σ²/λ²
    if ratio < -1:
        spread = Magnitude.from_log(ratio) + (-1 - ratio)
    else:  # e^x above e^x − 1 − x, where a float does not hold it
        spread = Magnitude(max(math.expm1(ratio) - ratio, 0.0)) if ratio < EXPONENT else Magnitude.from_log(ratio)
    return spread * (dimension / 2) + (Magnitude(distance) / prior) ** 2 / 2


def best_prior(dimension: int, sigma: float, distance: float) -> tuple[Magnitude, Magnitude, float]:
    """λ on the grid, KL and ln 1/weight of λ, such that KL + ln 1/weight is least.

    KL is least at λ² = σ² + ‖w − w₀‖²/d and convex in ln λ, and weights fall away from λ = 1: the best λ is between the two.
    """
    power = power_above(Magnitude(math.hypot(sigma, distance / math.sqrt(dimension))))
    between = range(min(power - 1, 0), max(power, 0) + 1)
    candidates = ((on_grid(k), gaussian_kl(dimension, sigma, distance, on_grid(k)), log_inverse_weight(k)) for k in between)
    return min(candidates, key=lambda found: found[1] + found[2])


def log_moment(size: int) -> float:
    """ln of 2√m (Maurer 2004), which bounds E e^{m kl} for m ≥ 8, and of m + 1 below (Langford 2005)."""
    return math.log(2 * math.sqrt(size) if size >= 8 else size + 1)


def mcallester(error: float, divergence: Magnitude, size: int, delta: float) -> Magnitude:
    """error + √((KL + ln(2√m/δ))/2m)."""
    return ((divergence + log_moment(size) + math.log(1 / delta)) / (2 * size)).sqrt() + error


def langford_seeger(error: float, divergence: Magnitude, size: int, delta: float) -> float:
    """The largest p with kl(error ‖ p) ≤ (KL + ln(2√m/δ))/m."""
    return kl_inverse(error, float((divergence + log_moment(size) + math.log(1 / delta)) / size))


def distance_between(model: nn.Module, prior: nn.Module | None) -> float:
    """‖w − w₀‖₂, w₀ = 0 without a prior."""
    others = dict(prior.named_parameters()) if prior is not None else {}
    if prior is not None and {n: p.shape for n, p in others.items()} != {n: p.shape for n, p in model.named_parameters()}:
        raise NotApplicable("the initial model has other parameters than the model")
    pairs = [(value.detach().double(), others.get(name)) for name, value in model.named_parameters()]
    return float(root_sum_square(frobenius_norm(value if other is None else value - other.detach()) for value, other in pairs))


def _drawn(posterior: GaussianPosterior, setting: Setting) -> ErrorEstimate:
    """The posterior's error on the sample, from whole passes over it with enough draws."""
    draws = max(LEAST_DRAWS, min(MOST_DRAWS, NUMBERS // posterior.dimension))
    chunk = max(CHUNK, setting.train.size // draws)
    errors: list[tuple[int, int]] = []
    with shown(f"{NAME}, draws", setting.progress, draws) as bar:
        for _ in range(draws):
            if len(errors) >= draws:
                break
            for counted in posterior.errors(setting.train.batches, chunk, setting.generator):
                errors.append(counted)
                bar.advance()
    return ErrorEstimate.of(errors)


@bounds_of(NAME)
def pac_bayes(setting: Setting) -> Iterator[Bound]:
    """For the error of the model under Gaussian noise on its parameters, σ the best of those tried."""
    own, model, size = setting.train.error, setting.folded, setting.train.size
    initial = None if setting.initial is None else folded(setting.initial, setting.example.kwargs or setting.example.args)
    twin = twin_of(model).to(next(value.dtype for value in setting.model.parameters() if value.is_floating_point()))
    dimension, distance = GaussianPosterior(twin, 0.0).dimension, distance_between(twin, initial)  # of what is drawn around
    if distance == 0:
        raise NotApplicable("the parameters are those of the prior")
    if distance == math.inf:
        raise NotApplicable("the distance of the parameters from the prior is beyond float64")

    def tried(sigma: float) -> Magnitude:
        """The bound as far as a few draws can tell."""
        batches = leading(setting.train.batches, TRIED_SAMPLES)
        error = ErrorEstimate.of(GaussianPosterior(twin, sigma).errors(batches, TRIED_CHUNK, setting.generator)).mean
        _, divergence, weight = best_prior(dimension, sigma, distance)
        return mcallester(error, divergence + weight, size, setting.delta)

    largest = 2 * (distance_between(twin, None) or distance) / math.sqrt(dimension)
    sigma = min((largest * 2**-i for i in range(HALVINGS)), key=tried)
    found = _drawn(GaussianPosterior(twin, sigma), setting)  # fresh draws: the choice of σ has not seen them
    error = found.upper(SHARE_OF_DRAWS * setting.delta)
    prior, divergence, weight = best_prior(dimension, sigma, distance)
    parts = {
        "error of Q on D at most": error, "error of Q on D, drawn": found.mean, "draws": found.draws, "σ": sigma,
        "λ": prior, "‖w − w₀‖": distance, "parameters": dimension, "error of h on D": own,
        "KL": divergence, "ln 1/weight of λ": weight, "m": size,
    }  # fmt: skip
    where = "the initialization, which is independent of the data" if initial is not None else "zero"
    assumptions = ["training samples are independent draws from P", f"the prior is centred at {where}", CODE, PLACE]
    forms: dict[str, Callable[..., Real]] = {"kl": langford_seeger, "McAllester": mcallester}
    for form, bound_of in forms.items():
        value = bound_of(error, divergence + weight, size, (1 - SHARE_OF_DRAWS) * setting.delta)
        yield setting.bound(f"{NAME} ({form})", value, RANDOMIZED, parts=parts, assumptions=assumptions, loss=zero_one())
