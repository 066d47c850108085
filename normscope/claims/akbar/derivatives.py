"""Akbar, Sections 3.2, 4.3, 6 and Appendix A: printed gradients and Hessians against automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normscope.claims.akbar.symmetry import weight_of
from normscope.claims.calculus import Map, gradient, hessian, jacobian, normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity

SIZES = (3, 8, 32)  # of a batch, or of a layer


def backward_without_gamma(deltas: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    """Eq. (1): (1/mσ)[mδ_n − Σδ − ẑ_n Σδẑ] with δ = ∂L/∂a."""
    hat = _hat(z)
    return (deltas - deltas.mean() - hat * (deltas * hat).mean()) / _deviation(z)


def backward_with_gamma(deltas: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    """(γ/σ)[δ_n − mean δ − ẑ_n mean(δẑ)], the last formula of A.1.1."""
    return gamma * backward_without_gamma(deltas, z, gamma)


def backward_cases(generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Case]:
    """One BN unit with γ and β and a random smooth loss: ∂L/∂z as stated, true, and with γ."""
    cases = []
    for size in SIZES:
        z, targets = normal(generator, size), normal(generator, size)
        gamma, beta = 0.5 + normal(generator, 1).abs(), normal(generator, 1)
        loss = _smooth_loss(targets)
        deltas = gradient(loss, gamma * _hat(z) + beta)
        true = gradient(partial(_loss_after, loss, gamma, beta), z)
        cases.append(
            Case(f"batch of {size}, γ = {float(gamma):.3g}", stated(deltas, z, gamma), true, backward_with_gamma(deltas, z, gamma))
        )
    return cases


@claim("A-Eq1")
def batch_norm_backward(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor] = backward_without_gamma
) -> Ruling:
    """The chain rule passes a = γẑ + β, so ∂L/∂ẑ = γδ; the rest of Eq. (1) is exact."""
    return identity(backward_cases(generator, stated))


@claim("A-A.1.1-end")
def batch_norm_backward_appendix(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor] = backward_with_gamma
) -> Ruling:
    """The appendix ends with the right formula, although the Jacobian that it starts from is not (A-A.1.1)."""
    return identity(backward_cases(generator, stated))


def weight_gradient(deltas: Tensor, z: Tensor, x: Tensor, gamma: Tensor) -> Tensor:
    """(γ/σ)[Σ_k δ_k x_k − (1/m) Σ_k Σ_n δ_n x_k − (1/m) Σ_k ẑ_k x_k Σ_n δ_n ẑ_n]."""
    hat, size = _hat(z), len(z)
    direct, centred, along = deltas @ x, deltas.sum() * x.sum(0) / size, (deltas @ hat) * (hat @ x) / size
    return gamma / _deviation(z) * (direct - centred - along)


@claim("A-A.1.1-W")
def batch_norm_weight_gradient(generator: torch.Generator, stated: Callable[..., Tensor] = weight_gradient) -> Ruling:
    """Against automatic differentiation for one neuron with inputs whose mean is not zero; then its cosine with W against 0."""
    cases = []
    for size in SIZES:
        x, w, loss = 1 + normal(generator, size, 4), normal(generator, 4), _smooth_loss(normal(generator, size))
        gamma, beta = 0.5 + normal(generator, 1)[0].abs(), normal(generator, 1)[0]
        deltas = gradient(loss, gamma * _hat(x @ w) + beta)
        claimed = stated(deltas, x @ w, x, gamma)
        cases.append(Case(f"batch of {size}", claimed, gradient(partial(_loss_of_neuron, loss, gamma, beta, x), w)))
        cases.append(Case(f"batch of {size}, cosine", claimed @ w / (claimed.norm() * w.norm()), scalar(0.0), scale=1.0))
    return identity(cases)


def printed_jacobian(z: Tensor) -> Tensor:
    """∂ẑ_n/∂z_k = δ_nk/σ − 1/(mσ) − (z_n − μ)(z_k − μ)/σ³."""
    centred, sigma = z - z.mean(), _deviation(z)
    return torch.eye(len(z), dtype=z.dtype) / sigma - 1 / (len(z) * sigma) - torch.outer(centred, centred) / sigma**3


def right_jacobian(z: Tensor) -> Tensor:
    """The same with (z_n − μ)(z_k − μ)/(mσ³)."""
    centred, sigma = z - z.mean(), _deviation(z)
    return printed_jacobian(z) + (1 - 1 / len(z)) * torch.outer(centred, centred) / sigma**3


@claim("A-A.1.1")
def batch_norm_jacobian(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = printed_jacobian) -> Ruling:
    """Entry by entry against automatic differentiation. As printed, the matrix does not annul z − μ, the direction of scale."""
    points = [normal(generator, size) for size in SIZES]
    return identity([Case(f"batch of {len(z)}", stated(z), jacobian(_hat, z), right_jacobian(z)) for z in points])


def printed_layer_norm_backward(deltas: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    """(1/dσ)[dδ_i − Σδ_j − Σ ẑ_j δ_j ẑ_j]: ẑ_j stands under the sum over j."""
    hat = _hat(z)
    return (deltas - deltas.mean() - (deltas * hat**2).mean()) / _deviation(z)


def right_layer_norm_backward(deltas: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    """(1/dσ)[dγ_iδ_i − Σγ_jδ_j − ẑ_i Σγ_jδ_jẑ_j]."""
    hat, inner = _hat(z), gamma * deltas
    return (inner - inner.mean() - hat * (inner * hat).mean()) / _deviation(z)


@claim("A-LN-backward")
def layer_norm_backward(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor] = printed_layer_norm_backward
) -> Ruling:
    """With γ = 1 and with random γ, against automatic differentiation."""
    cases = []
    for size in SIZES:
        for name, gamma in (("γ = 1", torch.ones(size, dtype=torch.float64)), ("random γ", normal(generator, size))):
            z, loss = normal(generator, size), _smooth_loss(normal(generator, size))
            deltas = gradient(loss, gamma * _hat(z))
            true = gradient(partial(_loss_after, loss, gamma, scalar(0.0)), z)
            cases.append(
                Case(f"{size} neurons, {name}", stated(deltas, z, gamma), true, right_layer_norm_backward(deltas, z, gamma))
            )
    return identity(cases)


WeightNormGradient = tuple[Tensor, Tensor]  # ∂L/∂v and ∂L/∂g


def without_cross_terms(slope: Tensor, v: Tensor, g: Tensor) -> WeightNormGradient:
    """Section 3.2: ∂L/∂v_k = ∂L/∂w_k (g/‖v‖ − g v_k²/‖v‖³), and the right ∂L/∂g."""
    return slope * (g / v.norm() - g * v**2 / v.norm() ** 3), right_weight_norm(slope, v, g)[1]


def with_spare_norm(slope: Tensor, v: Tensor, g: Tensor) -> WeightNormGradient:
    """Section 4.3: the right ∂L/∂v, and ∂L/∂g = ∂L/∂w·v/‖v‖²."""
    return right_weight_norm(slope, v, g)[0], slope @ v / v.norm() ** 2


def right_weight_norm(slope: Tensor, v: Tensor, g: Tensor) -> WeightNormGradient:
    """∂L/∂v = (g/‖v‖)(∂L/∂w − (∂L/∂w·v) v/‖v‖²) and ∂L/∂g = ∂L/∂w·v/‖v‖."""
    return g / v.norm() * (slope - (slope @ v) * v / v.norm() ** 2), slope @ v / v.norm()


def weight_norm_instances(generator: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """(v, g, ∂L/∂w, ∂L/∂v, ∂L/∂g) of random losses."""
    rows = []
    for size in SIZES:
        v, g, loss = 3 * normal(generator, size), 0.5 + normal(generator, 1)[0].abs(), _smooth_loss(normal(generator, size))
        both = gradient(partial(_loss_of_weight_norm, loss), torch.cat([v, g[None]]))
        rows.append((v, g, gradient(loss, weight_of(v, g)), both[:-1], both[-1]))
    return rows


def weight_norm_cases(generator: torch.Generator, stated: Callable[..., WeightNormGradient]) -> list[Case]:
    """∂L/∂v and ∂L/∂g as stated, true and corrected."""
    cases = []
    for v, g, slope, of_v, of_g in weight_norm_instances(generator):
        printed, right = stated(slope, v, g), right_weight_norm(slope, v, g)
        cases += [
            Case(f"∂L/∂v, {len(v)} weights", printed[0], of_v, right[0]),
            Case(f"∂L/∂g, {len(v)} weights", printed[1], of_g, right[1]),
        ]
    return cases


@claim("A-WN-3.2")
def weight_norm_gradients(generator: torch.Generator, stated: Callable[..., WeightNormGradient] = without_cross_terms) -> Ruling:
    """w_k depends on every v_j through ‖v‖, and ∂w/∂g = v/‖v‖. Against automatic differentiation."""
    return identity(weight_norm_cases(generator, stated))


@claim("A-WN-4.3")
def weight_norm_gradients_again(generator: torch.Generator, stated: Callable[..., WeightNormGradient] = with_spare_norm) -> Ruling:
    """As A-WN-3.2; ‖v‖ ≠ 1 shows the spare factor."""
    return identity(weight_norm_cases(generator, stated))


@claim("A-WN-radial")
def weight_norm_radial_gradient(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda g, of_g: g * of_g
) -> Ruling:
    """What Proposition 4.3 would imply, had it been right; as parts of ‖∇_v L‖‖v‖."""
    cases = []
    for v, g, _, of_v, of_g in weight_norm_instances(generator):
        size = float(of_v.norm() * v.norm())
        cases.append(Case(f"{len(v)} weights", stated(g, of_g), of_v @ v, scalar(0.0), scale=size))
    return identity(cases)


def zero_gradient(gamma: Tensor, sigma: Tensor, deltas: Tensor) -> Tensor:
    return 0 * deltas


def printed_hessian(z: Tensor, gamma: Tensor) -> Tensor:
    """(γ²/σ²)(I − 11ᵀ/m − ẑẑᵀ), of which ẑ is said to be an eigenvector with 1 − m."""
    return right_hessian(z, gamma) - (gamma / _deviation(z)) ** 2 * (1 - 1 / len(z)) * torch.outer(_hat(z), _hat(z))


def right_hessian(z: Tensor, gamma: Tensor) -> Tensor:
    """(γ²/σ²)(I − 11ᵀ/m − ẑẑᵀ/m)."""
    size, hat = len(z), _hat(z)
    return (gamma / _deviation(z)) ** 2 * (torch.eye(size, dtype=z.dtype) - 1 / size - torch.outer(hat, hat) / size)


def spectrum(z: Tensor, gamma: Tensor) -> Tensor:
    """0, 0 and m − 2 times γ²/σ², in ascending order."""
    values = (gamma / _deviation(z)) ** 2 * torch.ones(len(z), dtype=z.dtype)
    values[:2] = 0
    return values


def equilibria(generator: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(z, γ, Hessian in z of ½Σ(γẑ − y)²) at y = γẑ, where δ = 0."""
    rows = []
    for size in SIZES[1:]:
        z, gamma = normal(generator, size), normal(generator, 1)[0]
        rows.append((z, gamma, hessian(partial(_loss_after, _half_square(gamma * _hat(z)), gamma, scalar(0.0)), z)))
    return rows


@claim("A-A.1.2")
def equilibrium_spectrum(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = spectrum) -> Ruling:
    """At δ = 0 the Hessian is (γ²/σ²)JᵀJσ² with J = ∂ẑ/∂z, a projection over σ; eigenvalues of automatic differentiation."""
    return identity(
        [
            Case(f"batch of {len(z)}", stated(z, gamma), torch.linalg.eigvalsh(curvature))
            for z, gamma, curvature in equilibria(generator)
        ]
    )


@claim("A-A.1.2-matrix")
def equilibrium_hessian(generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = printed_hessian) -> Ruling:
    """The printed matrix against automatic differentiation, γ fixed: it lacks a factor 1/m before ẑẑᵀ."""
    return identity(
        [
            Case(f"batch of {len(z)}", stated(z, gamma), curvature, right_hessian(z, gamma))
            for z, gamma, curvature in equilibria(generator)
        ]
    )


@claim("A-A.1.2-gradient")
def equilibrium_gradient(generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor] = zero_gradient) -> Ruling:
    """Squared error ½Σ(a − y)², γ and β at their optimum for random y, where Σδ = Σδẑ = 0 but δ ≠ 0."""
    cases = []
    for size in SIZES[1:]:
        z, y = normal(generator, size), normal(generator, size)
        hat, sigma = _hat(z), _deviation(z)
        gamma, beta = (y * hat).mean(), y.mean()
        true = gradient(partial(_loss_after, _half_square(y), gamma, beta), z)
        deltas = gamma * hat + beta - y
        cases.append(Case(f"batch of {size}", stated(gamma, sigma, deltas), true, gamma / sigma * deltas))
    return identity(cases)


@claim("A-S3.2-flat")
def curvature_along_weights(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = lambda w: w) -> Ruling:
    """The second derivative of t ↦ L(w + tw) as a part of ‖Hw‖‖w‖; L is constant on that line. stated: the direction."""
    cases = []
    for size in SIZES:
        loss, w = scale_free_loss(generator, size), normal(generator, size)
        matrix, direction = hessian(loss, w), stated(w)
        size_of_terms = float((matrix @ direction).norm() * direction.norm())
        cases.append(Case(f"{size} weights", scalar(0.0), direction @ matrix @ direction, scale=size_of_terms))
    return identity(cases)


@claim("A-S3.2-eigen")
def hessian_along_weights(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda slope, w: 0 * slope
) -> Ruling:
    """Hw of a BN neuron with a random loss, away from critical points."""
    cases = []
    for size in SIZES:
        loss, w = scale_free_loss(generator, size), normal(generator, size)
        slope = gradient(loss, w)
        cases.append(Case(f"{size} weights", stated(slope, w), hessian(loss, w) @ w, -slope))
    return identity(cases)


def scale_free_loss(generator: torch.Generator, inputs: int, batch: int = 40) -> Map:
    """L(w) of a BN neuron: mean (tanh(BN(xw)) − t)², at ε = 0, of degree 0 in w."""
    x, targets = normal(generator, batch, inputs), normal(generator, batch)
    return lambda w: (standardize(x @ w, 0, 0.0).tanh() - targets).square().mean()


def _smooth_loss(targets: Tensor) -> Map:
    return lambda a: ((a - targets).square() / 2 + a.sin()).sum()


def _half_square(targets: Tensor) -> Map:
    return lambda a: (a - targets).square().sum() / 2


def _loss_after(loss: Map, gamma: Tensor, beta: Tensor, z: Tensor) -> Tensor:
    """The loss of a = γẑ + β, one vector being normalized: a unit's batch (BN) or a sample's layer (LN)."""
    return loss(gamma * _hat(z) + beta)


def _loss_of_neuron(loss: Map, gamma: Tensor, beta: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return _loss_after(loss, gamma, beta, x @ w)


def _loss_of_weight_norm(loss: Map, vector: Tensor) -> Tensor:
    """The loss of w with (v, g) in one vector."""
    return loss(weight_of(vector[:-1], vector[-1]))


def _deviation(z: Tensor) -> Tensor:
    return z.std(correction=0)


def _hat(z: Tensor) -> Tensor:
    return standardize(z, 0, 0.0)
