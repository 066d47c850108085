"""Floors: what normalization cannot do. Theorems 1, 2, 3 and 5 of docs/laws.md, attacked by descent in the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from normscope.claims.calculus import Map, normal, random_weights, scalar, spectral_norm
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, lower_bound, upper_bound

WIDTHS = ((3, 3), (4, 6, 2), (2, 8, 8, 5), (5, 5, 5, 5, 5, 5))
ACTIVATIONS: dict[str, Map] = {"ReLU": torch.relu, "tanh": torch.tanh, "identity": lambda x: x}
STEPS, RATE = 40, 0.05  # of the descent that looks for a product below the floor


@dataclass(frozen=True)
class Chain:
    """Linear → BN or LN → activation, with γ and β per layer."""

    weights: list[Tensor]
    gammas: list[Tensor]
    betas: list[Tensor]
    activation: Map

    @property
    def ones(self) -> Chain:
        """The same with γ = 1 and β = 0."""
        return Chain(self.weights, [torch.ones_like(g) for g in self.gammas], [0 * b for b in self.betas], self.activation)


def batch_norm_chain(network: Chain, data: Tensor) -> tuple[Tensor, Tensor]:
    """∏‖Γ_kD_k⁻¹W_k‖ with the statistics of the data at ε = 0, and what the last BN returns."""
    product, output = scalar(1.0), data
    for k, (weight, gamma, beta) in enumerate(zip(network.weights, network.gammas, network.betas, strict=True)):
        values = (network.activation(output) if k else output) @ weight.T
        deviation = values.std(0, correction=0)
        product = product * spectral_norm((gamma / deviation)[:, None] * weight)
        output = gamma * (values - values.mean(0)) / deviation + beta
    return product, output


def layer_norm_chain(network: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    """∏‖Γ_kPW_k‖/σ_k(x) at ε = 0, and what the last LN returns; β as in the chain."""
    product, output = scalar(1.0), x
    for k, (weight, gamma, beta) in enumerate(zip(network.weights, network.gammas, network.betas, strict=True)):
        values = weight @ (network.activation(output) if k else output)
        deviation = values.std(correction=0)
        product = product * spectral_norm(gamma[:, None] * (weight - weight.mean(0))) / deviation
        output = gamma * (values - values.mean()) / deviation + beta
    return product, output


def descended(network: Chain, value: Callable[[Chain], Tensor]) -> Chain:
    """The chain after a descent of the value in its weights, as far as the value stays finite (no layer dies)."""
    weights = [weight.clone().requires_grad_() for weight in network.weights]
    optimizer, last = torch.optim.Adam(weights, RATE), network.weights
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = value(Chain(weights, network.gammas, network.betas, network.activation))
        if not bool(found.isfinite()):
            break
        last = [weight.detach().clone() for weight in weights]
        found.log().backward()
        optimizer.step()
    return Chain(last, network.gammas, network.betas, network.activation)


def chains(generator: torch.Generator) -> Iterator[tuple[str, Chain]]:
    for widths in WIDTHS:
        for name, activation in ACTIVATIONS.items():
            gammas = [normal(generator, width) for width in widths[1:]]
            betas = [normal(generator, width) for width in widths[1:]]
            yield f"{name} chain {widths}", Chain(random_weights(widths, generator), gammas, betas, activation)


def of_one_direction(widths: Sequence[int]) -> Chain:
    """W_k of ones and no bend: on data along a line every unit is the same, and the floor is reached."""
    weights = [torch.ones(rows, columns, dtype=torch.float64) for columns, rows in pairwise(widths)]
    ones = [torch.ones(width, dtype=torch.float64) for width in widths[1:]]
    return Chain(weights, ones, [0 * one for one in ones], lambda x: x)


def batch_norm_cases(generator: torch.Generator, affine: bool, floor: Callable[[Tensor, Tensor], Tensor]) -> list[Case]:
    """Products, and quotients of data points, against the floor: at random weights and after a descent of the product."""
    cases = []
    line = normal(generator, 50, 1)
    for name, network in [("line, weights of ones (1, 6, 3)", of_one_direction((1, 6, 3))), *chains(generator)]:
        network = network if affine else network.ones
        data = line if name.startswith("line") else normal(generator, 50, network.weights[0].shape[1])
        trace, last = data.var(0, correction=0).sum(), network.gammas[-1]
        low = descended(network, partial(_product, batch_norm_chain, data))
        for state, chain in (("random weights", network), ("after descent", low)):
            product, output = batch_norm_chain(chain, data)
            quotient = (torch.pdist(output) / torch.pdist(data)).max()
            cases.append(Case(f"{name}, {state}, product", floor(last, trace), product))
            cases.append(Case(f"{name}, {state}, steepest pair", floor(last, trace), quotient))
    return cases


@claim("O-floor-BN")
def floor_of_batch_norm(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda last, trace: (len(last) / trace).sqrt()
) -> Ruling:
    """tr Cov y = ½E‖y − y'‖² ≤ L²·½E‖x − x'‖², and what BN returns has tr Cov = n_K; the product bounds L.

    Random chains with three activations, then a descent of the product in all weights. Reached on data along a line. stated: of
    the last γ (here 1) and tr Cov x.
    """
    return lower_bound(batch_norm_cases(generator, False, stated))


@claim("O-affine")
def floor_with_affine_parameters(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda last, trace: last.norm() / trace.sqrt()
) -> Ruling:
    """As O-floor-BN with random γ of both signs and random β in every layer: tr Cov of what the last BN returns is ‖γ_K‖²."""
    return lower_bound(batch_norm_cases(generator, True, stated))


@claim("O-floor-LN")
def floor_of_layer_norm(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda output, x: output.norm() / x.norm()
) -> Ruling:
    """‖Γ_kz_k‖ = ‖Γ_kPW_kh_{k−1}‖/σ_k ≤ (‖Γ_kPW_k‖/σ_k)‖h_{k−1}‖ and ‖h_{k−1}‖ ≤ ‖Γ_{k−1}z_{k−1}‖: the product telescopes.

    Random chains and points, then a descent of the product. Reached by one layer with W = I − 11ᵀ/n at a centred x. With a bias it
    is false: W = 0.01·I, b = (1, −1, 1, −1), x = e₁ has ‖W‖/σ = 0.01 where the floor is 2 (evidence).
    """
    cases = []
    centring = torch.eye(4, dtype=torch.float64) - 0.25
    one = [torch.ones(4, dtype=torch.float64)]
    single = Chain([centring], one, [0 * one[0]], torch.relu)
    x = centring @ normal(generator, 4)
    cases.append(Case("one layer, W = I − 11ᵀ/n", stated(layer_norm_chain(single, x)[1], x), layer_norm_chain(single, x)[0]))
    for name, network in chains(generator):
        network = Chain(network.weights, network.gammas, network.ones.betas, network.activation)
        x = normal(generator, network.weights[0].shape[1])
        low = descended(network, partial(_product, layer_norm_chain, x))
        for state, chain in (("random weights", network), ("after descent", low)):
            product, output = layer_norm_chain(chain, x)
            if bool(output.isfinite().all()):
                cases.append(Case(f"{name}, {state}", stated(output, x), product))
    biased = torch.tensor([1.01, -1.0, 1.0, -1.0], dtype=torch.float64)
    return lower_bound(cases, **{"‖W‖/σ with a bias, floor 2": 0.01 / float(biased.std(correction=0))})


@claim("O-small-variance")
def gain_of_small_variance(
    generator: torch.Generator,
    stated: Callable[[Tensor, Tensor, float], Tensor] = lambda weight, deviations, epsilon: torch.minimum(
        spectral_norm(weight / deviations[:, None]), spectral_norm(weight) / epsilon**0.5
    ),
) -> Ruling:
    """(S² + ε)^-½ is at most S⁻¹ and at most ε^-½, entry by entry. W → cW for c from 1e-6 to 1e6: the gain rises from c‖W‖/√ε to
    ‖S⁻¹W‖. Below σ² ≈ ε capacity falls linearly with the weights, whatever the data; above, scale does not count."""
    cases, epsilon = [], 1e-5
    for outputs, inputs in ((1, 3), (4, 4), (16, 5)):
        weight, data = normal(generator, outputs, inputs), normal(generator, 60, inputs)
        for exponent in range(-6, 7, 2):
            scaled = 10.0**exponent * weight
            deviations = (data @ scaled.T).std(0, correction=0)
            gain = spectral_norm(scaled / (deviations**2 + epsilon).sqrt()[:, None])
            cases.append(Case(f"{outputs} units, c = 1e{exponent}", stated(scaled, deviations, epsilon), gain))
    return upper_bound(cases)


def _product(chain_of: Callable[[Chain, Tensor], tuple[Tensor, Tensor]], x: Tensor, network: Chain) -> Tensor:
    return chain_of(network, x)[0]
