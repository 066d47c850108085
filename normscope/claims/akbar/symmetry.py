"""Akbar, Section 4: what leaves the output of a normalized layer unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from normscope.claims.calculus import EPSILON, gradient, jacobian, normal, scalar, standardize
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, constant, identity, presence

FACTORS = (1e-3, 0.1, 10.0, 1e3)
INPUTS, OUTPUTS, BATCH = 5, 4, 12
BATCH_AXIS, LAYER_AXIS = 0, -1
VISIBLE = 1e-6  # a relative change that counts


@dataclass(frozen=True)
class NormalizedLayer:
    """a = γ · normalize(xWᵀ + b) + β, along the batch (BN) or along the features (LN)."""

    weight: Tensor
    bias: Tensor
    gamma: Tensor
    beta: Tensor
    axis: int

    def __call__(self, x: Tensor, epsilon: float = 0.0) -> Tensor:
        return self.gamma * standardize(x @ self.weight.T + self.bias, self.axis, epsilon) + self.beta

    def scaled(self, c: float | Tensor) -> NormalizedLayer:
        """(W, b) → (cW, cb); a tensor c has one factor per neuron."""
        rows = c[:, None] if isinstance(c, Tensor) else c
        return replace(self, weight=rows * self.weight, bias=c * self.bias)


def random_layer(generator: torch.Generator, axis: int) -> NormalizedLayer:
    weight = normal(generator, OUTPUTS, INPUTS)
    bias, gamma, beta = normal(generator, 3, OUTPUTS)
    return NormalizedLayer(weight, bias, gamma, beta, axis)


Change = Callable[[NormalizedLayer, float], NormalizedLayer]


def scale_all(layer: NormalizedLayer, c: float) -> NormalizedLayer:
    """(W, b) → (cW, cb)."""
    return layer.scaled(c)


def scale_and_divide_gamma(layer: NormalizedLayer, c: float) -> NormalizedLayer:
    """(W, b, γ) → (cW, cb, γ/c)."""
    return replace(layer.scaled(c), gamma=layer.gamma / c)


def invariance_cases(generator: torch.Generator, axis: int, stated: Change, corrected: Change | None = None) -> list[Case]:
    """The output of the changed layer against that of the layer, at ε = 0."""
    cases = []
    for c in FACTORS:
        layer, x = random_layer(generator, axis), normal(generator, BATCH, INPUTS)
        right = None if corrected is None else corrected(layer, c)(x)
        cases.append(Case(f"c = {c:g}", stated(layer, c)(x), layer(x), right))
    return cases


def defect(layer: NormalizedLayer, x: Tensor, c: float) -> float:
    """How much the output changes with ε = 1e-5 when (W, b) is scaled by c."""
    before = layer(x, EPSILON)
    return float((layer.scaled(c)(x, EPSILON) - before).norm() / before.norm())


@claim("A-P4.1")
def batch_norm_scale_invariance(generator: torch.Generator, stated: Change = scale_all) -> Ruling:
    """ẑ = (z − μ)/σ has degree 0 in (W, b), at ε = 0 and with the statistics of the batch; also one factor per neuron.

    With ε > 0 the relative defect is about ε/(σ² + ε), which matters when weights shrink. In eval mode, with fixed statistics, the
    output scales with the weights: it is no symmetry there.
    """
    x, layer = normal(generator, BATCH, INPUTS), random_layer(generator, BATCH_AXIS)
    factors = 10 ** normal(generator, OUTPUTS)
    cases = invariance_cases(generator, BATCH_AXIS, stated)
    cases.append(Case("one factor per neuron", layer.scaled(factors)(x), layer(x)))
    z = x @ layer.weight.T + layer.bias
    fixed = layer.gamma * (10 * z - z.mean(0)) / z.std(0, correction=0)
    moved = float((fixed + layer.beta - layer(x)).norm() / layer(x).norm())
    defects = {f"defect at ε = 1e-5, c = {c:g}": defect(layer, x, c) for c in (10.0, 1e-3)}
    return identity(cases, **defects, **{"change in eval mode, c = 10": moved})


@claim("A-P4.1-gamma")
def batch_norm_scale_with_gamma(generator: torch.Generator, stated: Change = scale_and_divide_gamma) -> Ruling:
    """ẑ does not change, so a = γẑ + β becomes γẑ/c + β."""
    return identity(invariance_cases(generator, BATCH_AXIS, stated, scale_all))


def whole_layers(layers: int, neurons: int) -> int:
    """(ℝ⁺)^k: one scale for each of k layers."""
    return layers


@claim("A-S4.1-group")
def scale_group(generator: torch.Generator, stated: Callable[[int, int], int] = whole_layers) -> Ruling:
    """Two layers with BN and tanh, no biases: the nullity of the Jacobian of the outputs in all weights, at ε = 0."""
    cases = []
    for widths in ((3, 4, 2), (5, 2, 6)):
        x, sizes = normal(generator, 60, widths[0]), [after * before for before, after in pairwise(widths)]

        def outputs(vector: Tensor, x: Tensor = x, widths: tuple[int, ...] = widths, sizes: list[int] = sizes) -> Tensor:
            for part, (before, after) in zip(vector.split(sizes), pairwise(widths), strict=True):
                x = standardize(x @ part.reshape(after, before).T, BATCH_AXIS, 0.0).tanh()
            return x

        true, neurons = nullity(jacobian(outputs, normal(generator, sum(sizes)))), sum(widths[1:])
        cases.append(Case(f"widths {widths}", scalar(stated(len(sizes), neurons)), scalar(true), scalar(neurons)))
    return identity(cases)


@claim("A-S9.1-bias")
def bias_before_batch_norm(generator: torch.Generator, statistics: str = "batch", removed: float = 1.0) -> Ruling:
    """The output of a layer with BN with and without its bias. statistics: "fixed" keeps the mean from before; the bias counts.

    removed: the part of the bias that BN's mean takes off.
    """
    effects = {}
    for size in (0.1, 1.0, 100.0):
        layer, x = random_layer(generator, BATCH_AXIS), normal(generator, BATCH, INPUTS)
        biased, plain = replace(layer, bias=size * layer.bias), replace(layer, bias=0 * layer.bias)
        z = x @ plain.weight.T
        fixed = biased.gamma * (z + biased.bias - z.mean(0)) / z.std(0, correction=0) + biased.beta
        left = biased.gamma * (1 - removed) * biased.bias / z.std(0, correction=0)
        output = biased(x) + left if statistics == "batch" else fixed
        effects[f"bias of size {size:g}"] = float((output - plain(x)).norm() / plain(x).norm())
    return presence(effects, VISIBLE, max(effects.values()) < VISIBLE)


def radial(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return weight, bias


@claim("A-C4.1.1")
def gradient_is_orthogonal(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = radial
) -> Ruling:
    """The derivative of L along c ↦ (cW, cb) at c = 1, as a cosine, for a loss with a ReLU and a random readout after the layer."""
    cases = []
    for trial in range(4):
        layer, x = random_layer(generator, BATCH_AXIS), normal(generator, BATCH, INPUTS)
        slope = layer_gradient(layer, x, generator)
        direction = torch.cat([part.flatten() for part in stated(layer.weight, layer.bias)])
        cases.append(Case(f"network {trial + 1}", scalar(0.0), slope @ direction / (slope.norm() * direction.norm()), scale=1.0))
    return identity(cases)


def layer_gradient(layer: NormalizedLayer, x: Tensor, generator: torch.Generator) -> Tensor:
    """∇ of a random loss of relu(layer(x)) with respect to (W, b), as one vector."""
    readout, targets = normal(generator, OUTPUTS), normal(generator, len(x))
    return gradient(lambda p: (with_parameters(layer, p)(x).relu() @ readout - targets).square().mean(), parameters(layer))


def parameters(layer: NormalizedLayer) -> Tensor:
    return torch.cat([layer.weight.flatten(), layer.bias])


def with_parameters(layer: NormalizedLayer, vector: Tensor) -> NormalizedLayer:
    return replace(layer, weight=vector[: -len(layer.bias)].reshape(layer.weight.shape), bias=vector[-len(layer.bias) :])


def scale_and_shift(layer: NormalizedLayer, c: float) -> NormalizedLayer:
    """(W, b) → (cW, cb + c)."""
    return replace(layer.scaled(c), bias=c * layer.bias + c)


@claim("A-P4.2")
def layer_norm_scale_invariance(generator: torch.Generator, stated: Change = scale_and_shift) -> Ruling:
    """ẑ has degree 0 in (W, b) jointly at ε = 0. One neuron alone may not be scaled; RMSNorm keeps the scale but not the shift."""
    layer, x = random_layer(generator, LAYER_AXIS), normal(generator, BATCH, INPUTS)
    one = torch.ones(OUTPUTS, dtype=torch.float64)
    one[0] = 10
    alone = float((layer.scaled(one)(x) - layer(x)).norm() / layer(x).norm())
    z = x @ layer.weight.T + layer.bias
    shifted = float((_rms(z + 1) - _rms(z)).norm() / _rms(z).norm())
    return identity(
        invariance_cases(generator, LAYER_AXIS, stated),
        **{"change when one neuron is scaled": alone, "change of RMSNorm by a shift": shifted},
    )


def weight_of(v: Tensor, g: Tensor) -> Tensor:
    """w = g v/‖v‖ of weight normalization."""
    return g * v / v.norm()


def weight_norm_output(x: Tensor, vector: Tensor) -> Tensor:
    """x·w with (v, g) in one vector."""
    return x @ weight_of(vector[:-1], vector[-1])


@claim("A-P4.3")
def weight_norm_scale_invariance(
    generator: torch.Generator, stated: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = lambda v, g, c: (c * v, g / c)
) -> Ruling:
    """v/‖v‖ has degree 0 in v: the factor 1/α on g is left over. The proof divides by ‖v‖ where it should by ‖αv‖."""
    cases = []
    for c in FACTORS:
        v, g = normal(generator, 6), normal(generator, 1).abs()
        cases.append(Case(f"α = {c:g}", weight_of(*stated(v, g, c)), weight_of(v, g), weight_of(c * v, g)))
    return identity(cases)


def table_of_freedoms(kind: str, inputs: int) -> int:
    """Table 1: scale and shift for BN (a neuron) and LN (a layer), scale for WN."""
    return {"BN": 2, "LN": 2, "WN": 1}[kind]


def freedoms(kind: str, inputs: int) -> int:
    """What is free: for LN also W → W + 1vᵀ."""
    return {"BN": 2, "LN": 2 + inputs, "WN": 1}[kind]


@claim("A-Tab1")
def degrees_of_freedom(generator: torch.Generator, stated: Callable[[str, int], int] = table_of_freedoms) -> Ruling:
    """The nullity of the Jacobian of the normalized output in the parameters, at ε = 0 on more samples than parameters."""
    cases = []
    for inputs in (3, 6):
        x = normal(generator, 60, inputs)
        neuron = _jacobian_of_layer(x, normal(generator, 1, inputs), normal(generator, 1), BATCH_AXIS)
        layer = _jacobian_of_layer(x, normal(generator, 5, inputs), normal(generator, 5), LAYER_AXIS)
        vector = jacobian(partial(weight_norm_output, x), normal(generator, inputs + 1))
        for kind, matrix in (("BN", neuron), ("LN", layer), ("WN", vector)):
            right = scalar(freedoms(kind, inputs))
            cases.append(Case(f"{kind}, {inputs} inputs", scalar(stated(kind, inputs)), scalar(nullity(matrix)), right))
    return constant(cases, least=True)


def nullity(matrix: Tensor) -> int:
    return matrix.shape[1] - int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


def _jacobian_of_layer(x: Tensor, weight: Tensor, bias: Tensor, axis: int) -> Tensor:
    ones = torch.ones_like(bias)
    layer = NormalizedLayer(weight, bias, ones, 0 * ones, axis)
    return jacobian(lambda p: with_parameters(layer, p)(x), parameters(layer))


def _rms(z: Tensor) -> Tensor:
    return z / z.square().mean(-1, keepdim=True).sqrt()
