"""Than 2025, Section 4: Lipschitz constants of networks with respect to inputs and to weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from normscope.claims.calculus import (
    ROUGH_EPSILON,
    Map,
    chain,
    fixed_batch_norms,
    gradient,
    layer_norms,
    normal,
    product,
    random_weights,
    scalar,
    scaled_identities,
    spectral_norm,
    spectral_product,
    steepness,
    truncated,
    uniform,
)
from normscope.claims.ledger import THAN, claim
from normscope.claims.verdicts import Case, Outcome, constant, identity, upper_bound

WIDTHS = ((4, 4, 4), (6, 8, 5, 3), (3, 10, 2, 7, 4), (5, 5, 5, 5, 5, 5))
POINTS = 20  # random inputs a network


def steepest(function: Map, width: int, generator: torch.Generator) -> Tensor:
    """The largest ‖∂function/∂x‖ over random inputs and the all-positive one: a lower bound on the constant."""
    points = [torch.ones(width, dtype=torch.float64), *(normal(generator, width) for _ in range(POINTS))]
    return torch.stack([steepness(function, x) for x in points]).max()


@claim("T-L5", THAN, "Lemma 5", "The Lipschitz constant of a feedforward network is at most ∏‖W_k‖.")
def product_bound(generator: torch.Generator, stated: Callable[[Sequence[Tensor]], Tensor] = spectral_product) -> Outcome:
    """The chain rule: each factor of the Jacobian has norm at most ‖W_k‖, for slopes are at most 1.

    Tried on random networks and on the members of Theorem 6, which reach it. It is about chains: a residual block x + Wx
    with W = I has constant 2 where the product is 1.
    """
    cases = []
    for widths in WIDTHS:
        factors = uniform(generator, 0.2, 3, len(widths) - 1).tolist()
        for name, weights in (("random", random_weights(widths, generator)), ("extremal", scaled_identities(factors, widths))):
            true = steepest(partial(chain, weights), widths[0], generator)
            cases.append(Case(f"{name} network {widths}", stated(weights), true))
    return upper_bound(cases, **{"constant of x + Ix, whose product is 1": float(steepness(lambda x: x + x, normal(generator, 3)))})


@claim(
    "T-L5-residual", THAN, "Remark 7 and Figure 1", "The bound ∏‖W_k‖ is that of ResNet-18 too, whose product reaches 10^50.",
    "For residual blocks x + F(x) the bound is ∏(1 + ‖F‖); the plain product of norms bounds nothing.",
)  # fmt: skip
def residual_product(generator: torch.Generator, stated: Callable[[Sequence[Tensor]], Tensor] = spectral_product) -> Outcome:
    """Residual linear blocks x ↦ x + W_k x with small W_k: the Jacobian ∏(I + W_k) is near I while ∏‖W_k‖ is near 0."""
    cases = []
    for depth in (2, 4, 8):
        weights = [0.2 * weight for weight in random_weights([5] * (depth + 1), generator)]
        true = steepness(partial(_residual, weights), normal(generator, 5))
        cases.append(Case(f"{depth} residual blocks", stated(weights), true, spectral_product_of_blocks(weights)))
    return upper_bound(cases)


def spectral_product_of_blocks(weights: Sequence[Tensor]) -> Tensor:
    """∏(1 + ‖W_k‖), the bound for residual blocks."""
    return product([1 + spectral_norm(weight) for weight in weights])


def product_of_factors(factors: Sequence[float]) -> Tensor:
    return product([scalar(factor) for factor in factors])


@claim("T-T6", THAN, "Theorem 6", "For all a_k in [0, s_k] some ReLU network has Lipschitz constant exactly ∏a_k.")
def every_constant_is_taken(
    generator: torch.Generator, stated: Callable[[Sequence[float]], Tensor] = product_of_factors
) -> Outcome:
    """W_k = a_k[I 0] gives h(x) = ∏a_k · relu(x) truncated: constant ∏a_k, taken at positive x; some a_k are zero, some large."""
    cases = []
    for widths in WIDTHS:
        for low, high in ((0.0, 0.5), (0.5, 10.0), (0.0, 0.0)):
            factors = uniform(generator, low, high, len(widths) - 1).tolist()
            weights = scaled_identities(factors, widths)
            true = steepest(partial(chain, weights), widths[0], generator)
            cases.append(Case(f"widths {widths}, a in [{low}, {high}]", stated(factors), true))
    return constant(cases)


def norms_of_inverses(deviations: Sequence[Tensor]) -> Tensor:
    """∏‖1/σ_k‖₂."""
    return product([(1 / deviation).norm() for deviation in deviations])


def largest_inverses(deviations: Sequence[Tensor]) -> Tensor:
    return product([(1 / deviation).max() for deviation in deviations])


def batch_norm_networks(generator: torch.Generator) -> list[tuple[str, list[Tensor], list[Tensor], Tensor]]:
    """(name, weights, deviations of each BN, steepest Jacobian) of networks with BN of fixed statistics."""
    networks = []
    for widths in (*WIDTHS, (1, 1, 1)):
        deviations = [10 ** uniform(generator, -1, 1, width) for width in widths[1:]]
        normalizers = fixed_batch_norms(deviations)
        factors = uniform(generator, 0.5, 3, len(widths) - 1).tolist()
        for name, weights in (("random", random_weights(widths, generator)), ("extremal", scaled_identities(factors, widths))):
            true = steepest(partial(chain, weights, normalizers=normalizers), widths[0], generator)
            networks.append((f"{name} network {widths} with BN", weights, deviations, true))
    return networks


def batch_norm_network_cases(
    generator: torch.Generator, stated: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
) -> list[Case]:
    return [
        Case(name, stated(weights, deviations), true, spectral_product(weights) * largest_inverses(deviations))
        for name, weights, deviations, true in batch_norm_networks(generator)
    ]


def weights_and_constants(weights: Sequence[Tensor], deviations: Sequence[Tensor]) -> Tensor:
    """∏‖W_k‖ ∏‖NO_k‖ with the exact constant of each BN."""
    return spectral_product(weights) * largest_inverses(deviations)


@claim("T-T9", THAN, "Theorem 9", "The constant of a normalized network is at most ∏‖W_k‖ ∏‖NO_k‖_Lip.")
def normalized_product_bound(
    generator: torch.Generator, stated: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = weights_and_constants
) -> Outcome:
    """The chain rule once more, with the exact constants max_k 1/√(σ_k² + ε) of the normalizers; reached at width 1."""
    return upper_bound(batch_norm_network_cases(generator, stated))


def weights_and_norms(weights: Sequence[Tensor], deviations: Sequence[Tensor]) -> Tensor:
    return spectral_product(weights) * norms_of_inverses(deviations)


def weights_and_powers(weights: Sequence[Tensor], deviations: Sequence[Tensor]) -> Tensor:
    """σ^-K ∏‖W_k‖ with σ = min_k 1/‖1/σ_k‖."""
    least = torch.stack([1 / (1 / deviation).norm() for deviation in deviations]).min()
    return spectral_product(weights) * least ** -len(weights)


@claim(
    "T-C10", THAN, "Corollary 10", "With BN, ‖h‖_Lip ≤ ∏‖W_k‖ ∏‖1/σ_k‖ ≤ σ^-K ∏‖W_k‖ with σ = min_k ‖1/σ_k‖^-1.",
    "True, but ∏‖W_k‖ ∏max 1/σ_k is far sharper: the ℓ2 norms cost up to √n a layer.",
)  # fmt: skip
def batch_norm_network_bound(
    generator: torch.Generator,
    stated: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = weights_and_norms,
    power_form: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = weights_and_powers,
) -> Outcome:
    """Theorem 9 with Lemma 1's constants. Width 1 is left out, where both forms agree with the sharp one."""
    rows = [row for row in batch_norm_networks(generator) if len(row[2][0]) > 1]
    cases = [
        Case(f"{name}, {form}", bound(weights, deviations), true, weights_and_constants(weights, deviations))
        for name, weights, deviations, true in rows
        for form, bound in (("product form", stated), ("power form", power_form))
    ]
    looseness = max(float(case.stated / case.corrected) for case in cases if case.corrected is not None)
    return upper_bound(cases, **{"largest stated/corrected": looseness})


def inverse_roughness(weights: Sequence[Tensor], epsilon: float) -> Tensor:
    """∏‖W_k‖ ∏1/σ_k where σ_k = √ε, the least over all inputs."""
    return spectral_product(weights) * epsilon ** (-len(weights) / 2)


@claim(
    "T-C11", THAN, "Corollary 11", "With LN, ‖h‖_Lip ≤ ∏‖W_k‖ ∏1/σ_k with σ_k the least √(σ² + ε) over inputs.",
    "True, and reached by one layer; over all inputs σ_k is √ε, so the product is ε^-K/2: it reduces nothing without a region.",
)  # fmt: skip
def layer_norm_network_bound(
    generator: torch.Generator, stated: Callable[[Sequence[Tensor], float], Tensor] = inverse_roughness
) -> Outcome:
    """Theorem 9 with Lemma 2's constants. The steepest inputs are those where a layer's features are all equal: σ² = 0."""
    cases = []
    for widths in ((4, 4), *WIDTHS):
        for name, weights in (
            ("random", random_weights(widths, generator)),
            ("extremal", scaled_identities([1.0] * (len(widths) - 1), widths)),
        ):
            normalizers = layer_norms(len(weights))
            points = [1e-3 * normal(generator, widths[0]) for _ in range(POINTS)]
            points += [normal(generator, widths[0]) for _ in range(POINTS)]
            true = torch.stack([steepness(partial(chain, weights, normalizers=normalizers), point) for point in points]).max()  # type: ignore[misc]
            cases.append(Case(f"{name} network {widths} with LN", stated(weights, ROUGH_EPSILON), true))
    return upper_bound(cases)


def weight_bounds(weights: Sequence[Tensor], deviations: Sequence[Tensor], i: int) -> Tensor:
    """(7): ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖, layers counted from 0."""
    return product([*(spectral_norm(weight) for weight in weights[i + 1 :]), *((1 / d).max() for d in deviations[i:])])


@claim(
    "T-T12", THAN, "Theorem 12", "‖h, W_i‖_Lip ≤ A_{i-1}‖h, y_i‖_Lip and ‖h, y_i‖_Lip ≤ ∏_{k>i}‖W_k‖ ∏_{k≥i}‖NO_k‖_Lip.",
    "True with the statistics of BN held fixed while W_i moves, and finite only where inputs are bounded.",
)  # fmt: skip
def weight_sensitivity(
    generator: torch.Generator, stated: Callable[[Sequence[Tensor], Sequence[Tensor], int], Tensor] = weight_bounds
) -> Outcome:
    """y_i = W_i h_{i-1} is linear in W_i with constant ‖h_{i-1}‖, and what follows y_i is a chain.

    Jacobians in W_i and in y_i at random inputs, all layers; reached at width 1.
    """
    cases = []
    for widths in ((1, 1, 1), *WIDTHS):
        deviations = [10 ** uniform(generator, -1, 1, width) for width in widths[1:]]
        normalizers = fixed_batch_norms(deviations)
        weights = [weight.abs() for weight in random_weights(widths, generator)]
        x = normal(generator, widths[0]).abs()
        for i in range(len(weights)):
            before = chain(weights[:i], x, normalizers[:i])
            later, after = weights[i + 1 :], normalizers[i:]
            bound = stated(weights, deviations, i)
            of_y = steepness(partial(_from_total_input, later, after), weights[i] @ before)
            of_weight = steepness(partial(_from_weight, later, after, before), weights[i])
            cases.append(Case(f"widths {widths}, layer {i + 1}, with respect to y", bound, of_y))
            cases.append(Case(f"widths {widths}, layer {i + 1}, with respect to W", before.norm() * bound, of_weight))
    return upper_bound(cases)


def truncated_features(features: Tensor, widths: Sequence[int]) -> Tensor:
    """‖h_{i-1}^(n_{i+1},…,n_K)‖, Eq. (8)."""
    return truncated(features, widths).norm()


def extremal_members(generator: torch.Generator) -> list[tuple[tuple[int, ...], list[float], Tensor, Tensor, int]]:
    """(widths after layer i, a_j for j > i, W_i, h_{i-1}, rows of W_i that count) of Theorem 13's members, all units active."""
    members: list[tuple[tuple[int, ...], list[float], Tensor, Tensor, int]] = []
    shapes: list[tuple[int, tuple[int, ...]]] = [(6, (4, 3, 5, 4)), (5, (4, 4)), (8, (6, 2, 4)), (3, (5, 7, 6))]
    for before, widths in shapes:
        factors = uniform(generator, 0.3, 3, len(widths) - 1).tolist()
        weight, features = normal(generator, widths[0], before).abs(), normal(generator, before).abs()
        members.append((widths, factors, weight, features, min(widths)))
    return members


@claim(
    "T-T13", THAN, "Theorem 13, Eq. (8)", "Some member has ‖h, W_i‖_Lip = ∏a_j · ‖h_{i-1} truncated to (n_{i+1}, …, n_K)‖.",
    "The truncation acts on the rows of W_i, not on h_{i-1}: the constant is ∏a_j · ‖h_{i-1}(x)‖.",
)  # fmt: skip
def extremal_weight_constant(
    generator: torch.Generator, stated: Callable[[Tensor, Sequence[int]], Tensor] = truncated_features
) -> Outcome:
    """h = ∏a_j · relu((W_i h_{i-1}) truncated): each row t of W_i that survives has gradient h_{i-1}ᵀ, whole.

    The paper's step from (58) to (59) truncates h_{i-1} instead of W_i h_{i-1}.
    """
    cases = []
    for widths, factors, weight, features, _ in extremal_members(generator):
        later = scaled_identities(factors, widths)
        true = steepness(_first_weight(later, features), weight)
        scale = product_of_factors(factors)
        cases.append(
            Case(f"{len(features)} features, widths {widths}", scale * stated(features, widths[1:]), true, scale * features.norm())
        )
    return constant(cases)


@claim("T-T13-y", THAN, "Theorem 13, Eq. (9)", "The same member has ‖h, y_i‖_Lip = ∏_{j>i} a_j.")
def extremal_input_constant(
    generator: torch.Generator, stated: Callable[[Sequence[float]], Tensor] = product_of_factors
) -> Outcome:
    """h = ∏a_j · relu(y_i truncated), whose constant is ∏a_j, taken where y_i is positive."""
    cases = []
    for widths, factors, weight, features, _ in extremal_members(generator):
        later = scaled_identities(factors, widths)
        true = steepness(partial(chain, later), (weight @ features).relu())
        cases.append(Case(f"widths {widths}", stated(factors), true))
    return constant(cases)


def same_as_network(outputs: int) -> float:
    """The factor that the ℓ1 loss adds: none."""
    return 1.0


@claim(
    "T-C14", THAN, "Corollary 14 and the line before it", "With the ℓ1 loss f, ‖f, W_i‖_Lip = ‖h, W_i‖_Lip.",
    "ℓ1 is √n_K-Lipschitz in ℓ2; for the extremal member the factor is √min(n_i, …, n_K).",
)  # fmt: skip
def loss_constant(generator: torch.Generator, stated: Callable[[int], float] = same_as_network) -> Outcome:
    """∂f/∂W_i = signᵀ ∂h/∂W_i, and a sign vector of n entries has norm √n; the label is chosen above every output."""
    cases = []
    for widths, factors, weight, features, active in extremal_members(generator):
        later = scaled_identities(factors, widths)
        label = torch.full((widths[-1],), 1e3, dtype=torch.float64)
        network = _first_weight(later, features)
        of_network = steepness(network, weight)
        of_loss = gradient(partial(_absolute_error, network, label), weight).norm()
        cases.append(Case(f"widths {widths}", stated(active) * of_network, of_loss, active**0.5 * of_network))
    return constant(cases)


def extreme_gradient(scale: float, slopes: Tensor, active: Tensor, features: Tensor, rows: int) -> Tensor:
    """(12): row t is (c∏a/m) Σ_x I_t (f∘g)'(u) h_{i-1}ᵀ for t ≤ min(n_{i+1}, …, n_K), else zero."""
    result = scale / len(features) * (slopes[:, None] * active).T @ features
    result[rows:] = 0
    return result


@claim(
    "T-T15",
    THAN,
    "Theorem 15, Eq. (12)",
    "Some member's training loss has row t of ∂L/∂W_i equal to (c∏a_j/m) Σ_x I_it (f∘g)'(u) h_{i-1}(x)ᵀ.",
)
def extreme_training_gradient(generator: torch.Generator, stated: Callable[..., Tensor] = extreme_gradient) -> Outcome:
    """The last layer is c·1ᵀ, those after layer i are a_j[I 0], g is tanh, f the squared error; against autograd."""
    cases = []
    for widths, factors, weight, _, _ in extremal_members(generator):
        signed = weight * normal(generator, *weight.shape).sign()
        features, labels = normal(generator, 12, weight.shape[1]).abs(), normal(generator, 12)
        later, c = scaled_identities(factors, widths), 0.1
        network = _first_weight(later, features)
        u = c * network(signed).sum(1)
        slopes = 2 * (u.tanh() - labels) * (1 - u.tanh() ** 2)
        active = (features @ signed.T >= 0).double()
        scale = c * float(product_of_factors(factors))
        cases.append(
            Case(
                f"widths {widths}",
                stated(scale, slopes, active, features, min(widths[1:])),
                gradient(partial(_tanh_error, network, c, labels), signed),
            )
        )
    return identity(cases)


def _from_total_input(later: list[Tensor], normalizers: list[Map], y: Tensor) -> Tensor:
    return chain(later, normalizers[0](y).relu(), normalizers[1:])


def _from_weight(later: list[Tensor], normalizers: list[Map], features: Tensor, weight: Tensor) -> Tensor:
    return chain([weight, *later], features, normalizers)


def _first_weight(later: list[Tensor], features: Tensor) -> Map:
    """W ↦ the chain of W and the later weights at the features."""
    return lambda weight: chain([weight, *later], features)


def _absolute_error(network: Map, label: Tensor, weight: Tensor) -> Tensor:
    return (label - network(weight)).abs().sum()


def _tanh_error(network: Map, c: float, labels: Tensor, weight: Tensor) -> Tensor:
    """Mean of (tanh(c·1ᵀh_K) − label)²."""
    return (torch.tanh(c * network(weight).sum(1)) - labels).square().mean()


def _residual(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = x + weight @ x
    return x
