"""How far the output can move with the weights (Than 2025, Theorem 12), parameter by parameter.

For a layer y = W h the output is R-Lipschitz in y, with R the constant of everything behind the layer, and
‖ΔW h‖ ≤ ‖ΔW‖ ‖h‖, so its derivative in W has norm at most R · sup‖h‖: finite where what enters the layer is bounded, by a
region or by a normalizer. Statistics of BN are held fixed, as in eval mode. A parameter that is used in several places
has the sum of their bounds, which is then a statement about the derivative at the present weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.checking import refuse_contradicted
from normscope.certify.forms import AffineForms
from normscope.certify.links import LogRounding
from normscope.certify.passing import Pass
from normscope.certify.upper import checked_pass
from normscope.certify.uses import Use, enters_as_it_stands, sharing_memory, uses_of_parameters
from normscope.core.bracket import Bracket, Certificate, Step
from normscope.core.codec import logarithm, plain
from normscope.core.data import Call, Example
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, NormscopeError, Refusal, boundary, first_line
from normscope.core.magnitude import INFINITY, ONE, ZERO, Magnitude, root_sum_square, total
from normscope.core.randomness import generator_of
from normscope.core.region import Region
from normscope.core.rendering import RenderableType, Table
from normscope.core.result import ResultSequence
from normscope.core.rounding import above, exponent_of, length, times_power_of_two
from normscope.core.twins import twin_of
from normscope.core.vector_layout import movable
from normscope.graph.double import InDouble
from normscope.graph.graph import Constant, Graph, Node, cast
from normscope.graph.outputs import chosen_output
from normscope.graph.restoring import untouched
from normscope.operators.dense import frobenius_norm
from normscope.rules.normalizers import elements, largest_output
from normscope.rules.readings import LinearMap, Normalizer
from normscope.rules.registry import registry

VISIBLE = 1e-4  # constants of a float32 model are rounded to float32
DIFFERENCES = 1e-6  # relative: by how much a quotient of differences may be off its slope
STEPS = (1e-4, 1e-5, 1e-6)  # of those differences, relative to the parameters that move
ROWS = 16  # directions of the output along which a derivative in the weights is taken
SIDES = ("bound", "behind", "entering")
NO_RULE = "it enters in a way that has no rule for weights (a parametrization, or an operation other than a layer)"
UNCONFIRMED = "no lower bound: differences of the model's outputs are not what its derivative in the weights says"
UNUSED = "the output does not depend on it"
WHOLE = "whole numbers: there is no derivative in them"


@dataclass(frozen=True)
class Sensitivity:
    """‖∂ output/∂ parameter‖ ≤ bound for every input (of the region); `reason` says why it is infinite or unknown."""

    parameter: str
    bound: Magnitude
    behind: Magnitude  # the constant of what follows the layer, R
    entering: Magnitude  # the largest norm of what multiplies the parameter
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Sensitivities(ResultSequence[Sensitivity]):
    """The sensitivity of the output to every parameter, largest first."""

    schema = "normscope.sensitivities/1"

    rows: tuple[Sensitivity, ...]

    def to_dict(self) -> dict[str, Any]:
        """The logarithms of every bound and of its factors."""
        logs = [{f"{side}_log10": plain(getattr(row, side).log10) for side in SIDES} for row in self.rows]
        rows = [{"parameter": row.parameter, **log, "reason": row.reason} for row, log in zip(self.rows, logs, strict=True)]
        return {"schema": self.schema, "parameters": rows}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Sensitivities:
        """The bounds that `to_dict` described."""
        rows = content["parameters"]
        sides = [{side: logarithm(row[f"{side}_log10"]) for side in SIDES} for row in rows]
        return cls(tuple(Sensitivity(row["parameter"], **own, reason=row["reason"]) for row, own in zip(rows, sides, strict=True)))

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("parameter", overflow="fold")
        for title in ("‖∂out/∂W‖ ≤", "behind", "entering"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("reason", overflow="fold")
        for row in self.rows:
            table.add_row(row.parameter, str(row.bound), str(row.behind), str(row.entering), row.reason)
        return table


@earlier(positional=3)
@boundary
def weight_sensitivities(
    model: torch.nn.Module,
    example: Example,
    *,
    region: Region | None = None,
    output: str | int | None = None,
    loss_constant: float = 1.0,
) -> Sensitivities:
    """A certified bound on the sensitivity of the output to every parameter, largest first.

    region: a `Ball` or `Box` of inputs; None for all of them.
    output: name or position of the output that is meant, where the model returns several.
    loss_constant: the Lipschitz constant of a loss of the output, where the loss is meant: 1 for a margin in one
    coordinate, √2 for cross-entropy on logits, √outputs for the ℓ1 loss (Than's Corollary 14, corrected).
    """
    if not loss_constant >= 0:
        raise InputError(f"a loss constant must be a number ≥ 0, got {loss_constant}")
    graph = certifiable_graph(model, example, "eval", output)
    return Sensitivities(tuple(_sensitivities(graph, model, example, region, output, loss_constant)))


def _sensitivities(
    graph: Graph,
    model: torch.nn.Module,
    example: Example,
    region: Region | None,
    output: str | int | None,
    loss_constant: float = 1.0,
    forms: AffineForms | None = None,
) -> list[Sensitivity]:
    facts = checked_pass(graph, region, forms)
    behind, nodes = _behind(facts), {node.name: node for node in graph}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    called = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[str, list[Sensitivity]] = {name: [] for name in first.values()}
    for name, other in sharing_memory(model).items():
        found[name].append(Sensitivity(name, INFINITY, INFINITY, INFINITY, f"it shares memory with {other}"))
    for use in uses_of_parameters(model, Call.of(example).samples(slice(0, 1)), graph.output.name):
        node = nodes.get(use.reader)
        follows = INFINITY if node is None else behind[node] * loss_constant
        entering, reason = (INFINITY, NO_RULE) if node is None else _through(facts, node, use)
        bound = follows * entering
        for name in dict.fromkeys(called[name] for name in use.parameters):
            found[name].append(Sensitivity(name, bound, follows, entering, reason if bound == INFINITY else ""))
    whole = found.keys() - movable(model.named_parameters())
    found |= {name: [Sensitivity(name, ZERO, ZERO, ZERO, WHOLE)] for name in whole}
    rows = [_added(several) if several else Sensitivity(name, ZERO, ZERO, ZERO, UNUSED) for name, several in found.items()]
    with untouched(model):  # the twin's hooks are the model's
        _check(rows, _Derivative(graph, model, example, region, output), loss_constant)
    return sorted(rows, key=lambda row: row.bound, reverse=True)


def _through(facts: Pass, node: Node, use: Use) -> tuple[Magnitude, str]:
    """The largest norm of what multiplies a parameter in one of its uses, and why it is infinite."""
    constant = None if use.position is None else node.argument(use.position, "")
    for weight, entering, reason in _entering(facts, node):
        if weight is constant and use.copies is not None and enters_as_it_stands(use, weight):
            return entering * math.sqrt(use.copies), reason
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
    graph = certifiable_graph(model, example, "eval", output)
    forms = AffineForms(graph)
    rows = _sensitivities(graph, model, example, region, output, forms=forms)
    steps = tuple(Step(row.parameter, row.parameter, "parameter", row.bound, "Than 2025, Theorem 12") for row in rows)
    reason = next((f"{row.parameter}: {row.reason}" for row in rows if row.bound == INFINITY), "")
    upper = length_of([row.bound for row in rows])
    with untouched(model):
        found, told = _Derivative(graph, model, example, region, output, generator).norm()
    return Bracket(found, upper, None, Certificate(steps, reason), steps, (*graph.notes, *forms.notes, *told))


def length_of(bounds: Iterable[Magnitude]) -> Magnitude:
    """√Σ of their squares, rounded up; squares and roots only double and halve logarithms."""
    parts, rounding = list(bounds), LogRounding()
    found = root_sum_square(parts)
    rounding.add([part**2 for part in parts], found**2)
    return found.widened(rounding.relative)


class _Derivative:
    """∂ output/∂ parameters at one generic input near the middle of the region or the example, where no unit is at its kink.

    Of the model as it runs, but in float64 throughout: normalizers that compute in float32 by themselves would round too much.
    """

    def __init__(
        self, graph: Graph, model: torch.nn.Module, example: Example, region: Region | None, output: str | int | None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        self.generator = generator_of(generator)
        try:
            twin = twin_of(model)._apply(lambda value: cast(value, torch.float64)).eval()
        except Exception as error:  # of whatever the model holds
            causes = [f"the model cannot be copied: {type(error).__name__}: {first_line(error)}"]
            raise Refusal(
                "no bound in the weights: its check is the derivative of a copy of the model in float64", causes
            ) from error
        self.parameters = {name: value.requires_grad_(True) for name, value in movable(twin.named_parameters()).items()}
        call = Call.of(example).samples(slice(0, 1))
        floats = iter(part[None] for part in region.middle) if region is not None else iter(call.floats())
        reach = 1e-3 * (region.reach if region is not None else max(float(part.abs().max()) for part in call.floats()))

        def generic(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()):
                return value
            place = next(floats).to(torch.float64)
            noise = torch.randn(place.shape, generator=self.generator, dtype=torch.float64)
            return place + noise * (reach / max(float(torch.linalg.vector_norm(noise)), 1.0))

        args, kwargs = [generic(value) for value in call.args], {name: generic(value) for name, value in call.kwargs.items()}

        def run() -> torch.Tensor:
            with InDouble(graph.dtype) as mode:
                returned = chosen_output(twin(*args, **kwargs), output)
            return mode.double(returned).reshape(-1)

        self.run = run
        try:
            self.output = self.run()
        except NormscopeError:
            raise
        except Exception as error:  # the model's own code
            causes = [f"in float64 the model raises {type(error).__name__}: {first_line(error)}"]
            raise Refusal("no bound in the weights: its check is the model's derivative in float64", causes) from error

    def along(self, ways: int) -> dict[str, torch.Tensor]:
        """For each parameter that the output depends on, rows of its derivative along orthonormal directions of the output."""
        drawn = torch.randn(self.output.numel(), ways, generator=self.generator, dtype=torch.float64)
        self.ways = torch.linalg.qr(drawn)[0].T
        found: dict[str, list[torch.Tensor]] = {}
        for way in self.ways if self.output.requires_grad else ():
            slopes = torch.autograd.grad(self.output, [*self.parameters.values()], way, retain_graph=True, allow_unused=True)
            for name, slope in zip(self.parameters, slopes, strict=True):
                if slope is not None:
                    found.setdefault(name, []).append(slope.reshape(-1))
        return {name: torch.stack(rows) for name, rows in found.items()}

    def norm(self) -> tuple[Magnitude, Sequence[str]]:
        """A lower bound on the norm of the derivative in all parameters together, and what there is to say of it."""
        rows = self.along(min(ROWS, self.output.numel()))
        found = self.confirmed(rows)
        return found, [] if found or not any(bool(part.any()) for part in rows.values()) else [UNCONFIRMED]

    def confirmed(self, rows: Mapping[str, torch.Tensor]) -> Magnitude:
        """A lower bound on the norm of these rows that `along` gave; 0 where the model does not move as they say.

        They come from torch's backward, which is wrong for some operations; so along the direction of the parameters that moves
        the output most they are compared with differences of what runs forward.
        """
        matrix = torch.cat([*rows.values()], 1) if rows else torch.zeros(1, 0, dtype=torch.float64)
        if not bool(matrix.any()) or not bool(matrix.isfinite().all()):
            return ZERO
        scaled = times_power_of_two(matrix, -exponent_of(matrix))
        steepest = torch.linalg.eigh(scaled @ scaled.T).eigenvectors[:, -1] @ scaled
        direction = steepest / torch.linalg.vector_norm(steepest)
        image, changes = matrix @ direction, direction.split([part.shape[1] for part in rows.values()])
        kept = {name: self.parameters[name].detach().clone() for name in rows}
        weighed = [value.reshape(-1) * change for value, change in zip(kept.values(), changes, strict=True)]
        size = float(length(torch.cat(weighed))) or 1.0

        def moved(step: float) -> torch.Tensor:
            for (name, value), change in zip(kept.items(), changes, strict=True):
                self.parameters[name].data.copy_(value + step * change.reshape(value.shape))
            return self.ways @ self.run().detach()

        try:
            with torch.no_grad():
                for step in (size * relative for relative in STEPS):
                    seen = (moved(step) - moved(-step)) / (2 * step)
                    if frobenius_norm(seen - image) <= frobenius_norm(image) * DIFFERENCES:
                        return frobenius_norm(image).narrowed(2 * DIFFERENCES)
        except Exception:  # the model's own code, at other weights
            return ZERO
        finally:
            for name, value in kept.items():
                self.parameters[name].data.copy_(value)
        return ZERO


def _check(rows: Sequence[Sensitivity], derivative: _Derivative, loss_constant: float) -> None:
    """Raise if a derivative along one direction of the output exceeds its bound by more than rounding."""
    slopes = derivative.along(min(1, derivative.output.numel()))
    for row in rows:
        slope, most = slopes.get(row.parameter), row.bound.widened(VISIBLE)
        if slope is not None and frobenius_norm(slope.nan_to_num(0, 0, 0)) * loss_constant > most:
            found = derivative.confirmed({row.parameter: slope.nan_to_num(0, 0, 0)})
            refuse_contradicted("a derivative", found * loss_constant, most, f" in {row.parameter}")


def _added(several: list[Sensitivity]) -> Sensitivity:
    """The bounds of all uses of a parameter, rounded up."""
    reasons = [one.reason for one in several if one.reason]
    reason = reasons[0] if reasons else f"used in {len(several)} places" if len(several) > 1 else ""
    behind, entering, rounding = max(one.behind for one in several), max(one.entering for one in several), LogRounding()
    rounding.add([one.bound for one in several], behind, entering)
    bound = total(one.bound for one in several).widened(rounding.relative)
    return Sensitivity(several[0].parameter, bound, behind, entering, reason)


def _behind(facts: Pass) -> dict[Node, Magnitude]:
    """The constant from every node to the output, by composing backwards, node by node, and rounded up."""
    behind, rounding = dict.fromkeys(facts.graph.nodes, ZERO), LogRounding()
    behind[facts.graph.output] = ONE
    for node in reversed(facts.graph.nodes):
        if node.is_input or not behind[node]:
            continue
        factors = facts.gain(node).factors
        for source, factor in zip(node.inputs, factors, strict=True):
            behind[source] = behind[source] + behind[node] * factor
        rounding.add(factors, *(behind[source] for source in node.inputs))
    return {node: bound.widened(rounding.relative) for node, bound in behind.items()}


def _entering(facts: Pass, node: Node) -> list[tuple[Constant, Magnitude, str]]:
    """(weight, largest norm of what multiplies it, why that is infinite) for each weight of a layer node."""
    rows = []
    applied = registry.reading(node, LinearMap)
    if applied is not None and applied.fixed and (applied.plain or not applied.outputs):  # a vector is a matrix of one row
        assert isinstance(applied.weight, Constant)
        weight, bias = applied.weight, applied.bias
        rows.append((weight, _input_size(facts, node, applied), "what enters the layer is unbounded; give a region"))
        if isinstance(bias, Constant):
            rows.append((bias, Magnitude(math.sqrt(math.prod(node.shape) / max(bias.value.numel(), 1))), ""))
    normalizer = registry.reading(node, Normalizer)
    if normalizer is not None and not normalizer.by_hand and len(node.inputs) == 1:
        scale, shift = normalizer.gamma, normalizer.beta
        count = math.prod(node.shape) / max(scale.value.numel() if isinstance(scale, Constant) else 1, 1)
        if isinstance(scale, Constant):
            known = not normalizer.fixed  # else the output is γ z + β with z affine in the input
            size = largest_output(normalizer, elements(node, normalizer)) if known else _standardized_size(facts, node, normalizer)
            rows.append((scale, Magnitude(size * math.sqrt(count)), "what enters the normalizer is unbounded; give a region"))
        if isinstance(shift, Constant):
            rows.append((shift, Magnitude(math.sqrt(count)), ""))
    return rows


def _standardized_size(facts: Pass, node: Node, normalizer: Normalizer) -> float:
    """sup |(x − μ)/√(v + ε)| of an eval-mode BN."""
    bounds = facts.interval(node.input)
    assert normalizer.running_mean is not None and normalizer.running_variance is not None
    if not bounds.finite:
        return math.inf
    shape = (1, -1, *[1] * (len(node.shape) - 2))
    mean, scale = normalizer.running_mean.reshape(shape), (normalizer.running_variance + normalizer.epsilon).rsqrt().reshape(shape)
    return above(float(torch.maximum((bounds.low - mean).abs(), (bounds.high - mean).abs()).mul(scale).max()))


def _input_size(facts: Pass, node: Node, applied: LinearMap) -> Magnitude:
    """sup of the norm of the map ΔW ↦ ΔW ∗ h: ‖h‖ for a matrix, at most √taps ‖h‖ for a kernel."""
    source, middle = node.input, facts.center(node.input)
    sizes = [facts.interval(source).length]
    if applied.kernel is None and applied.input_axis == -1:
        sizes.append(facts.norm(source) * math.sqrt(math.prod(source.shape[:-1])))
    if middle is not None:
        sizes.append(float(length(middle)) + facts.deviation(source))
    return Magnitude(above(min(value for value in sizes if not math.isnan(value)) * math.sqrt(applied.taps)))
