"""Akbar, Sections 4.1 and 5: the metric, how gradients scale, and what gradient flow conserves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from normscope.claims.akbar.derivatives import scale_free_loss
from normscope.claims.akbar.symmetry import (
    LAYER_AXIS,
    NormalizedLayer,
    parameters,
    random_layer,
    weight_norm_output,
    with_parameters,
)
from normscope.claims.calculus import Map, gradient, hessian, normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, identity, presence, upper_bound

FACTORS = (0.1, 3.0, 100.0)
TIME, STEPS = 1.0, 80  # of gradient flow
VISIBLE = 1e-6  # a cosine that counts as a radial part


def metric(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return first @ second / (y @ y)


@claim("A-metric")
def scale_invariant_metric(generator: torch.Generator, stated: Callable[[Tensor, Tensor, Tensor], Tensor] = metric) -> Ruling:
    """The identity for random vectors; then the derivative of a function along great circles against its projected gradient."""
    cases = []
    for k in FACTORS:
        y, first, second = (normal(generator, 6) for _ in range(3))
        cases.append(Case(f"k = {k:g}", stated(k * y, k * first, k * second), stated(y, first, second)))
    y, target = normal(generator, 6), normal(generator, 6)
    y = y / y.norm()
    slope = gradient(lambda x: (x - target).pow(3).sum(), y)
    tangent = normal(generator, 6)
    tangent = tangent - (tangent @ y) * y
    tangent = tangent / tangent.norm()
    along = gradient(lambda t: (y * t.cos() + tangent * t.sin() - target).pow(3).sum(), scalar(0.0))
    cases.append(Case("derivative along a great circle", (slope - (slope @ y) * y) @ tangent, along))
    return identity(cases)


@claim("A-grad-scale")
def gradient_scale(generator: torch.Generator, stated: tuple[float, float] = (1.0, 2.0)) -> Ruling:
    """L(cw) = L(w) gives ∇L(cw) = ∇L(w)/c and H(cw) = H(w)/c². stated: the two exponents."""
    cases = []
    for c in FACTORS:
        loss, w = scale_free_loss(generator, 5), normal(generator, 5)
        cases.append(Case(f"gradient, c = {c:g}", gradient(loss, w) / c ** stated[0], gradient(loss, c * w)))
        cases.append(Case(f"Hessian, c = {c:g}", hessian(loss, w) / c ** stated[1], hessian(loss, c * w)))
    return identity(cases)


@claim("A-Ex5.1")
def gradient_size(generator: torch.Generator, stated: Callable[[Tensor, float], Tensor] = lambda size, c: size) -> Ruling:
    """‖∇L(cw)‖ for c ≥ 3 against ‖∇L(w)‖; the rate is 1/c. stated: the bound, of ‖∇L(w)‖ and c."""
    cases, error = [], 0.0
    for c in (3.0, 100.0):
        loss, w = scale_free_loss(generator, 5), normal(generator, 5)
        size, true = gradient(loss, w).norm(), gradient(loss, c * w).norm()
        error = max(error, abs(float(c * true / size) - 1))
        cases.append(Case(f"c = {c:g}", stated(size, c), true, size / c))
    return upper_bound(cases, **{"error of the rate 1/‖w‖": error})


def integrated(velocity: Map, start: Tensor, time: float = TIME) -> Tensor:
    """The solution of dw/dt = velocity(w) after some time, by the classical Runge–Kutta method."""
    w, h = start, time / STEPS
    for _ in range(STEPS):
        a = velocity(w)
        b = velocity(w + h / 2 * a)
        c = velocity(w + h / 2 * b)
        d = velocity(w + h * c)
        w = w + h / 6 * (a + 2 * b + 2 * c + d)
    return w


def flow(loss: Map, start: Tensor) -> Tensor:
    """dw/dt = −∇L(w) up to TIME."""
    return integrated(lambda w: -gradient(loss, w), start)


def layer_norm_loss(generator: torch.Generator) -> tuple[NormalizedLayer, Map]:
    """A layer with LN, tanh (smooth, so that the flow can be integrated to high order) and a readout: the loss of (W, b)."""
    layer, x = random_layer(generator, LAYER_AXIS), normal(generator, 12, 5)
    readout, targets = normal(generator, 4), normal(generator, 12)
    return layer, lambda p: (with_parameters(layer, p)(x).tanh() @ readout - targets).square().mean()


def kept(norm: Tensor, time: float) -> Tensor:
    return norm


@claim("A-L5.1")
def norm_is_conserved(generator: torch.Generator, stated: Callable[[Tensor, float], Tensor] = kept) -> Ruling:
    """d‖w‖²/dt = −2 w·∇L = 0. A step of plain gradient descent of size η instead adds exactly η²‖∇L‖² to ‖w‖²."""
    cases = []
    for inputs in (3, 8):
        loss, w = scale_free_loss(generator, inputs), normal(generator, inputs)
        cases.append(Case(f"BN neuron of {inputs} inputs", stated(w.norm(), TIME), flow(loss, w).norm()))
    step = 0.3 * gradient(loss, w)
    growth = float((w - step).norm() ** 2 - w.norm() ** 2) / float(step.norm() ** 2)
    return identity(cases, **{"growth of ‖w‖² in a step / η²‖∇L‖²": growth})


@claim("A-L5.1-WN")
def weight_norm_is_conserved(generator: torch.Generator, stated: Callable[[Tensor, float], Tensor] = kept) -> Ruling:
    """∇_v L·v = 0, because w does not depend on ‖v‖. The reason that is given, a gradient orthogonal to (v, −g), is another and
    does not hold (A-WN-radial); it would conserve ‖v‖² − g² instead."""
    x, targets, both = normal(generator, 20, 5), normal(generator, 20), normal(generator, 6)
    moved = flow(lambda p: (weight_norm_output(x, p) - targets).square().mean(), both)
    difference = float(moved[:-1] @ moved[:-1] - moved[-1] ** 2) - float(both[:-1] @ both[:-1] - both[-1] ** 2)
    case = Case("v of WN", stated(both[:-1].norm(), TIME), moved[:-1].norm())
    return identity([case], **{"change of ‖v‖² − g²": difference})


@claim("A-L5.1-LN")
def layer_norm_weight_norm(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], Tensor] = lambda weight, bias: weight.norm()
) -> Ruling:
    """The scale symmetry of LN is joint in (W, b), unlike BN's, which ignores b altogether. stated: what is conserved."""
    cases = []
    for trial in range(3):
        layer, loss = layer_norm_loss(generator)
        after = with_parameters(layer, flow(loss, parameters(layer)))
        before, now = stated(layer.weight, layer.bias), stated(after.weight, after.bias)
        from_joint = (parameters(layer) @ parameters(layer) - after.bias @ after.bias).sqrt()  # ‖W‖ if ‖W‖² + ‖b‖² is conserved
        cases.append(Case(f"layer {trial + 1}", before, now, from_joint))
    return identity(cases)


@claim("A-WD")
def weight_decay_rate(generator: torch.Generator, stated: float = 1.0) -> Ruling:
    """2w·(−∇L − λw) with w·∇L = 0. stated: the factor of −λ‖w‖²."""
    cases = []
    for decay in (1e-4, 0.1, 2.0):
        loss, w = scale_free_loss(generator, 5), normal(generator, 5)
        velocity = -gradient(loss, w) - gradient(partial(_penalty, decay), w)
        cases.append(
            Case(f"λ = {decay:g}", -stated * decay * w @ w, 2 * w @ velocity, -2 * decay * w @ w, scale=float(decay * w @ w))
        )
    return identity(cases)


def _penalty(decay: float, w: Tensor) -> Tensor:
    return decay / 2 * w @ w


def minibatch_loss(x: Tensor, targets: Tensor, w: Tensor, statistics: str, power: float) -> Callable[[slice], Map]:
    """Mini-batch → its loss as a function of the weights of a BN neuron, ε = 0.

    statistics: "batch", or "data" for those of all data at w, held fixed. power: of σ in BN, 1 as it should be.
    """
    whole = x @ w

    def of_batch(chosen: slice) -> Map:
        def loss(p: Tensor) -> Tensor:
            z = x[chosen] @ p
            own = standardize(z, 0, 0.0) * z.std(correction=0) ** (1 - power)
            hat = own if statistics == "batch" else (z - whole.mean()) / whole.std(correction=0)
            return (hat.tanh() - targets[chosen]).square().mean()

        return loss

    return of_batch


@claim("A-R5.1")
def minibatch_radial_gradient(
    generator: torch.Generator, stated: float = VISIBLE, statistics: str = "batch", power: float = 1.0
) -> Ruling:
    """Cosines of w and the gradients of mini-batches of a BN neuron, ε = 0. stated: the cosine that would count as a component.

    statistics: "data" normalizes each batch with the statistics of all data, held fixed; then there is one. power: of σ in BN.
    """
    x, targets, w = normal(generator, 200, 5), normal(generator, 200), normal(generator, 5)
    of_batch, effects, grown = minibatch_loss(x, targets, w, statistics, power), {}, 0.0
    for size in (4, 10, 40):
        for start in range(0, 200, size):
            slope = gradient(of_batch(slice(start, start + size)), w)
            effects[f"batch of {size} from {start}"] = abs(float(slope @ w / (slope.norm() * w.norm())))
            growth = float((w - 0.1 * slope).norm() ** 2 - w.norm() ** 2) / float(0.01 * slope @ slope)
            grown = max(grown, abs(growth - 1))
    small = 1e-2 * w
    slope = gradient(lambda p: (standardize(x @ p, 0).tanh() - targets).square().mean(), small)
    cosine = abs(float(slope @ small / (slope.norm() * small.norm())))
    known = {"largest error of the growth η²‖∇L‖²": grown, "cosine at ε = 1e-5, σ about 0.01‖w‖": cosine}
    return presence(effects, stated, grown < VISIBLE, **known)
