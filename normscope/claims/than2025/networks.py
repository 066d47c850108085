"""Than 2025, Sections 4.1 and 4.2: Lipschitz constants of networks with respect to their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log10

import torch
from torch import Tensor, nn

from normscope.claims.calculus import (
    ROUGH_EPSILON,
    Map,
    chain,
    fixed_batch_norms,
    layer_norms,
    normal,
    product,
    random_weights,
    scalar,
    scaled_identities,
    spectral_norm,
    spectral_product,
    standardize,
    steepness,
    uniform,
)
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, constant, implication, upper_bound

WIDTHS = ((4, 4, 4), (6, 8, 5, 3), (3, 10, 2, 7, 4), (5, 5, 5, 5, 5, 5))
POINTS = 20  # random inputs a network

Weights = Sequence[Tensor]
Deviations = Sequence[Tensor]  # √(σ² + ε) of each BN, one number per channel


def steepest(function: Map, points: Sequence[Tensor] | Tensor) -> Tensor:
    """The largest ‖∂function/∂x‖ at the points: a lower bound on the constant."""
    return torch.stack([steepness(function, x) for x in points]).max()


def inputs(width: int, generator: torch.Generator) -> list[Tensor]:
    """Random inputs and the one whose entries are all 1, at which no unit of an extremal network is off."""
    return [torch.ones(width, dtype=torch.float64), *(normal(generator, width) for _ in range(POINTS))]


def random_and_extremal(widths: Sequence[int], generator: torch.Generator) -> dict[str, list[Tensor]]:
    """Weights that are random, and those of Theorem 6 with random factors."""
    factors = uniform(generator, 0.3, 3, len(widths) - 1).tolist()
    return {
        f"random network {widths}": random_weights(widths, generator),
        f"extremal network {widths}": scaled_identities(factors, widths),
    }


NAMED_ACTIVATIONS: dict[str, Map] = {
    "ReLU": torch.relu,
    "leaky ReLU": nn.functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=-1),
}
STEEPER_ACTIVATIONS: dict[str, Map] = {"SiLU": nn.functional.silu, "GELU": nn.functional.gelu, "Mish": nn.functional.mish}


@claim("T-D4")
def activation_slopes(generator: torch.Generator, stated: Mapping[str, Map] = NAMED_ACTIVATIONS) -> Ruling:
    """Jacobians on a fine grid from −6 to 6, where two logits are equal, and at random points of several scales.

    It holds for the five that are named. SiLU, which Figure 3's EfficientNet is built of, GELU and Mish exceed 1, so that the
    theorems do not cover networks with them: each such layer adds a factor. stated: the activations.
    """
    grid = torch.linspace(-6, 6, 481, dtype=torch.float64)
    points = [grid, torch.zeros(2, dtype=torch.float64), *(scale * normal(generator, 8) for scale in (0.1, 1.0, 10.0))]
    cases = [Case(name, scalar(1.0), steepest(activation, points)) for name, activation in stated.items()]
    others = {f"constant of {name}": float(steepest(activation, points)) for name, activation in STEEPER_ACTIVATIONS.items()}
    return upper_bound(cases, **others)


@claim("T-L5")
def product_bound(generator: torch.Generator, stated: Callable[[Weights], Tensor] = spectral_product) -> Ruling:
    """The chain rule: each factor of the Jacobian has norm at most ‖W_k‖, for slopes are at most 1.

    Tried on random networks and on the members of Theorem 6, which reach it. It is about chains, see T-L5-residual.
    """
    return upper_bound(
        [
            Case(name, stated(weights), steepest(partial(chain, weights), inputs(widths[0], generator)))
            for widths in WIDTHS
            for name, weights in random_and_extremal(widths, generator).items()
        ]
    )


def product_of_blocks(weights: Weights) -> Tensor:
    """∏(1 + ‖W_k‖), the bound for residual blocks."""
    return product([1 + spectral_norm(weight) for weight in weights])


@claim("T-L5-residual")
def residual_product(generator: torch.Generator, stated: Callable[[Weights], Tensor] = spectral_product) -> Ruling:
    """K residual blocks x ↦ x + W_k x: with W_k = 2I the Jacobian is 3^K I, and ∏‖W_k‖ is 2^K; then random small W_k."""
    cases = []
    for depth in (2, 4, 8):
        for name, weights in (
            ("W = 2I", scaled_identities([2.0] * depth, [3] * (depth + 1))),
            ("small random W", [0.2 * weight for weight in random_weights([5] * (depth + 1), generator)]),
        ):
            true = steepness(partial(_residual, weights), normal(generator, weights[0].shape[1]))
            cases.append(Case(f"{depth} blocks, {name}", stated(weights), true, product_of_blocks(weights)))
    return implication(cases, {})


def product_of_factors(factors: Sequence[float]) -> Tensor:
    """∏a_k."""
    return product(factors)


@claim("T-T6")
def every_constant_is_taken(generator: torch.Generator, stated: Callable[[Sequence[float]], Tensor] = product_of_factors) -> Ruling:
    """W_k = a_k[I 0] gives h(x) = ∏a_k · relu(x) truncated: constant ∏a_k, taken at positive x; some a_k are zero, some large."""
    cases = []
    for widths in WIDTHS:
        for low, high in ((0.0, 0.5), (0.5, 10.0), (0.0, 0.0)):
            factors = uniform(generator, low, high, len(widths) - 1).tolist()
            true = steepest(partial(chain, scaled_identities(factors, widths)), inputs(widths[0], generator))
            cases.append(Case(f"widths {widths}, a in [{low}, {high}]", stated(factors), true))
    return constant(cases)


@dataclass(frozen=True)
class BatchNormNetwork:
    """A network with BN of fixed statistics after every weight, and the steepest Jacobian that was found."""

    name: str
    weights: list[Tensor]
    deviations: list[Tensor]
    steepest: Tensor


def batch_norm_networks(widths_of_networks: Sequence[Sequence[int]], generator: torch.Generator) -> Iterator[BatchNormNetwork]:
    """Random and extremal networks with variances over four orders of magnitude."""
    for widths in widths_of_networks:
        deviations = [10 ** uniform(generator, -1, 1, width) for width in widths[1:]]
        for name, weights in random_and_extremal(widths, generator).items():
            network = partial(chain, weights, normalizers=fixed_batch_norms(deviations))
            yield BatchNormNetwork(f"{name} with BN", weights, deviations, steepest(network, inputs(widths[0], generator)))


def weights_and_constants(weights: Weights, deviations: Deviations) -> Tensor:
    """∏‖W_k‖ ∏‖NO_k‖ with the exact constant max 1/√(σ² + ε) of each BN."""
    return spectral_product(weights) * product([(1 / deviation).max() for deviation in deviations])


@claim("T-T9")
def normalized_product_bound(
    generator: torch.Generator, stated: Callable[[Weights, Deviations], Tensor] = weights_and_constants
) -> Ruling:
    """The chain rule once more, with the exact constants max_k 1/√(σ_k² + ε) of the normalizers; reached at width 1."""
    networks = batch_norm_networks([*WIDTHS, (1, 1, 1)], generator)
    return upper_bound([Case(network.name, stated(network.weights, network.deviations), network.steepest) for network in networks])


def weights_and_norms(weights: Weights, deviations: Deviations) -> Tensor:
    """∏‖W_k‖ ∏‖1/σ_k‖₂."""
    return spectral_product(weights) * product([(1 / deviation).norm() for deviation in deviations])


def weights_and_powers(weights: Weights, deviations: Deviations) -> Tensor:
    """σ^-K ∏‖W_k‖ with σ = min_k 1/‖1/σ_k‖."""
    least = torch.stack([1 / (1 / deviation).norm() for deviation in deviations]).min()
    return spectral_product(weights) * least ** -len(weights)


@claim("T-C10")
def batch_norm_network_bound(
    generator: torch.Generator,
    stated: Callable[[Weights, Deviations], Tensor] = weights_and_norms,
    power_form: Callable[[Weights, Deviations], Tensor] = weights_and_powers,
) -> Ruling:
    """Theorem 9 with Lemma 1's constants, in both forms, for layers of more than one unit."""
    cases = []
    for network in batch_norm_networks(WIDTHS, generator):
        sharp = weights_and_constants(network.weights, network.deviations)
        for form, bound in (("product form", stated), ("power form", power_form)):
            value = bound(network.weights, network.deviations)
            cases.append(Case(f"{network.name}, {form}", value, network.steepest, sharp))
    return upper_bound(cases)


def calibrated_batch_norms(weights: Weights, data: Tensor) -> list[Map]:
    """BN layer by layer with the mean and the deviation of the data that reach it, ε = 0."""
    normalizers: list[Map] = []
    for weight in weights:
        data = data @ weight.T
        normalizers.append(partial(_standardized, data.mean(0), data.std(0, correction=0)))
        data = normalizers[-1](data).relu()
    return normalizers


def _standardized(mean: Tensor, deviation: Tensor, y: Tensor) -> Tensor:
    return (y - mean) / deviation


def falls_with_deviations(factor: float, layers: int) -> float:
    """c^-K where every σ_k has become c times as large."""
    return factor**-layers


@claim("T-C10-variance")
def variance_of_larger_weights(generator: torch.Generator, stated: Callable[[float, int], float] = falls_with_deviations) -> Ruling:
    """Random networks whose BN has the statistics of data: the steepest Jacobian before and after every weight is c times as large.

    stated: the factor that σ_k → cσ_k in all K layers brings, c^-K by Corollary 10 if nothing else changed.
    """
    cases, unchanged = [], 0.0
    for widths in WIDTHS:
        weights, data = random_weights(widths, generator), normal(generator, 64, widths[0])
        before = steepest(partial(chain, weights, normalizers=calibrated_batch_norms(weights, data)), data[:POINTS])
        for factor in (3.0, 100.0):
            larger = [factor * weight for weight in weights]
            after = steepest(partial(chain, larger, normalizers=calibrated_batch_norms(larger, data)), data[:POINTS])
            what = f"network {widths}, every weight × {factor:g}, so every σ × {factor:g}"
            cases.append(Case(what, stated(factor, len(weights)) * before, after))
            unchanged = max(unchanged, abs(float(after / before) - 1))
    return implication(cases, {"largest change of the constant": unchanged})


def weights_and_least_deviations(weights: Weights, epsilon: float) -> Tensor:
    """∏‖W_k‖ ∏1/σ_k where σ_k = √ε, the least over all inputs."""
    return spectral_product(weights) * epsilon ** (-len(weights) / 2)


@claim("T-C11")
def layer_norm_network_bound(
    generator: torch.Generator, stated: Callable[[Weights, float], Tensor] = weights_and_least_deviations
) -> Ruling:
    """Theorem 9 with Lemma 2's constants, near 0 too, where features are almost equal: the least σ over all inputs is √ε.

    Reached by one layer. With that σ the product is ε^-K/2, which reduces nothing: to reduce, σ must be meant on a region.
    """
    cases = []
    for widths in ((4, 4), *WIDTHS):
        for name, weights in random_and_extremal(widths, generator).items():
            points = inputs(widths[0], generator)
            network = partial(chain, weights, normalizers=layer_norms(len(weights)))
            true = steepest(network, [*points, *(1e-3 * x for x in points)])
            cases.append(Case(f"{name} with LN", stated(weights, ROUGH_EPSILON), true))
    return upper_bound(cases)


@claim("T-C11-reduction")
def layer_norm_reduction(generator: torch.Generator, stated: Callable[[float], float] = lambda epsilon: 1.0) -> Ruling:
    """σ of Lemma 2 is a minimum over ℝⁿ: at x = (t, …, t) the variance is 0, so σ = √ε and 1/σ = ε^-½ per layer.

    Random LN networks: the steepest Jacobian near such points against P_w, which a reduction would stay below. stated: the
    factor of P_w that LN brings at most, of ε. At ε = 1e-5 and K = 10 Corollary 11 is 10^25 P_w.
    """
    cases = []
    for epsilon in (1e-2, 1e-4):
        for width in (3, 8):
            weight = scaled_identities([1.0], [width, width])
            network = partial(chain, weight, normalizers=[partial(standardize, axis=-1, epsilon=epsilon)])
            points = [1 + 1e-6 * normal(generator, width) for _ in range(POINTS)]
            what = f"one LN layer of {width}, W = I, ε = {epsilon:g}, x near (1, …, 1)"
            cases.append(Case(what, stated(epsilon) * spectral_product(weight), steepest(network, points)))
    return implication(cases, {"log10 of ε^(−K/2) at ε = 1e-5, K = 10": -5 * log10(1e-5)})


@claim("T-headline")
def headline_numbers(
    generator: torch.Generator, stated: Callable[[float, float], float] = lambda weights, normalizers: 10.0
) -> Ruling:
    """Theorem 9 multiplies: log10 of the bound is 50 − 25. stated: log10 of what would pass as bounded; 10 is generous."""
    weights, normalizers = 50.0, -25.0
    claimed = scalar(stated(weights, normalizers))
    return implication([Case("ResNet-18, log10 of the bound by the paper's numbers", claimed, scalar(weights + normalizers))], {})


def _residual(weights: Weights, x: Tensor) -> Tensor:
    for weight in weights:
        x = x + weight @ x
    return x
