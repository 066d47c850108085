"""How far the output can move with the weights (Than 2025, Theorem 12), parameter by parameter.

For a layer y = W h the output is R-Lipschitz in y, with R the constant of everything behind the layer, and
‖ΔW h‖ ≤ ‖ΔW‖ ‖h‖, so its derivative in W has norm at most R · sup‖h‖: finite where what enters the layer is bounded, by a
region or by a normalizer. Statistics of BN are held fixed, as in eval mode. A parameter that is used in several places
has the sum of their bounds, which is then a statement about the derivative at the present weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope.certify.lipschitz import certifiable_graph
from normscope.certify.upper import Composition
from normscope.core.data import Example
from normscope.core.errors import InputError
from normscope.core.magnitude import INFINITY, ONE, ZERO, Magnitude
from normscope.core.region import Region
from normscope.graph.graph import Constant, Node
from normscope.rules.convolution import convolution_of
from normscope.rules.normalizers import elements, largest_output, normalizer_of


@dataclass(frozen=True)
class Sensitivity:
    """‖∂ output/∂ parameter‖ ≤ bound for every input (of the region); `reason` says why it is infinite or unknown."""

    parameter: str
    bound: Magnitude
    behind: Magnitude  # the constant of what follows the layer, R
    entering: Magnitude  # the largest norm of what multiplies the parameter
    reason: str = ""


def weight_sensitivities(
    model: torch.nn.Module,
    example: Example,
    region: Region | None = None,
    output: str | int | None = None,
    loss_constant: float = 1.0,
) -> list[Sensitivity]:
    """A certified bound on the sensitivity of the output to every parameter, largest first.

    loss_constant: the Lipschitz constant of a loss of the output, where the loss is meant: 1 for a margin in one
    coordinate, √2 for cross-entropy on logits, √outputs for the ℓ1 loss (Than's Corollary 14, corrected).
    """
    if not loss_constant >= 0:
        raise InputError(f"a loss constant is a number ≥ 0, not {loss_constant}")
    graph = certifiable_graph(model, example, "eval", output)
    context = Composition(graph, region=region)
    context.links()
    behind = _behind(context)
    found: dict[str, list[Sensitivity]] = {}
    for node in graph:
        for name, entering, reason in _entering(context, node):
            follows = behind[node] * loss_constant
            bound = follows * entering
            why = reason if bound == INFINITY else ""
            found.setdefault(name, []).append(Sensitivity(name, bound, follows, entering, why))
    rows = [_added(several) for several in found.values()]
    missing = [name for name, _ in model.named_parameters() if name not in found]
    rows += [Sensitivity(name, *_unknown(name, context)) for name in missing]
    return sorted(rows, key=lambda row: row.bound, reverse=True)


def _unknown(name: str, context: Composition) -> tuple[Magnitude, Magnitude, Magnitude, str]:
    used = any(name in node.parameters for node in context.graph)
    if not used:
        return ZERO, ZERO, ZERO, "the output does not depend on it"
    return (
        INFINITY,
        INFINITY,
        INFINITY,
        "it enters in a way that has no rule for weights (a parametrization, or an operation other than a layer)",
    )


def _added(several: list[Sensitivity]) -> Sensitivity:
    first = several[0]
    if len(several) == 1:
        return first
    bound = ZERO
    for one in several:
        bound = bound + one.bound
    reason = next((one.reason for one in several if one.reason), f"used in {len(several)} places")
    return Sensitivity(first.parameter, bound, max(s.behind for s in several), max(s.entering for s in several), reason)


def _behind(context: Composition) -> dict[Node, Magnitude]:
    """The constant from every node to the output, by composing backwards, node by node."""
    behind = dict.fromkeys(context.graph.nodes, ZERO)
    behind[context.graph.output] = ONE
    for node in reversed(context.graph.nodes):
        if node.op == "input" or not behind[node]:
            continue
        for source, factor in zip(node.inputs, context.gain(node).factors, strict=True):
            behind[source] = behind[source] + behind[node] * factor
    return behind


def _entering(context: Composition, node: Node) -> list[tuple[str, Magnitude, str]]:
    """(parameter, largest norm of what multiplies it, why that is infinite) for each parameter of a layer node."""
    rows = []
    if node.op == "linear" or node.op.startswith("conv"):
        weight, bias = node.args[1], node.args[2]
        channels = weight.value.shape[0] if node.op == "linear" else node.shape[1]
        positions = math.prod(node.shape) / max(channels, 1)
        if _direct(weight):
            rows.append((weight.sources[0], _input_size(context, node), "what enters the layer is unbounded; give a region"))
        if isinstance(bias, Constant) and _direct(bias):
            rows.append((bias.sources[0], Magnitude(math.sqrt(positions)), ""))
    normalizer = normalizer_of(node)
    if normalizer is not None and node.op != "standardize" and len(node.inputs) == 1:
        scale, shift = node.args[2 if node.op in ("layer_norm", "group_norm", "rms_norm") else 1], None
        if node.op != "rms_norm":
            shift = node.args[3 if node.op in ("layer_norm", "group_norm") else 2]
        count = math.prod(node.shape) / max(scale.value.numel() if isinstance(scale, Constant) else 1, 1)
        if isinstance(scale, Constant) and _direct(scale):
            size = math.inf if normalizer.fixed else largest_output(normalizer, elements(node, normalizer)) * math.sqrt(count)
            if normalizer.fixed:  # the output is γ z + β with z affine in the input: bounded by the values' bounds
                size = _standardized_size(context, node) * math.sqrt(count)
            rows.append((scale.sources[0], Magnitude(size), "what enters the normalizer is unbounded; give a region"))
        if isinstance(shift, Constant) and _direct(shift):
            rows.append((shift.sources[0], Magnitude(math.sqrt(count)), ""))
    return rows


def _direct(constant: Constant) -> bool:
    """Whether a constant is one parameter as it stands, not computed from others."""
    return len(constant.sources) == 1


def _standardized_size(context: Composition, node: Node) -> float:
    """sup |(x − μ)/√(v + ε)| of an eval-mode BN."""
    bounds, normalizer = context.interval(node.input), normalizer_of(node)
    assert normalizer is not None and normalizer.running_mean is not None and normalizer.running_variance is not None
    if not bounds.finite:
        return math.inf
    shape = (1, -1, *[1] * (len(node.shape) - 2))
    mean, scale = normalizer.running_mean.reshape(shape), (normalizer.running_variance + normalizer.epsilon).rsqrt().reshape(shape)
    return float(torch.maximum((bounds.low - mean).abs(), (bounds.high - mean).abs()).mul(scale).max()) * (1 + 1e-12)


def _input_size(context: Composition, node: Node) -> Magnitude:
    """sup of the norm of the map ΔW ↦ ΔW ∗ h: ‖h‖ for a matrix, at most √taps ‖h‖ for a kernel."""
    source = node.input
    bounds, middle = context.interval(source), context.center(source)
    tokens = math.prod(source.shape[:-1]) if node.op == "linear" else 1
    sizes = [float(torch.linalg.vector_norm(torch.maximum(bounds.low.abs(), bounds.high.abs())))]
    if node.op == "linear":
        sizes.append(context.norm(source) * math.sqrt(tokens))
    if middle is not None:
        sizes.append(float(torch.linalg.vector_norm(middle)) + context.deviation(source))
    size = min(value for value in sizes if not math.isnan(value)) * (1 + 1e-9)
    taps = math.prod(convolution_of(node).taps) if node.op.startswith("conv") else 1
    return Magnitude(size * math.sqrt(taps))
