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
    layer_norms,
    normal,
    product,
    random_weights,
    scaled_identities,
    spectral_norm,
    steepness,
    truncated,
    uniform,
)
from normscope.claims.claim import claim
from normscope.claims.than2025.networks import WIDTHS, Deviations, Weights, product_of_factors
from normscope.claims.verdicts import Case, Ruling, constant, identity, implication, upper_bound

SAMPLES = 12  # of Theorem 15's training set
READOUT = 0.1  # its c


def product_from(weights: Weights, deviations: Deviations, i: int) -> Tensor:
    """(7): ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖, layers counted from 0."""
    return product([*map(spectral_norm, weights[i + 1 :]), *((1 / deviation).max() for deviation in deviations[i:])])


@claim("T-T12")
def weight_sensitivity(generator: torch.Generator, stated: Callable[[Weights, Deviations, int], Tensor] = product_from) -> Ruling:
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
class TheoremNetwork:
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


def members(generator: torch.Generator) -> list[TheoremNetwork]:
    """Layers that narrow and widen, with more and with fewer features than outputs."""
    shapes: list[tuple[int, tuple[int, ...]]] = [(6, (4, 3, 5, 4)), (5, (4, 4)), (8, (6, 2, 4)), (3, (5, 7, 6))]
    return [
        TheoremNetwork(
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


@claim("T-T13")
def extremal_weight_constant(
    generator: torch.Generator, stated: Callable[[Tensor, Sequence[int]], Tensor] = truncated_norm
) -> Ruling:
    """i = 1, so that h_0 = x is any input: the paper's members at x = (0, …, 0, 1) and at positive x.

    h = φ(W_1x) with φ positively homogeneous. If (9) holds with ∏a > 0, φ is no constant, and W_1e_n takes every direction: the
    constant in W_1 at x = e_n is that of φ, ∏a·‖x‖, where (8) says 0. So no member satisfies both. In the paper's
    members each surviving row t of W_1 has the gradient xᵀ, whole: step (58) to (59) truncates x instead of W_1x. For i ≥ 2 there
    is a member, with W_{i−1} = [I 0; 0 0]: evidence.
    """
    cases, rescued = [], 0.0
    for member in members(generator):
        last = torch.eye(len(member.features), dtype=torch.float64)[-1]
        for name, x in (("x = e_n", last), ("positive x", member.features)):
            true = steepness(partial(_linear_chain, member.later, x), member.weight)
            case_of = f"{len(x)} inputs, widths {member.widths}, {name}"
            cases.append(Case(case_of, member.scale * stated(x, member.widths[1:]), true, member.scale * x.norm()))
        kept = min(len(member.features), *member.widths[1:])
        features = member.features * (torch.arange(len(member.features)) < kept)
        true = steepness(partial(_from_weight, member.later, (), features), member.weight)
        rescued = max(rescued, abs(float(member.scale * truncated_norm(features, member.widths[1:]) / true) - 1))
    return constant(cases, least=False, **{"error of (8) for i = 2, rows of W_1 beyond the truncation 0": rescued})


@claim("T-T13-y")
def extremal_input_constant(generator: torch.Generator, stated: Callable[[Sequence[float]], Tensor] = product_of_factors) -> Ruling:
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


@claim("T-C14")
def loss_constant(generator: torch.Generator, stated: Callable[[int], float] = nothing_added) -> Ruling:
    """∂f/∂W_i = signᵀ ∂h/∂W_i, and a sign vector of n entries has norm √n; the label is chosen above every output."""
    cases = []
    for member in members(generator):
        of_network, of_loss = (
            steepness(member.output, member.weight),
            gradient(partial(_absolute_error, member.output), member.weight),
        )
        active = min(member.widths)
        cases.append(Case(f"widths {member.widths}", stated(active) * of_network, of_loss.norm(), active**0.5 * of_network))
    return constant(cases)


@claim("T-C14-11")
def loss_constant_of_member(
    generator: torch.Generator, stated: Callable[[Tensor, Sequence[int]], Tensor] = truncated_norm
) -> Ruling:
    """One output, so that f = |y − h| is as steep as h: members of Theorem 13 that end in width 1, at x = e_n and at positive x.

    (11) is said to follow from Theorem 13, whose member does not have it. Read with x first, some member does: W_K × ‖x
    truncated‖/‖x‖ (evidence).
    """
    cases, rescued = [], 0.0
    for member in members(generator):
        widths, factors = (*member.widths, 1), [*member.factors, 1.0]
        later, last = scaled_identities(factors, widths), torch.eye(len(member.features), dtype=torch.float64)[-1]
        for name, x in (("x = e_n", last), ("positive x", member.features)):
            slope = gradient(partial(_absolute_error, partial(_linear_chain, later, x)), member.weight).norm()
            case_of = f"{len(x)} inputs, widths {widths}, {name}"
            cases.append(Case(case_of, member.scale * stated(x, widths[1:]), slope, member.scale * x.norm()))
            share = truncated_norm(x, widths[1:]) / x.norm()
            other = [*later[:-1], share * later[-1]]
            slope = gradient(partial(_absolute_error, partial(_linear_chain, other, x)), member.weight).norm()
            rescued = max(rescued, abs(float(slope - member.scale * truncated_norm(x, widths[1:]))))
    return implication(cases, {"error of (11) for that other member": rescued})


def extreme_gradient(scale: Tensor, slopes: Tensor, active: Tensor, features: Tensor, rows: int) -> Tensor:
    """(12): row t is (c∏a/m) Σ_x I_t (f∘g)'(u) h_{i-1}ᵀ for t ≤ min(n_{i+1}, …, n_K), else zero."""
    result = scale / len(features) * (slopes[:, None] * active).T @ features
    result[rows:] = 0
    return result


@claim("T-T15")
def extreme_training_gradient(generator: torch.Generator, stated: Callable[..., Tensor] = extreme_gradient) -> Ruling:
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


@claim("T-R16")
def size_of_extreme_gradients(
    generator: torch.Generator, stated: Callable[[float], float] = grows_with_factors, activation: Map = torch.tanh
) -> Ruling:
    """Theorem 15 leaves W_i free. With W_i/∏a in place of W_i the outputs stay, so ‖∂L/∂W_i‖ is ∏a times as large, whatever g.

    The members of Theorem 15, squared error, ∏a from 1 to 10⁶. For a fixed W_i it is another matter: u = c∏a·1ᵀv grows with ∏a, and
    where g saturates, as tanh does, the gradient vanishes (evidence). activation: g.
    """
    cases, fixed = [], 1.0
    for member in members(generator):
        features, labels = normal(generator, SAMPLES, member.weight.shape[1]).abs(), normal(generator, SAMPLES)
        sizes = {}
        for growth in (1.0, 10.0, 1e3, 1e6):
            later = scaled_identities([growth ** (1 / len(member.factors))] * len(member.factors), member.widths)
            error = partial(_output_error, activation, partial(_from_weight, later, (), features), labels)
            sizes[growth] = gradient(error, member.weight / growth).norm()
            cases.append(Case(f"widths {member.widths}, ∏a = {growth:g}", stated(growth) * sizes[1.0], sizes[growth]))
        fixed = min(fixed, float(gradient(error, member.weight).norm() / sizes[1.0]))
    return identity(cases, **{"least size at ∏a = 1e6 over that at 1, W_i fixed": fixed})


def product_of_later_norms(norms: Sequence[float], i: int) -> Tensor:
    """s_{i+1}⋯s_K, layers counted from 0."""
    return product_of_factors(norms[i + 1 :])


@claim("T-R17")
def constant_of_every_layer(
    generator: torch.Generator, stated: Callable[[Sequence[float], int], Tensor] = product_of_later_norms
) -> Ruling:
    """W_k = s_k I, unit input: the Jacobian in W_i is ∏_{k≠i} s_k times one of norm ‖x‖. The constant of O is 1; layers i < K.

    By hand: one unit per layer, four weights 8, x = 1: h = 8³·w_3, so that the constant in W_3 is 512, not s_4 = 8. Beside it, the
    features before the last weight with BN of fixed statistics, ‖x‖ growing, and with LN: only LN keeps ‖h‖ ≤ √n.
    """
    cases = []
    for size in (2.0, 8.0):
        norms, width = [size] * 4, 3
        weights = scaled_identities(norms, [width] * 5)
        x = normal(generator, width).abs()
        x = x / x.norm()
        for i, weight in enumerate(weights[:-1]):
            true = steepness(partial(_from_weight, weights[i + 1 :], (), chain(weights[:i], x)), weight)
            others = product_of_factors([*norms[:i], *norms[i + 1 :]])
            cases.append(Case(f"4 layers of norm {size:g}, W_{i + 1}", stated(norms, i), true, others))
    widths = (16, 16, 16, 16)
    weights, far = random_weights(widths, generator), 10 * normal(generator, widths[0]).abs()
    fixed = fixed_batch_norms([torch.ones(width, dtype=torch.float64) for width in widths[1:]])
    sizes = {"BN of fixed statistics": fixed, "LN": layer_norms(len(weights))}
    features = {f"‖h_3‖ of 16 units, {name}": float(chain(weights, far, kind).norm()) for name, kind in sizes.items()}
    return upper_bound(cases, **features)


def _from_total_input(later: Weights, normalizers: Sequence[Map], y: Tensor) -> Tensor:
    """The network from y_i on, its normalizer included."""
    return chain(later, normalizers[0](y).relu(), normalizers[1:])


def _from_weight(later: Weights, normalizers: Sequence[Map], features: Tensor, weight: Tensor) -> Tensor:
    """The network from W_i on."""
    return chain([weight, *later], features, normalizers)


def _linear_chain(later: Weights, features: Tensor, weight: Tensor) -> Tensor:
    """The network from W_i on, with every unit taken as on: the steepest piece of the ReLU network."""
    y = weight @ features
    for following in later:
        y = following @ y
    return y


def _absolute_error(network: Map, weight: Tensor) -> Tensor:
    """The ℓ1 loss with a label above every output."""
    return (1e3 - network(weight)).abs().sum()


def _output_error(activation: Map, network: Map, labels: Tensor, weight: Tensor) -> Tensor:
    """Mean of (g(c·1ᵀh_K) − label)²."""
    return (activation(READOUT * network(weight).sum(1)) - labels).square().mean()
