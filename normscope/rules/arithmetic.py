"""Sums, differences, products and quotients, with broadcasting counted as an expansion."""

from __future__ import annotations

import math
from typing import Any

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import FEW, UNDERFLOW, above, length, root
from normscope.graph.graph import Constant, Node
from normscope.rules.algebra import Form, Forms
from normscope.rules.readings import Scaling, Sum
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.remainder import Remainder, Sizes
from normscope.rules.shape import CONSTANT_LIKE

Operand = Node | Constant | float | int


def copies(shape: tuple[int, ...], target: tuple[int, ...]) -> float:
    """How often broadcasting from `shape` to `target` repeats each entry."""
    return math.prod(target) / max(math.prod(shape), 1)


def _tensor(operand: Any) -> torch.Tensor:
    return operand.double() if isinstance(operand, Constant) else torch.tensor(float(operand), dtype=torch.float64)


def scaling_norm(factor: torch.Tensor, shape: tuple[int, ...], target: tuple[int, ...]) -> float:
    """The norm of x ↦ factor · x with x of `shape` broadcast to `target`: √ of the largest Σ factor² over the copies."""
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis, (a, b) in enumerate(zip(padded, target, strict=True)) if a == 1 and b > 1)
    sizes = length(factor.expand(target), repeated)
    return float(sizes.max()) if sizes.numel() else 0.0


def scaled_by(node: Node, factor: torch.Tensor) -> Gain:
    """The gain of a product with a constant."""
    size = scaling_norm(factor, node.input.shape, node.shape)
    if math.isinf(size):
        return Gain.infinite(node, "the constant it multiplies by is infinite, or not a number")
    return Gain.of(size, method="scale")


def _inverse(constant: torch.Tensor) -> torch.Tensor:
    """1/|c|, rounded up; below 2^-1022 the rounding is absolute."""
    return above(constant.abs().reciprocal()) + UNDERFLOW


def _repeated(operand: Node, node: Node) -> float:
    """√ of how often broadcasting repeats an operand's entries, rounded up."""
    return root(copies(operand.shape, node.shape))


def operand_interval(operand: Operand, context: Context) -> Interval:
    if isinstance(operand, Node):
        return context.interval(operand)
    value = _tensor(operand)
    return Interval(value, value)


@rule("add", "sub", "subtract", "rsub")
class SumRule(Rule):
    """a ± α b: L_a + |α| L_b, each with the copies that broadcasting makes."""

    def tokenwise(self, node: Node) -> bool:
        return all(source.shape == node.shape for source in node.inputs)

    def terms(self, node: Node) -> float:
        return 1

    def reading(self, node: Node) -> Sum | None:
        constant = next((operand for operand in node.args[:2] if isinstance(operand, Constant)), None)
        return Sum(node.inputs, constant, self._weights(node) == (1.0, 1.0)) if node.op == "add" else None

    @staticmethod
    def _weights(node: Node) -> tuple[float, float]:
        alpha = float(node.kwargs.get("alpha", 1) if node.op != "rsub" else (node.argument(2, "alpha", 1)))
        return {"add": (1.0, alpha), "sub": (1.0, -alpha), "subtract": (1.0, -alpha), "rsub": (-alpha, 1.0)}[node.op]

    def gain(self, node: Node, context: Context) -> Gain:
        factors = [
            Magnitude(abs(weight)) * _repeated(operand, node)
            for operand, weight in zip(node.args[:2], self._weights(node), strict=True)
            if isinstance(operand, Node)
        ]
        return Gain.of(*factors, method="sum" if len(factors) > 1 else "isometry")

    def interval(self, node: Node, context: Context) -> Interval:
        parts = []
        for operand, weight in zip(node.args[:2], self._weights(node), strict=True):
            bounds = operand_interval(operand, context)
            parts.append(bounds if weight == 1 else bounds * Interval.constant(weight, weight, ()))
        return parts[0] + parts[1]

    def norm(self, node: Node, context: Context) -> float:
        width = node.shape[-1] if node.shape else 1
        size = 0.0
        for operand, weight in zip(node.args[:2], self._weights(node), strict=True):
            if isinstance(operand, Node):
                widened = math.sqrt(width) if operand.shape[-1:] != node.shape[-1:] else 1.0
                size += abs(weight) * context.norm(operand) * widened
            else:
                size += abs(weight) * float(length(_tensor(operand).expand(node.shape), -1).max())
        return above(size) + UNDERFLOW

    def slopes(self, node: Node) -> tuple[float, float] | None:
        if len(node.inputs) != 1 or node.input.shape != node.shape:
            return None
        weight = next(w for operand, w in zip(node.args[:2], self._weights(node), strict=True) if isinstance(operand, Node))
        return weight, weight

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.sum(*map(forms.of, node.args[:2]), coefficients=self._weights(node))


@rule("mul", "multiply")
class ProductRule(Rule):
    """By a constant: its largest entry. Of two branches: sup|a| L_b + sup|b| L_a, finite only for bounded values."""

    def reading(self, node: Node) -> Scaling | None:
        for x, factor in (node.args[:2], node.args[1::-1]):
            if isinstance(x, Node) and (not isinstance(factor, Node) or factor.is_parameter):
                return Scaling(x, factor)
        return None

    def tokenwise(self, node: Node) -> bool:
        return all(source.shape == node.shape for source in node.inputs)

    def terms(self, node: Node) -> float:
        return 1

    def gain(self, node: Node, context: Context) -> Gain:
        if len(node.inputs) == 1:
            constant = next(operand for operand in node.args[:2] if not isinstance(operand, Node))
            return scaled_by(node, _tensor(constant))
        first, second = (context.interval(source).magnitude for source in node.inputs)
        fixed = [source.op in CONSTANT_LIKE for source in node.inputs]
        if any(fixed):  # what is fixed does not change, however large the other factor is
            first, second = 0.0 if fixed[1] else first, 0.0 if fixed[0] else second
        if math.isinf(first) or math.isinf(second):
            unbounded = " and ".join(
                source.label for source, size in zip(node.inputs, (first, second), strict=True) if math.isinf(size)
            )
            return Gain.infinite(
                node, f"a product whose factor {unbounded} is unbounded; bound it by a region or a normalizer before it"
            )
        a, b = node.inputs
        return Gain.of(
            Magnitude(second) * _repeated(a, node),
            Magnitude(first) * _repeated(b, node),
            method="product",
        )

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """Δ(ab) − âΔb − b̂Δa = (a − â)Δb + (b' − b̂)Δa."""
        a, b = node.inputs
        away_a, away_b = context.distances(a), context.distances(b)
        if away_a is None or away_b is None:
            return None
        first, second = (float(away.max()) if away.numel() else 0.0 for away in (away_a, away_b))
        return tuple(above((size + UNDERFLOW) * _repeated(source, node)) for size, source in ((second, a), (first, b)))

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """The same entry by entry; from the middle (a − â)(b − b̂)."""
        a, b = node.inputs
        if moves is None:
            entries = away.entries(a) * away.entries(b)
        else:
            entries = away.entries(a) * moves.entries(b) + away.entries(b) * moves.entries(a)
        return Remainder(torch.ones(node.shape, dtype=torch.float64), above(entries).expand(node.shape))

    def interval(self, node: Node, context: Context) -> Interval:
        if len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
            return context.interval(node.inputs[0]).squared()
        first, second = (operand_interval(operand, context) for operand in node.args[:2])
        return first * second

    def norm(self, node: Node, context: Context) -> float:
        """‖a ⊙ b‖ ≤ sup|a| ‖b‖, either way round."""
        sizes = []
        for one, other in (node.args[:2], node.args[1::-1]):
            if isinstance(other, Node) and other.shape[-1:] == node.shape[-1:]:
                scale = context.interval(one).magnitude if isinstance(one, Node) else float(_tensor(one).abs().max())
                size = context.norm(other)
                sizes.append(above(scale * size) + UNDERFLOW if scale and size else 0.0)
        return min(sizes, default=math.inf)

    def slopes(self, node: Node) -> tuple[float, float] | None:
        if len(node.inputs) != 1 or node.input.shape != node.shape:
            return None
        constant = _tensor(next(operand for operand in node.args[:2] if not isinstance(operand, Node)))
        return float(constant.min()), float(constant.max())

    def linear(self, node: Node) -> bool:
        return len(node.inputs) == 1

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.product(*map(forms.of, node.args[:2]))


@rule("div", "true_divide", "rounded_div")
class Quotient(Rule):
    """x/c: 1/|c|. a/b with |b| ≥ m > 0: L_a/m + sup|a| L_b/m²."""

    def terms(self, node: Node) -> float:
        return 1

    def gain(self, node: Node, context: Context) -> Gain:
        numerator, denominator = node.args[:2]
        if node.kwargs.get("rounding_mode") is not None:
            return Gain.infinite(node, "rounding division jumps, so no finite constant exists")
        if not isinstance(denominator, Node):
            constant = _tensor(denominator)
            if bool((constant == 0).any()):
                return Gain.infinite(node, "division by zero")
            return scaled_by(node, _inverse(constant))
        below = context.interval(denominator)
        crosses = (below.low <= 0) & (below.high >= 0)
        smallest = 0.0 if bool(crosses.any()) else float(torch.minimum(below.low.abs(), below.high.abs()).min())
        above = operand_interval(numerator, context).magnitude
        if smallest == 0 or math.isinf(above):
            reason = "the denominator may vanish" if smallest == 0 else "the numerator is unbounded"
            return Gain.infinite(node, f"{reason}; bound the values by a region, or use a normalizer that normscope knows")
        bottom = Magnitude(above) / Magnitude(smallest) ** 2 * _repeated(denominator, node)
        if not isinstance(numerator, Node):
            return Gain.of(bottom, method="quotient")
        return Gain.of(_repeated(numerator, node) / Magnitude(smallest), bottom, method="quotient")

    def interval(self, node: Node, context: Context) -> Interval:
        numerator, denominator = (operand_interval(operand, context) for operand in node.args[:2])
        if node.kwargs.get("rounding_mode") is not None:
            return Interval.unbounded(node.shape)
        return numerator * reciprocal(denominator)

    def slopes(self, node: Node) -> tuple[float, float] | None:
        if isinstance(node.args[1], Node) or node.input.shape != node.shape or node.kwargs.get("rounding_mode") is not None:
            return None
        inverse = Interval(*(_tensor(node.args[1]).reciprocal(),) * 2).widened()
        low, high = float(inverse.low.min()) - UNDERFLOW, float(inverse.high.max()) + UNDERFLOW
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    def linear(self, node: Node) -> bool:
        return not isinstance(node.args[1], Node) and node.kwargs.get("rounding_mode") is None

    def form(self, node: Node, forms: Forms) -> Form:
        if node.kwargs.get("rounding_mode") is not None:
            return forms.opaque()
        return forms.product(*map(forms.of, node.args[:2]), powers=(1.0, -1.0))


@rule("lerp")
class Interpolate(Rule):
    """(1 − w) a + w b: |1 − w| L_a + |w| L_b for a constant w."""

    def terms(self, node: Node) -> float:
        return 2

    def gain(self, node: Node, context: Context) -> Gain:
        if isinstance(node.args[2], Node):
            return Gain.infinite(node, "its weight depends on the input; write a + w · (b − a) with bounded values")
        weight = _tensor(node.args[2])
        parts = zip(node.args[:2], (_complement(weight), weight), strict=True)
        return Gain.of(*(scaling_norm(w, a.shape, node.shape) for a, w in parts if isinstance(a, Node)), method="sum")

    def interval(self, node: Node, context: Context) -> Interval:
        if isinstance(node.args[2], Node):
            return Interval.unbounded(node.shape)
        weight = _tensor(node.args[2])
        first, second = (operand_interval(operand, context) for operand in node.args[:2])
        return first * (Interval.constant(1, 1, ()) + Interval(-weight, -weight)) + second * Interval(weight, weight)

    def linear(self, node: Node) -> bool:
        return not isinstance(node.args[2], Node)


def _complement(weight: torch.Tensor) -> torch.Tensor:
    """|1 − w|, rounded up."""
    return above((1 - weight).abs())


@rule("addcmul", "addcdiv")
class SumWithProduct(Rule):
    """a + c · b · d, or a + c · b/d: as a sum with a product or a quotient."""

    def terms(self, node: Node) -> float:
        return 2

    @staticmethod
    def _operands(node: Node, context: Context) -> tuple[Interval, Interval, float]:
        """Bounds of b and of d or 1/d, and c."""
        first, second = (operand_interval(operand, context) for operand in node.args[1:3])
        if node.op == "addcdiv":
            second = reciprocal(second)
        return first, second, float(node.kwargs.get("value", 1))

    def gain(self, node: Node, context: Context) -> Gain:
        first, second, scale = self._operands(node, context)
        factors = []
        for position, operand in enumerate(node.args[:3]):
            if isinstance(operand, Node):
                size = (1.0, second.magnitude, first.magnitude)[position]
                own = Magnitude(size) * (1 if position == 0 else abs(scale))
                if position == 2 and node.op == "addcdiv":
                    own = own * Magnitude(second.magnitude) ** 2
                factors.append(own * _repeated(operand, node))
        if not all(factor.finite for factor in factors):
            return Gain.infinite(node, "a product whose factor is unbounded, or a quotient whose denominator may vanish")
        return Gain.of(*factors, method="sum")

    def interval(self, node: Node, context: Context) -> Interval:
        first, second, scale = self._operands(node, context)
        return operand_interval(node.args[0], context) + first * second * Interval.constant(scale, scale, ())


def reciprocal(bounds: Interval) -> Interval:
    """1/value; anything where a value may be 0."""
    crosses = (bounds.low <= 0) & (bounds.high >= 0)
    inverse = Interval.outward(bounds.high.reciprocal() - UNDERFLOW, bounds.low.reciprocal() + UNDERFLOW).widened()
    return Interval(inverse.low.masked_fill(crosses, -math.inf), inverse.high.masked_fill(crosses, math.inf))


@rule("hypot", "logaddexp", "logaddexp2")
class Joint(Rule):
    """The gradient in each pair of entries has a norm of at most 1: (a, b)/√(a² + b²), or weights ≥ 0 that sum to 1."""

    def terms(self, node: Node) -> float:
        return 2

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(_repeated(source, node) for source in node.inputs), method="norm", separate=True)


@rule("diff")
class DifferenceRule(Rule):
    """x_{i+1} − x_i along an axis of n entries: 2 cos(π/2n), from the eigenvalues 2 − 2 cos(kπ/n) of its Gram matrix."""

    def terms(self, node: Node) -> float:
        return 2.0 ** node.argument(1, "n", 1)

    def gain(self, node: Node, context: Context) -> Gain:
        if any(argument is not None for argument in (node.argument(3, "prepend"), node.argument(4, "append"))):
            return Gain.infinite(node, "a difference with entries put before or behind has no rule; use torch.cat and slices")
        entries = node.input.shape[node.argument(2, "dim", -1)]
        steps = range(int(node.argument(1, "n", 1)))
        factors = [2 * math.cos(math.pi / (2 * (entries - step))) for step in steps]
        return Gain.of(above(math.prod(factors), FEW * len(steps)), method="exact")

    def linear(self, node: Node) -> bool:
        return True
