"""Normalizers: what each divides by, and how much it can stretch.

LN on one set of d entries has J = diag(γ)(I − 11ᵀ/d − zzᵀ/d)/s with s = √(σ² + ε), so globally (σ → 0)
‖J‖ ≤ ‖diag(γ)(I − 11ᵀ/d)‖/√ε, and this is attained. RMSNorm has no centering. BN with running statistics is a fixed
scale a channel; with batch statistics it is LN over the batch, a channel at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from normscope.core.errors import NoConstant, Refusal
from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import FEW, UNDERFLOW, VANISHING, above, below, length
from normscope.graph.graph import Constant, Node
from normscope.operators.dense import spectral_norm
from normscope.rules.algebra import Fixed, Form, Forms
from normscope.rules.readings import Normalizer, Scaling, Sum
from normscope.rules.registry import Context, Gain, Rule, registry, rule
from normscope.rules.remainder import Remainder, Sets, Sizes

Read = TypeVar("Read")
BEND = 2 / math.sqrt(3)  # √d s² times the norm of a normalizer's second derivative, at most; it is attained

EPSILON = {"batch_norm": 7, "instance_norm": 7, "layer_norm": 4, "group_norm": 4, "rms_norm": 3, "standardize": 3}  # argument


def with_epsilon(node: Node, epsilon: float) -> Node:
    """The same normalizer with another ε."""
    place = EPSILON[node.op]
    args = (*node.args[:place], epsilon, *node.args[place + 1 :])
    return Node(node.name, node.op, node.target, args, node.kwargs, node.path, node.source, node.shape, node.dtype)


def completed(node: Node, users: Mapping[Node, Sequence[Node]]) -> Normalizer | None:
    """The normalizer that a node is; one written by hand has the γ that multiplies and the β that is added right behind it.

    users: the readers of every node of the graph.
    """
    normalizer = registry.reading(node, Normalizer)
    return normalizer if normalizer is None or not normalizer.by_hand else _with_affine(node, normalizer, users)[0]


def leaving(node: Node, users: Mapping[Node, Sequence[Node]]) -> Node:
    """The node at which a normalizer's output is complete, γ and β of one written by hand included."""
    normalizer = registry.reading(node, Normalizer)
    return node if normalizer is None or not normalizer.by_hand else _with_affine(node, normalizer, users)[1]


def _with_affine(node: Node, normalizer: Normalizer, users: Mapping[Node, Sequence[Node]]) -> tuple[Normalizer, Node]:
    scaling, last = _only(users[node], Scaling), node
    gamma = None if scaling is None else scaling.factor
    if isinstance(gamma, Node) or (isinstance(gamma, Constant) and gamma.sources):
        weight = gamma.double().flatten() if isinstance(gamma, Constant) else None
        normalizer, last = replace(normalizer, gamma=gamma, weight=weight), users[node][0]
    shift = _only(users[last], Sum)
    if shift is None or len(shift.terms) > 1 or not shift.plain:
        return normalizer, last
    return replace(normalizer, beta=shift.constant), users[last][0]


def _only(readers: Sequence[Node], kind: type[Read]) -> Read | None:
    return registry.reading(readers[0], kind) if len(readers) == 1 else None


@rule("center")
class Centering(Rule):
    """x − mean(x) is an orthogonal projection."""

    def gain(self, node: Node, context: Context) -> Gain:
        count = math.prod(node.shape[axis] for axis in node.args[1])
        return Gain.of(1 if count > 1 else 0, method="projection")

    def interval(self, node: Node, context: Context) -> Interval:
        bounds = context.interval(node.input)
        if not bounds.finite:
            return Interval.unbounded(node.shape)
        count = math.prod(node.shape[axis] for axis in node.args[1])
        return bounds + -bounds.summed(lambda side: side.mean(node.args[1], keepdim=True), count)

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.normalized(forms.of(node.input), node.args[1], centered=True, divides=False)


@rule("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "standardize")
class NormalizerRule(Rule):
    first_alone = "its scale or statistics depend on the input"

    def reading(self, node: Node) -> Normalizer | None:
        """None where its running statistics are computed: it neither takes its own nor is one fixed map."""
        computed = node.op in ("batch_norm", "instance_norm") and any(isinstance(part, Node) for part in node.args[3:5])
        return None if computed else self._normalizer(node)

    @staticmethod
    def _normalizer(node: Node) -> Normalizer:
        rank, epsilon = len(node.shape), node.args[EPSILON[node.op]]
        if node.op == "standardize":
            _, kind, axes, _, placement, _ = node.args
            return Normalizer(kind, epsilon, None, None, axes, placement=placement, by_hand=True)
        statistics: Sequence[Any] = (None, None)
        groups = 1
        if node.op in ("batch_norm", "instance_norm"):
            _, gamma, beta, *moving, own = node.args[:6]
            statistics = statistics if own else moving
            axes = (0, *range(2, rank)) if node.op == "batch_norm" else tuple(range(2, rank))
        elif node.op == "group_norm":
            _, groups, gamma, beta = node.args[:4]
            axes = tuple(range(2, rank))
        else:
            gamma, beta = node.args[2], node.args[3] if node.op == "layer_norm" else None
            axes = tuple(range(rank - len(node.args[1]), rank))
        kind = node.op.removesuffix("_norm")
        mean, variance = map(_value, statistics)
        return Normalizer(
            kind, float(epsilon), _value(gamma), _value(beta), axes, groups, mean, variance, "inside", gamma, beta, statistics[1]
        )

    def terms(self, node: Node) -> float:
        normalizer = self._normalizer(node)
        return 1 if normalizer.fixed else elements(node, normalizer)

    def gain(self, node: Node, context: Context) -> Gain:
        normalizer = self._normalizer(node)
        _check(node, normalizer)
        if normalizer.fixed:
            size = scale_interval(normalizer).magnitude
            if math.isinf(size):
                return Gain.infinite(node, "it divides by a running variance of 0 without ε; use ε > 0")
            return Gain.of(size, method="running statistics")
        if normalizer.kind == "batch" and not context.whole_batch:
            raise NoConstant(
                "batch statistics make every sample depend on the others",
                [node.label],
                'Use mode="eval" for running statistics, or mode="batch" for the whole batch as one input.',
            )
        scale = smallest_scale(node, normalizer, context)
        if scale <= 0:
            return Gain.infinite(node, "with ε = 0 a normalizer is not Lipschitz near zero variance; use ε > 0 or a smaller region")
        factor = Magnitude(self._shape_factor(node, normalizer))
        return Gain.of((factor / scale).raised(factor, scale), method="smallest variance")

    @staticmethod
    def _shape_factor(node: Node, normalizer: Normalizer) -> float:
        """‖diag(γ)(I − 11ᵀ/d)‖, the largest over what is normalized together; max|γ| without centering."""
        weight, count = normalizer.weight, elements(node, normalizer)
        if normalizer.centered and count == 1:
            return 0.0  # the output is the constant β
        if weight is None:
            return 1.0
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if not normalizer.centered or normalizer.kind in ("batch", "instance"):
            return largest
        if normalizer.kind == "layer":
            sets = weight.reshape(1, -1)
        else:
            positions = math.prod(node.shape[2:])
            sets = (
                weight.reshape(normalizer.groups, -1).repeat_interleave(positions, 1)
                if positions * weight.numel() <= 4096
                else None
            )
        if sets is None or sets.shape[1] > 1024:
            return largest
        centering = torch.eye(sets.shape[1], dtype=torch.float64) - 1 / sets.shape[1]
        return min(float(spectral_norm(sets[:, :, None] * centering)), largest)

    def interval(self, node: Node, context: Context) -> Interval:
        normalizer = self._normalizer(node)
        if normalizer.fixed:
            bounds = context.interval(node.input)
            if not bounds.finite:
                return Interval.unbounded(node.shape)
            mean, shift = (channel_tensor(node, normalizer, part, 0.0) for part in (normalizer.running_mean, normalizer.bias))
            scale = scale_interval(normalizer)
            scale = Interval(channel_tensor(node, normalizer, scale.low, 1.0), channel_tensor(node, normalizer, scale.high, 1.0))
            return (bounds + Interval(-mean, -mean)) * scale + Interval(shift, shift)
        size = largest_output(normalizer, elements(node, normalizer))
        radius = torch.full(node.shape, size, dtype=torch.float64)
        scale, shift = (channel_tensor(node, normalizer, *part) for part in ((normalizer.weight, 1.0), (normalizer.bias, 0.0)))
        return Interval.around(shift, above(scale.abs() * radius))

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """The derivative of u/s, s² = ‖u‖²/d + ε, is 2/(√3 √d s²)-Lipschitz where s is smallest (docs/laws.md)."""
        normalizer, reach = self._normalizer(node), context.deviation(node.input) + context.error(node.input)
        scale = smallest_scale(node, normalizer, context)
        if normalizer.placement != "inside" or scale <= 0 or not math.isfinite(reach):
            return None
        count = 1 if normalizer.kind == "l2" else max(elements(node, normalizer) - 1, 1)  # a sample variance divides by d − 1
        largest = 1.0 if normalizer.weight is None else float(normalizer.weight.abs().max())
        return (above(BEND / math.sqrt(count) * largest * reach / scale / scale) + UNDERFLOW,)

    def measured(self, node: Node) -> tuple[tuple[Sets, ...], ...]:
        normalizer = self._normalizer(node)
        if normalizer.fixed:
            return super().measured(node)
        if normalizer.kind == "group":
            return ((Sets(tuple(range(len(node.shape))), elements(node, normalizer)),),)
        return ((Sets.along(node.shape, normalizer.axes),),)

    def tokenwise(self, node: Node) -> bool:
        normalizer = self._normalizer(node)
        return not normalizer.by_channel and normalizer.axes == (len(node.shape) - 1,)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """`curvature`, one set that is normalized together at a time; from the middle half of it, by Taylor's theorem."""
        normalizer, middle = self._normalizer(node), context.center(node.inputs[0])
        sets = next(iter(self.measured(node)[0]), None)
        if sets is None or middle is None or normalizer.placement != "inside":
            return None
        reach, count = away.sets(node.input, sets), elements(node, normalizer)
        share = reach if normalizer.kind == "l2" else reach / math.sqrt(count)
        spread = known_spreads(normalizer, middle).reshape(-1)
        least = (below(spread, count + FEW) - above(share)).clamp(min=0)
        squared = below(least.square() + normalizer.epsilon)
        divided = 1 if normalizer.kind == "l2" else max(count - 1, 1)
        bend = above(BEND / math.sqrt(divided) * reach / squared)
        size = above(bend * (reach / 2 if moves is None else moves.sets(node.input, sets)))
        return Remainder(
            channel_tensor(node, normalizer, normalizer.weight, 1.0).abs(), sets.spread(size, node.shape), (sets, size)
        )

    def center_error(self, node: Node, context: Context) -> float:
        normalizer, middle = self._normalizer(node), context.center(node.input)
        divided = VANISHING if middle is None else float(known_spreads(normalizer, middle).min())
        return super().center_error(node, context) if divided or normalizer.epsilon > VANISHING else math.inf

    def computed_on_the_way(self, node: Node, context: Context) -> float:
        """With running statistics μγ/√(v + ε) and β, which may cancel each other."""
        normalizer = self._normalizer(node)
        if not normalizer.fixed or normalizer.running_mean is None:
            return 0.0
        shift = normalizer.running_mean.abs() * normalizer.affine[0].abs()
        shift = shift if normalizer.bias is None else shift + normalizer.bias.abs()
        return float(length(shift)) * math.sqrt(math.prod(node.shape) / max(shift.numel(), 1))

    def norm(self, node: Node, context: Context) -> float:
        """After LN or RMSNorm every token has norm at most √d max|γ| + ‖β‖."""
        normalizer = self._normalizer(node)
        last = len(node.shape) - 1
        if normalizer.by_channel or normalizer.axes != (last,):
            return math.inf
        size = 1.0 if normalizer.kind == "l2" else math.sqrt(node.shape[last])
        largest = 1.0 if normalizer.weight is None else float(normalizer.weight.abs().max())
        shift = 0.0 if normalizer.bias is None else float(length(normalizer.bias))
        return above(size * largest + shift) + UNDERFLOW

    def linear(self, node: Node) -> bool:
        return self._normalizer(node).fixed

    def form(self, node: Node, forms: Forms) -> Form:
        normalizer = self.reading(node)
        if normalizer is None:
            return forms.opaque()
        x = forms.of(node.args[0])
        if normalizer.fixed:
            mean, scale = (Fixed((), _channels(node), node=node) for _ in range(2))
            standard = forms.product(forms.sum(x, mean), scale)
        elif normalizer.kind == "group":
            split = forms.view(x, (node.shape[0], normalizer.groups, math.prod(node.shape[1:]) // normalizer.groups))
            standard = forms.view(forms.normalized(split, (2,), centered=True), node.shape)
        else:
            standard = forms.normalized(x, normalizer.axes, normalizer.centered)
        return forms.affine(
            standard, *(_broadcast(operand, node, normalizer, forms) for operand in (normalizer.gamma, normalizer.beta))
        )


def _value(argument: Any) -> torch.Tensor | None:
    return argument.double() if isinstance(argument, Constant) else None


def _channels(node: Node) -> tuple[int, ...]:
    """The shape in which one number per channel is broadcast."""
    return (node.shape[1], *[1] * (len(node.shape) - 2))


def _broadcast(operand: Any, node: Node, normalizer: Normalizer, forms: Forms) -> Form | None:
    """γ or β as it is broadcast over the output."""
    if operand is None:
        return None
    return forms.view(forms.of(operand), _channels(node)) if normalizer.by_channel else forms.of(operand)


@rule("_weight_norm", "_weight_norm_interface")
class WeightNorm(Rule):
    """w = g v/‖v‖, a norm for every index of one axis."""

    def form(self, node: Node, forms: Forms) -> Form:
        v, g = map(forms.of, node.args[:2])
        axis = node.argument(2, "dim", 0)
        others = [i for i in range(len(v.shape)) if axis == -1 or i != axis % len(v.shape)]
        return forms.product(forms.normalized(v, others, centered=False), g)


def scale_interval(normalizer: Normalizer) -> Interval:
    """Bounds on γ/√(v + ε), one number per channel."""
    assert normalizer.running_variance is not None
    inverse = (normalizer.running_variance + normalizer.epsilon).rsqrt()
    weight = torch.ones_like(inverse) if normalizer.weight is None else normalizer.weight
    return Interval(inverse, inverse).widened() * Interval(weight, weight)


def _check(node: Node, normalizer: Normalizer) -> None:
    """Refuse a normalizer that may take the root of a negative number; running variances are checked with the graph."""
    if not normalizer.epsilon >= 0:
        raise Refusal("no certificate: a normalizer's ε is negative or NaN", [node.label], "Use ε > 0.")


def elements(node: Node, normalizer: Normalizer) -> int:
    """How many entries share one mean and variance."""
    count = math.prod(node.shape[axis] for axis in normalizer.axes)
    return count * node.shape[1] // normalizer.groups if normalizer.kind == "group" else count


def set_variances(normalizer: Normalizer, value: torch.Tensor) -> torch.Tensor:
    """What a normalizer divides by, squared and without ε, for every set that it normalizes: (samples, groups) or (…)."""
    value = value.to(torch.float64)
    axes = normalizer.axes
    if normalizer.kind == "group":
        value = value.unflatten(1, (normalizer.groups, -1)).flatten(2)  # (samples, groups, entries)
        axes = (2,)
    if normalizer.kind == "l2":
        return value.square().sum(axes)
    if normalizer.kind == "rms":
        return value.square().mean(axes)
    return value.var(axes, correction=0)


def known_spreads(normalizer: Normalizer, value: torch.Tensor) -> torch.Tensor:
    """σ of every set, or 0 where its squares vanish or overflow: then nothing is known."""
    spreads = set_variances(normalizer, value).sqrt()
    return torch.where((spreads > VANISHING) & spreads.isfinite(), spreads, 0.0)


def gains(normalizer: Normalizer, variance: torch.Tensor, mean: torch.Tensor, width: int = 1) -> torch.Tensor:
    """A normalizer's gain by each definition of docs/audit.md: tight, paper, paper_affine and layer, in one tensor.

    tight = max_c |γ_c|/√(v_c+ε); paper = ‖1/√(v+ε)‖₂, for groups and instances the sum; paper_affine = ‖γ/√(v+ε)‖₂;
    layer = 1/√(mean v + ε). variance: v, one per channel (batch and instance statistics, or running ones), one per group, or
    one in all (layer, rms, l2). width: how many entries share one v, for a normalizer without γ.
    """
    by_channel = normalizer.fixed or normalizer.kind in ("batch", "instance")
    inverse = (variance + normalizer.epsilon).rsqrt()
    weight = inverse.new_ones(1) if normalizer.weight is None else normalizer.weight.to(inverse).flatten()
    if normalizer.kind == "group" and normalizer.weight is not None:
        scaled = weight.reshape(normalizer.groups, -1) * inverse[:, None]
    elif normalizer.weight is None and not by_channel:
        scaled = inverse[:, None].expand(-1, width)
    else:
        scaled = weight * inverse
    added = normalizer.kind in ("group", "instance") and not normalizer.fixed
    paper = inverse.sum() if added else torch.linalg.vector_norm(inverse)
    layer = (mean.to(inverse) + normalizer.epsilon).rsqrt()
    return torch.stack([scaled.abs().max(), paper, torch.linalg.vector_norm(scaled), layer])


def smallest_scale(node: Node, normalizer: Normalizer, context: Context) -> float:
    """The least that a normalizer divides by. σ is 1/√d-Lipschitz, so on a region σ ≥ σ(middle) − deviation/√d."""
    smallest = 0.0
    middle, deviation = context.center(node.input), context.deviation(node.input)
    if middle is not None and math.isfinite(deviation):
        spread = float(known_spreads(normalizer, middle).min())
        count = elements(node, normalizer)
        share = deviation if normalizer.kind == "l2" else deviation / math.sqrt(count)
        smallest = max(below(spread, count + FEW) - above(share), 0.0)
    if normalizer.placement == "inside":
        return below(math.hypot(smallest, math.sqrt(normalizer.epsilon)))
    return smallest + normalizer.epsilon if normalizer.placement == "outside" else max(smallest, normalizer.epsilon)


def largest_output(normalizer: Normalizer, count: int) -> float:
    """The largest |z_i| of a normalized entry: √(d − 1) with centering, √d without, 1 for x/‖x‖."""
    if normalizer.kind == "l2":
        return 1.0
    # a sample standard deviation (divided by d − 1) is larger than the population's, so √(d − 1) covers it too
    return math.sqrt(count - 1 if normalizer.centered else count)


def channel_tensor(node: Node, normalizer: Normalizer, values: torch.Tensor | None, default: float) -> torch.Tensor:
    """γ or β of a node, shaped to broadcast over its output."""
    if values is None:
        return torch.tensor(default, dtype=torch.float64).expand(node.shape)
    if not normalizer.by_channel:
        return values.expand(node.shape)
    return values.reshape(1, -1, *[1] * (len(node.shape) - 2)).expand(node.shape)
