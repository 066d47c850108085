"""Than 2025, Section 4.3: Lipschitz constants and gradients with respect to the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from normscope.claims.calculus import (
    Map,
    chain,
    fixed_batch_norms,
    gradient,
    normal,
    product,
    random_weights,
    scaled_identities,
    spectral_norm,
    steepness,
    truncated,
    uniform,
)
from normscope.claims.ledger import THAN, claim
from normscope.claims.than2025.networks import WIDTHS, Deviations, Weights, product_of_factors
from normscope.claims.verdicts import Case, Outcome, constant, identity, implication, upper_bound

SAMPLES = 12  # of Theorem 15's training set
READOUT = 0.1  # its c
HIDDEN_CONSTANT = 1e-3  # of Ω, below which a gradient is not of the stated size


def product_from(weights: Weights, deviations: Deviations, i: int) -> Tensor:
    """(7): ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖, layers counted from 0."""
    return product([*map(spectral_norm, weights[i + 1 :]), *((1 / deviation).max() for deviation in deviations[i:])])


@claim("T-T12", THAN, "Theorem 12", "‖h, W_i‖_Lip ≤ A_{i-1}‖h, y_i‖_Lip and ‖h, y_i‖_Lip ≤ ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖_Lip.")
def weight_sensitivity(generator: torch.Generator, stated: Callable[[Weights, Deviations, int], Tensor] = product_from) -> Outcome:
    """y_i = W_i h_{i-1} is linear in W_i with constant ‖h_{i-1}‖, and what follows y_i is a chain.

    Jacobians in W_i and in y_i, all layers, positive weights and inputs so that units are on. The statistics of BN are held fixed
    while W_i moves, and A_{i-1} is finite only where inputs are bounded. Reached at width 1.
    """
    cases = []
    for widths in ((1, 1, 1), *WIDTHS):
        deviations = [10 ** uniform(generator, -1, 1, width) for width in widths[1:]]
        normalizers = fixed_batch_norms(deviations)
        weights = [weight.abs() for weight in random_weights(widths, generator)]
        x = normal(generator, widths[0]).abs()
        for i, weight in enumerate(weights):
            features = chain(weights[:i], x, normalizers[:i])
            later, bound = (weights[i + 1 :], normalizers[i:]), stated(weights, deviations, i)
            of_input = steepness(partial(_from_total_input, *later), weight @ features)
            of_weight = steepness(partial(_from_weight, *later, features), weight)
            cases.append(Case(f"widths {widths}, layer {i + 1}, with respect to y", bound, of_input))
            cases.append(Case(f"widths {widths}, layer {i + 1}, with respect to W", features.norm() * bound, of_weight))
    return upper_bound(cases)


@dataclass(frozen=True)
class Member:
    """A network of Theorem 13: W_i free, then W_j = a_j[I 0] for the layers after it; h_{i-1} and W_i are positive."""

    widths: tuple[int, ...]  # n_i, …, n_K
    factors: list[float]  # a_{i+1}, …, a_K
    weight: Tensor
    features: Tensor

    @property
    def later(self) -> list[Tensor]:
        return scaled_identities(self.factors, self.widths)

    @property
    def scale(self) -> Tensor:
        """∏a_j."""
        return product_of_factors(self.factors)

    def output(self, weight: Tensor) -> Tensor:
        """h as a function of W_i."""
        return chain([weight, *self.later], self.features)


def members(generator: torch.Generator) -> list[Member]:
    """Layers that narrow and widen, with more and with fewer features than outputs."""
    shapes: list[tuple[int, tuple[int, ...]]] = [(6, (4, 3, 5, 4)), (5, (4, 4)), (8, (6, 2, 4)), (3, (5, 7, 6))]
    return [
        Member(
            widths,
            uniform(generator, 0.3, 3, len(widths) - 1).tolist(),
            normal(generator, widths[0], before).abs(),
            normal(generator, before).abs(),
        )
        for before, widths in shapes
    ]


def truncated_norm(features: Tensor, widths: Sequence[int]) -> Tensor:
    """‖h_{i-1}^(n_{i+1},…,n_K)‖, Eq. (8)."""
    return truncated(features, widths).norm()


@claim(
    "T-T13", THAN, "Theorem 13, Eq. (8)", "Some member has ‖h, W_i‖_Lip = ∏a_j · ‖h_{i-1} truncated to (n_{i+1}, …, n_K)‖.",
    "The truncation acts on the rows of W_i, not on h_{i-1}: the constant is ∏a_j · ‖h_{i-1}(x)‖.",
)  # fmt: skip
def extremal_weight_constant(
    generator: torch.Generator, stated: Callable[[Tensor, Sequence[int]], Tensor] = truncated_norm
) -> Outcome:
    """h = ∏a_j · relu((W_i h_{i-1}) truncated): each row t of W_i that survives has gradient h_{i-1}ᵀ, whole.

    The paper's step from (58) to (59) truncates h_{i-1} instead of W_i h_{i-1}.
    """
    return constant(
        [
            Case(
                f"{len(member.features)} features, widths {member.widths}",
                member.scale * stated(member.features, member.widths[1:]),
                steepness(member.output, member.weight),
                member.scale * member.features.norm(),
            )
            for member in members(generator)
        ]
    )


@claim("T-T13-y", THAN, "Theorem 13, Eq. (9)", "The same member has ‖h, y_i‖_Lip = ∏_{j>i} a_j.")
def extremal_input_constant(
    generator: torch.Generator, stated: Callable[[Sequence[float]], Tensor] = product_of_factors
) -> Outcome:
    """h = ∏a_j · relu(y_i truncated), whose constant is ∏a_j, taken where y_i is positive."""
    return constant(
        [
            Case(
                f"widths {member.widths}",
                stated(member.factors),
                steepness(partial(chain, member.later), member.weight @ member.features),
            )
            for member in members(generator)
        ]
    )


def nothing_added(outputs: int) -> float:
    """The factor that the ℓ1 loss adds: 1."""
    return 1.0


@claim(
    "T-C14", THAN, "Corollary 14 and the line before it", "With the ℓ1 loss f, ‖f, W_i‖_Lip = ‖h, W_i‖_Lip.",
    "ℓ1 is √n_K-Lipschitz in ℓ2; for the extremal member the factor is √min(n_i, …, n_K).",
)  # fmt: skip
def loss_constant(generator: torch.Generator, stated: Callable[[int], float] = nothing_added) -> Outcome:
    """∂f/∂W_i = signᵀ ∂h/∂W_i, and a sign vector of n entries has norm √n; the label is chosen above every output."""
    cases = []
    for member in members(generator):
        of_network, of_loss = steepness(member.output, member.weight), gradient(partial(_absolute_error, member), member.weight)
        active = min(member.widths)
        cases.append(Case(f"widths {member.widths}", stated(active) * of_network, of_loss.norm(), active**0.5 * of_network))
    return constant(cases)


def extreme_gradient(scale: Tensor, slopes: Tensor, active: Tensor, features: Tensor, rows: int) -> Tensor:
    """(12): row t is (c∏a/m) Σ_x I_t (f∘g)'(u) h_{i-1}ᵀ for t ≤ min(n_{i+1}, …, n_K), else zero."""
    result = scale / len(features) * (slopes[:, None] * active).T @ features
    result[rows:] = 0
    return result


@claim(
    "T-T15", THAN, "Theorem 15, Eq. (12)",
    "Some member's training loss has row t of ∂L/∂W_i equal to (c∏a_j/m) Σ_x I_it (f∘g)'(u) h_{i-1}(x)ᵀ.",
)  # fmt: skip
def extreme_training_gradient(generator: torch.Generator, stated: Callable[..., Tensor] = extreme_gradient) -> Outcome:
    """The last layer is c·1ᵀ, those after layer i are a_j[I 0], g is tanh, f the squared error; against autograd."""
    cases = []
    for member in members(generator):
        weight = member.weight * normal(generator, *member.weight.shape).sign()
        features, labels = normal(generator, SAMPLES, weight.shape[1]).abs(), normal(generator, SAMPLES)
        network = partial(_from_weight, member.later, (), features)
        u = READOUT * network(weight).sum(1)
        slopes = 2 * (u.tanh() - labels) * (1 - u.tanh() ** 2)
        active = (features @ weight.T >= 0).double()
        claimed = stated(READOUT * member.scale, slopes, active, features, min(member.widths[1:]))
        cases.append(
            Case(f"widths {member.widths}", claimed, gradient(partial(_output_error, torch.tanh, network, labels), weight))
        )
    return identity(cases)


def grows_with_factors(growth: float) -> float:
    """∏a, Remark 16."""
    return growth


@claim(
    "T-R16", THAN, "Remark 16",
    "By Theorem 15 gradients are of size Ω(a_{i+1}⋯a_K), exponentially large, for any differentiable g.",
    "(12) also has the factor (f∘g)'(u), and u = c∏a·1ᵀv grows with ∏a: where g saturates, as tanh and the sigmoid do, the "
    "gradient falls exponentially in ∏a. With g the identity it grows as ∏a or faster.",
)  # fmt: skip
def size_of_extreme_gradients(
    generator: torch.Generator, stated: Callable[[float], float] = grows_with_factors, activation: Map = torch.tanh
) -> Outcome:
    """The members of Theorem 15 with ∏a from 1 to 1000, squared error: ‖∂L/∂W_i‖ over that at ∏a = 1. activation: g."""
    cases = []
    for member in members(generator):
        features, labels = normal(generator, SAMPLES, member.weight.shape[1]).abs(), normal(generator, SAMPLES)
        sizes = {}
        for growth in (1.0, 10.0, 1000.0):
            later = scaled_identities([growth ** (1 / len(member.factors))] * len(member.factors), member.widths)
            error = partial(_output_error, activation, partial(_from_weight, later, (), features), labels)
            sizes[growth] = gradient(error, member.weight).norm()
            claimed = HIDDEN_CONSTANT * stated(growth) * sizes[1.0]
            cases.append(Case(f"widths {member.widths}, ∏a = {growth:g} (size of ∂L/∂W)", claimed, sizes[growth]))
    return implication(cases, {"constant of Ω": HIDDEN_CONSTANT}, least=True)


def product_of_later_norms(norms: Sequence[float], i: int) -> Tensor:
    """s_{i+1}⋯s_K, layers counted from 0."""
    return product_of_factors(norms[i + 1 :])


@claim(
    "T-R17", THAN, "Remark 17 and the paragraph after Corollary 18",
    "The loss is O(s_{i+1}⋯s_K)-Lipschitz in W_i, so that deeper layers have smaller constants.",
    "The norms before layer i count as well, through ‖h_{i-1}‖ ≤ s_1⋯s_{i-1}‖x‖: the constant is up to ∏_{j≠i} s_j · ‖x‖, which "
    "for equal norms is the same in every layer. With normalizers it is right, for they bound ‖h_{i-1}‖.",
)  # fmt: skip
def constant_of_every_layer(
    generator: torch.Generator, stated: Callable[[Sequence[float], int], Tensor] = product_of_later_norms
) -> Outcome:
    """W_k = s_k I, unit input: the Jacobian in W_i is ∏_{k≠i} s_k times one of norm ‖x‖. The constant of O is 1."""
    cases = []
    for size in (2.0, 8.0):
        norms, width = [size] * 4, 3
        weights = scaled_identities(norms, [width] * 5)
        x = normal(generator, width).abs()
        x = x / x.norm()
        for i, weight in enumerate(weights):
            true = steepness(partial(_from_weight, weights[i + 1 :], (), chain(weights[:i], x)), weight)
            others = product_of_factors([*norms[:i], *norms[i + 1 :]])
            cases.append(Case(f"4 layers of norm {size:g}, W_{i + 1}", stated(norms, i), true, others))
    return upper_bound(cases)


def _from_total_input(later: Weights, normalizers: Sequence[Map], y: Tensor) -> Tensor:
    """The network from y_i on, its normalizer included."""
    return chain(later, normalizers[0](y).relu(), normalizers[1:])


def _from_weight(later: Weights, normalizers: Sequence[Map], features: Tensor, weight: Tensor) -> Tensor:
    """The network from W_i on."""
    return chain([weight, *later], features, normalizers)


def _absolute_error(member: Member, weight: Tensor) -> Tensor:
    """The ℓ1 loss with a label above every output."""
    return (1e3 - member.output(weight)).abs().sum()


def _output_error(activation: Map, network: Map, labels: Tensor, weight: Tensor) -> Tensor:
    """Mean of (g(c·1ᵀh_K) − label)²."""
    return (activation(READOUT * network(weight).sum(1)) - labels).square().mean()
