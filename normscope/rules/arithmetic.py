"""Sums, differences, products and quotients, with broadcasting counted as an expansion."""

from __future__ import annotations

import math
from typing import Any

import torch

from normscope.core.interval import Interval
from normscope.graph.graph import Constant, Node
from normscope.rules.forms import Form, Forms
from normscope.rules.registry import Context, Gain, Rule, rule

Operand = Node | Constant | float | int


def copies(shape: tuple[int, ...], target: tuple[int, ...]) -> float:
    """How often broadcasting from `shape` to `target` repeats each entry."""
    return math.prod(target) / max(math.prod(shape), 1)


def _tensor(operand: Any) -> torch.Tensor:
    return operand.double() if isinstance(operand, Constant) else torch.tensor(float(operand), dtype=torch.float64)


def scaling_norm(factor: torch.Tensor, shape: tuple[int, ...], target: tuple[int, ...]) -> float:
    """The norm of x ↦ factor · x with x of `shape` broadcast to `target`: √ of the largest Σ factor² over the copies."""
    squared = factor.square().expand(target)
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    repeated = [axis for axis, (a, b) in enumerate(zip(padded, target, strict=True)) if a == 1 and b > 1]
    total = squared.sum(repeated) if repeated else squared
    return math.sqrt(float(total.max())) * (1 + 2**-45) if total.numel() else 0.0


def operand_interval(operand: Operand, context: Context) -> Interval:
    if isinstance(operand, Node):
        return context.interval(operand)
    value = _tensor(operand)
    return Interval(value, value)


@rule("add", "sub", "subtract", "rsub")
class Sum(Rule):
    """a ± α b: L_a + |α| L_b, each with the copies that broadcasting makes."""

    def terms(self, node: Node) -> float:
        return 1

    @staticmethod
    def _weights(node: Node) -> tuple[float, float]:
        alpha = float(node.kwargs.get("alpha", 1) if node.op != "rsub" else (node.argument(2, "alpha", 1)))
        return {"add": (1.0, alpha), "sub": (1.0, -alpha), "subtract": (1.0, -alpha), "rsub": (-alpha, 1.0)}[node.op]

    def gain(self, node: Node, context: Context) -> Gain:
        factors = [
            abs(weight) * math.sqrt(copies(operand.shape, node.shape)) * (1 + 2**-52)
            for operand, weight in zip(node.args[:2], self._weights(node), strict=True)
            if isinstance(operand, Node)
        ]
        return Gain.of(*factors, method="sum" if len(factors) > 1 else "isometry")

    def interval(self, node: Node, context: Context) -> Interval:
        parts = []
        for operand, weight in zip(node.args[:2], self._weights(node), strict=True):
            bounds = operand_interval(operand, context)
            parts.append(bounds * Interval(*(torch.tensor(weight, dtype=torch.float64),) * 2))
        return parts[0] + parts[1]

    def norm(self, node: Node, context: Context) -> float:
        width = node.shape[-1] if node.shape else 1
        size = 0.0
        for operand, weight in zip(node.args[:2], self._weights(node), strict=True):
            if isinstance(operand, Node):
                widened = math.sqrt(width) if operand.shape[-1:] != node.shape[-1:] else 1.0
                size += abs(weight) * context.norm(operand) * widened
            else:
                size += abs(weight) * float(torch.linalg.vector_norm(_tensor(operand).expand(node.shape), dim=-1).max())
        return size * (1 + 1e-12)

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
class Product(Rule):
    """By a constant: its largest entry. Of two branches: sup|a| L_b + sup|b| L_a, finite only for bounded values."""

    def terms(self, node: Node) -> float:
        return 1

    def gain(self, node: Node, context: Context) -> Gain:
        if len(node.inputs) == 1:
            constant = next(operand for operand in node.args[:2] if not isinstance(operand, Node))
            return Gain.of(scaling_norm(_tensor(constant), node.input.shape, node.shape), method="scale")
        first, second = (context.interval(source).magnitude for source in node.inputs)
        if math.isinf(first) or math.isinf(second):
            unbounded = " and ".join(
                source.label for source, size in zip(node.inputs, (first, second), strict=True) if math.isinf(size)
            )
            return Gain.infinite(
                node, f"a product whose factor {unbounded} is unbounded; bound it by a region or a normalizer before it"
            )
        a, b = node.inputs
        return Gain.of(
            second * math.sqrt(copies(a.shape, node.shape)) * (1 + 2**-50),
            first * math.sqrt(copies(b.shape, node.shape)) * (1 + 2**-50),
            method="product",
        )

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """Δ(ab) − âΔb − b̂Δa = (a − â)Δb + (b' − b̂)Δa."""
        a, b = node.inputs
        away_a, away_b = context.distances(a), context.distances(b)
        if away_a is None or away_b is None:
            return None
        first, second = (float(away.max()) if away.numel() else 0.0 for away in (away_a, away_b))
        return tuple(
            size * math.sqrt(copies(source.shape, node.shape)) * (1 + 2**-50) for size, source in ((second, a), (first, b))
        )

    def interval(self, node: Node, context: Context) -> Interval:
        if len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
            bounds = context.interval(node.inputs[0])
            magnitudes = torch.maximum(bounds.low.abs(), bounds.high.abs())
            low = torch.where((bounds.low <= 0) & (bounds.high >= 0), 0.0, torch.minimum(bounds.low.abs(), bounds.high.abs()))
            return Interval(low.square(), magnitudes.square()).widened()
        first, second = (operand_interval(operand, context) for operand in node.args[:2])
        return first * second

    def norm(self, node: Node, context: Context) -> float:
        """‖a ⊙ b‖ ≤ sup|a| ‖b‖, either way round."""
        sizes = []
        for one, other in (node.args[:2], node.args[1::-1]):
            if isinstance(other, Node) and other.shape[-1:] == node.shape[-1:]:
                scale = context.interval(one).magnitude if isinstance(one, Node) else float(_tensor(one).abs().max())
                length = context.norm(other)
                sizes.append(scale * length if scale and length else 0.0)
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


@rule("div", "true_divide")
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
            return Gain.of(scaling_norm(constant.reciprocal(), node.input.shape, node.shape), method="scale")
        below = context.interval(denominator)
        crosses = (below.low <= 0) & (below.high >= 0)
        smallest = 0.0 if bool(crosses.any()) else float(torch.minimum(below.low.abs(), below.high.abs()).min())
        above = operand_interval(numerator, context).magnitude
        if smallest == 0 or math.isinf(above):
            reason = "the denominator may vanish" if smallest == 0 else "the numerator is unbounded"
            return Gain.infinite(node, f"{reason}; bound the values by a region, or use a normalizer that normscope knows")
        bottom = above / smallest / smallest * math.sqrt(copies(denominator.shape, node.shape)) * (1 + 2**-48)
        if not isinstance(numerator, Node):
            return Gain.of(bottom, method="quotient")
        top = math.sqrt(copies(numerator.shape, node.shape)) / smallest * (1 + 2**-48)
        return Gain.of(top, bottom, method="quotient")

    def interval(self, node: Node, context: Context) -> Interval:
        numerator, denominator = (operand_interval(operand, context) for operand in node.args[:2])
        if bool(((denominator.low <= 0) & (denominator.high >= 0)).any()):
            return Interval.unbounded(node.shape)
        return numerator * Interval(denominator.high.reciprocal(), denominator.low.reciprocal()).widened()

    def slopes(self, node: Node) -> tuple[float, float] | None:
        if isinstance(node.args[1], Node) or node.input.shape != node.shape or node.kwargs.get("rounding_mode") is not None:
            return None
        inverse = _tensor(node.args[1]).reciprocal()
        return (float(inverse.min()), float(inverse.max())) if bool(inverse.isfinite().all()) else None

    def linear(self, node: Node) -> bool:
        return not isinstance(node.args[1], Node)

    def form(self, node: Node, forms: Forms) -> Form:
        if node.kwargs.get("rounding_mode") is not None:
            return forms.opaque()
        return forms.product(*map(forms.of, node.args[:2]), powers=(1.0, -1.0))
