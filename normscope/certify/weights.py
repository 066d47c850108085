"""How far the output can move with the weights (Than 2025, Theorem 12), parameter by parameter.

For a layer y = W h the output is R-Lipschitz in y, with R the constant of everything behind the layer, and
‖ΔW h‖ ≤ ‖ΔW‖ ‖h‖, so its derivative in W has norm at most R · sup‖h‖: finite where what enters the layer is bounded, by a
region or by a normalizer. Statistics of BN are held fixed, as in eval mode. A parameter that is used in several places
has the sum of their bounds, which is then a statement about the derivative at the present weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import Composition
from normscope.core.bracket import Bracket, Certificate, Step
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, boundary
from normscope.core.magnitude import INFINITY, ONE, ZERO, Magnitude, root_sum_square
from normscope.core.region import Region
from normscope.graph.graph import Constant, Node
from normscope.graph.trace import chosen_output
from normscope.rules.convolution import convolution_of
from normscope.rules.normalizers import elements, largest_output, normalizer_of

ROWS = 16  # directions of the output along which a derivative in the weights is taken
NO_RULE = "it enters in a way that has no rule for weights (a parametrization, or an operation other than a layer)"
UNUSED = "the output does not depend on it"


@dataclass(frozen=True)
class Sensitivity:
    """‖∂ output/∂ parameter‖ ≤ bound for every input (of the region); `reason` says why it is infinite or unknown."""

    parameter: str
    bound: Magnitude
    behind: Magnitude  # the constant of what follows the layer, R
    entering: Magnitude  # the largest norm of what multiplies the parameter
    reason: str = ""


@boundary
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
    behind, names = _behind(context), _Names(model)
    found: dict[str, list[Sensitivity]] = {name: [] for name, _ in model.named_parameters()}
    for name in names.among(graph.absorbed):
        found[name].append(Sensitivity(name, INFINITY, INFINITY, INFINITY, NO_RULE))
    for node in graph:
        follows = behind[node] * loss_constant
        counted = {id(constant): (entering, reason) for constant, entering, reason in _entering(context, node)}
        for constant in node.constants:
            known = counted.get(id(constant)) if names.is_one(constant) else None
            entering, reason = known or (INFINITY, NO_RULE)
            bound = follows * entering
            for name in names.among(constant.sources):
                found[name].append(Sensitivity(name, bound, follows, entering, reason if bound == INFINITY else ""))
    rows = [_added(several) if several else Sensitivity(name, ZERO, ZERO, ZERO, UNUSED) for name, several in found.items()]
    return sorted(rows, key=lambda row: row.bound, reverse=True)


class _Names:
    """Which parameters of a model the constants of its graph are made from; a tied parameter goes by the first of its names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.first = {name: first[id(parameter)] for name, parameter in self.parameters.items()}

    def among(self, sources: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self.first[name] for name in sources if name in self.first))

    def is_one(self, constant: Constant) -> bool:
        """Whether it is one parameter or a part of it as it stands: no number is computed, none is there twice."""
        if len(constant.sources) != 1 or constant.sources[0] not in self.parameters:
            return False
        value, parameter = constant.value, self.parameters[constant.sources[0]]
        repeats = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
        return value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() and not repeats


def weight_bracket(
    model: torch.nn.Module,
    example: Example,
    region: Region | None = None,
    output: str | int | None = None,
    generator: torch.Generator | None = None,
) -> Bracket:
    """The derivative of the output in all parameters together, at the present weights: its largest norm over the inputs.

    upper: √Σ of the squared bounds of `weight_sensitivities`. lower: the norm of that derivative at one input, near the middle
    of the region or the example, along at most `ROWS` directions of the output; no pair of points belongs to it.
    """
    rows = weight_sensitivities(model, example, region, output)
    steps = tuple(Step(row.parameter, row.parameter, "parameter", row.bound, "Than 2025, Theorem 12") for row in rows)
    reason = next((f"{row.parameter}: {row.reason}" for row in rows if row.bound == INFINITY), "")
    upper = root_sum_square(row.bound for row in rows).widened(1e-12)
    return Bracket(_derivative(model, example, region, output, generator), upper, None, Certificate(steps, reason), steps)


def _derivative(
    model: torch.nn.Module, example: Example, region: Region | None, output: str | int | None, generator: torch.Generator | None
) -> Magnitude:
    """A lower bound on ‖∂ output/∂ parameters‖ at one generic input, where no unit sits on its kink."""
    generator = generator or torch.Generator().manual_seed(0)
    twin = copy.deepcopy(model).double().eval()
    parameters = [parameter.requires_grad_(True) for parameter in twin.parameters()]
    call = Call.of(example).samples(slice(0, 1))
    floats = iter(part[None] for part in region.middle) if region is not None else iter(call.floats())
    reach = 1e-3 * (region.reach if region is not None else max(float(part.abs().max()) for part in call.floats()))

    def generic(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()):
            return value
        place = next(floats).to(torch.float64)
        noise = torch.randn(place.shape, generator=generator, dtype=torch.float64)
        return place + noise * (reach / max(float(torch.linalg.vector_norm(noise)), 1.0))

    outputs = twin(*map(generic, call.args), **{name: generic(value) for name, value in call.kwargs.items()})
    chosen = chosen_output(outputs, output).reshape(-1)
    rows = min(ROWS, chosen.numel())
    ways = torch.linalg.qr(torch.randn(chosen.numel(), rows, generator=generator, dtype=torch.float64))[0].T
    found = []
    for way in ways:
        slopes = torch.autograd.grad(chosen, parameters, way, retain_graph=True, allow_unused=True)
        found.append(torch.cat([slope.reshape(-1) for slope in slopes if slope is not None]))
    return Magnitude(float(torch.linalg.matrix_norm(torch.stack(found), 2)) * (1 - 1e-9))


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


def _entering(context: Composition, node: Node) -> list[tuple[Constant, Magnitude, str]]:
    """(weight, largest norm of what multiplies it, why that is infinite) for each weight of a layer node."""
    rows = []
    if len(node.inputs) == 1 and (node.op == "linear" or node.op.startswith("conv")) and isinstance(node.args[1], Constant):
        weight, bias = node.args[1], node.args[2]
        rows.append((weight, _input_size(context, node), "what enters the layer is unbounded; give a region"))
        if isinstance(bias, Constant):
            rows.append((bias, Magnitude(math.sqrt(math.prod(node.shape) / max(bias.value.numel(), 1))), ""))
    normalizer = normalizer_of(node)
    if normalizer is not None and node.op != "standardize" and len(node.inputs) == 1:
        scale, shift = node.args[2 if node.op in ("layer_norm", "group_norm", "rms_norm") else 1], None
        if node.op != "rms_norm":
            shift = node.args[3 if node.op in ("layer_norm", "group_norm") else 2]
        count = math.prod(node.shape) / max(scale.value.numel() if isinstance(scale, Constant) else 1, 1)
        if isinstance(scale, Constant):
            size = math.inf if normalizer.fixed else largest_output(normalizer, elements(node, normalizer)) * math.sqrt(count)
            if normalizer.fixed:  # the output is γ z + β with z affine in the input: bounded by the values' bounds
                size = _standardized_size(context, node) * math.sqrt(count)
            rows.append((scale, Magnitude(size), "what enters the normalizer is unbounded; give a region"))
        if isinstance(shift, Constant):
            rows.append((shift, Magnitude(math.sqrt(count)), ""))
    return rows


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
