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
from normscope.certify.uses import Use, enters_as_it_stands, sharing_memory, uses_of_parameters
from normscope.core.bracket import Bracket, Certificate, Step
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, InternalError, boundary
from normscope.core.magnitude import INFINITY, ONE, ZERO, Magnitude, root_sum_square
from normscope.core.randomness import generator_of
from normscope.core.region import Region
from normscope.graph.graph import Constant, Node
from normscope.graph.trace import chosen_output
from normscope.operators.dense import frobenius_norm
from normscope.rules.convolution import convolution_of
from normscope.rules.normalizers import elements, largest_output, normalizer_of

VISIBLE = 1e-4  # constants of a float32 model are rounded to float32
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
    behind, nodes = _behind(context), {node.name: node for node in graph}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    called = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[str, list[Sensitivity]] = {name: [] for name in first.values()}
    for name, other in sharing_memory(model).items():
        found[name].append(Sensitivity(name, INFINITY, INFINITY, INFINITY, f"it shares memory with {other}"))
    for use in uses_of_parameters(model, Call.of(example).samples(slice(0, 1)), graph.output.name):
        node = nodes.get(use.reader)
        follows = INFINITY if node is None else behind[node] * loss_constant
        entering, reason = (INFINITY, NO_RULE) if node is None else _through(context, node, use)
        bound = follows * entering
        for name in dict.fromkeys(called[name] for name in use.parameters):
            found[name].append(Sensitivity(name, bound, follows, entering, reason if bound == INFINITY else ""))
    rows = [_added(several) if several else Sensitivity(name, ZERO, ZERO, ZERO, UNUSED) for name, several in found.items()]
    _check(rows, _Derivative(model, example, region, output), loss_constant)
    return sorted(rows, key=lambda row: row.bound, reverse=True)


def _through(context: Composition, node: Node, use: Use) -> tuple[Magnitude, str]:
    """The largest norm of what multiplies a parameter in one of its uses, and why it is infinite."""
    constant = node.args[use.position] if use.position is not None and use.position < len(node.args) else None
    for weight, entering, reason in _entering(context, node):
        if weight is constant and use.copies is not None and enters_as_it_stands(use, weight):
            return entering * math.sqrt(use.copies) * (1 + 2**-50), reason
    return INFINITY, NO_RULE


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
    return Bracket(_Derivative(model, example, region, output, generator).norm(), upper, None, Certificate(steps, reason), steps)


class _Derivative:
    """∂ output/∂ parameters at one generic input near the middle of the region or the example, where no unit is at its kink."""

    def __init__(
        self,
        model: torch.nn.Module,
        example: Example,
        region: Region | None,
        output: str | int | None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.generator = generator_of(generator)
        twin = copy.deepcopy(model).double().eval()
        self.parameters = {name: parameter.requires_grad_(True) for name, parameter in twin.named_parameters()}
        call = Call.of(example).samples(slice(0, 1))
        floats = iter(part[None] for part in region.middle) if region is not None else iter(call.floats())
        reach = 1e-3 * (region.reach if region is not None else max(float(part.abs().max()) for part in call.floats()))

        def generic(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()):
                return value
            place = next(floats).to(torch.float64)
            noise = torch.randn(place.shape, generator=self.generator, dtype=torch.float64)
            return place + noise * (reach / max(float(torch.linalg.vector_norm(noise)), 1.0))

        outputs = twin(*map(generic, call.args), **{name: generic(value) for name, value in call.kwargs.items()})
        self.output = chosen_output(outputs, output).reshape(-1)

    def along(self, ways: int) -> dict[str, torch.Tensor]:
        """For each parameter that the output depends on, rows of its derivative along orthonormal directions of the output."""
        drawn = torch.randn(self.output.numel(), ways, generator=self.generator, dtype=torch.float64)
        found: dict[str, list[torch.Tensor]] = {}
        for way in torch.linalg.qr(drawn)[0].T if self.output.requires_grad else ():
            slopes = torch.autograd.grad(self.output, [*self.parameters.values()], way, retain_graph=True, allow_unused=True)
            for name, slope in zip(self.parameters, slopes, strict=True):
                if slope is not None:
                    found.setdefault(name, []).append(slope.reshape(-1))
        return {name: torch.stack(rows) for name, rows in found.items()}

    def norm(self) -> Magnitude:
        """A lower bound on the norm of the derivative in all parameters together."""
        rows = [*self.along(min(ROWS, self.output.numel())).values()]
        norm = float(torch.linalg.matrix_norm(torch.cat(rows, 1), 2)) * (1 - 1e-9) if rows else 0.0
        return Magnitude(norm) if math.isfinite(norm) else ZERO


def _check(rows: Sequence[Sensitivity], derivative: _Derivative, loss_constant: float) -> None:
    """Raise if a derivative along one direction of the output exceeds its bound by more than rounding."""
    slopes = derivative.along(min(1, derivative.output.numel()))
    for row in rows:
        norm = frobenius_norm(slopes[row.parameter].nan_to_num(0, 0, 0)) if row.parameter in slopes else ZERO
        if norm * loss_constant > row.bound * (1 + VISIBLE):
            raise InternalError(f"a derivative of {norm:.17} in {row.parameter} exceeds the certified bound {row.bound:.17}")


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
