"""Distances between vectors, and cosines of the angles between them."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.core.rounding import FEW, VANISHING, above, below, euclidean_norm, gamma, length, root_of_powers_error
from normscope.graph.graph import Node
from normscope.rules.arithmetic import Operand, copies, operand_interval
from normscope.rules.registry import Context, Gain, Rule, rule

FEW_ROWS, TOGETHER, APART = 25, 1, 2  # up to so many rows `torch.cdist` takes differences, if it is not told to multiply


@rule("cosine_similarity")
class Cosine(Rule):
    """⟨u, v⟩ with u = x/max(‖x‖, ε), a projection to a ball over ε, and v likewise: 1/ε in each, and 1/‖x‖ where ‖x‖ > ε."""

    def gain(self, node: Node, context: Context) -> Gain:
        axis, epsilon = node.argument(2, "dim", 1), float(node.argument(3, "eps", 1e-8))
        shape = torch.broadcast_shapes(*(operand.shape for operand in node.args[:2]))
        factors = []
        for source in node.inputs:
            least = max(epsilon, self._least(source, axis - len(shape) if axis >= 0 else axis, context))
            if least <= 0:
                return Gain.infinite(node, "with ε = 0 a cosine is not Lipschitz near vectors of length 0")
            factors.append(above(math.sqrt(copies(source.shape, shape)) / least))
        return Gain.of(*factors, method="smallest length")

    @staticmethod
    def _least(source: Node, axis: int, context: Context) -> float:
        """The least length of a vector along an axis: that at the middle, less how far it can be from it."""
        middle, away = context.center(source), context.deviation(source)
        if middle is None or not math.isfinite(away) or -axis > len(source.shape):
            return 0.0
        return below(float(euclidean_norm(middle, axis).min()), middle.shape[axis] + FEW) - above(away)

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(-1 - 2**-40, 1 + 2**-40, node.shape)

    def center_error(self, node: Node, context: Context) -> float:
        """Nothing is known where it divides by lengths whose squares vanish."""
        axis, epsilon = node.argument(2, "dim", 1), float(node.argument(3, "eps", 1e-8))
        x, y = (_middle(operand, context) for operand in node.args[:2])
        if epsilon < VANISHING and x is not None and y is not None:
            lengths = [euclidean_norm(middle, axis) for middle in torch.broadcast_tensors(x, y)]
            if any(bool((found < VANISHING).any()) for found in lengths):
                return math.inf
        return super().center_error(node, context)


@rule("cdist", "pairwise_distance")
class Distance(Rule):
    """‖x_i − y_j‖_p moves no more than ‖Δx_i‖_p + ‖Δy_j‖_p ≤ d^max(0, 1/p − 1/2) (‖Δx_i‖ + ‖Δy_j‖), for p ≥ 1."""

    def gain(self, node: Node, context: Context) -> Gain:
        order = float(node.argument(2, "p", 2.0))
        if not order >= 1:
            return Gain.infinite(node, f"a distance of order p = {order:g} < 1 is not Lipschitz")
        width = max(operand.shape[-1] for operand in node.args[:2])
        factor = width ** max(0.0, 1 / order - 0.5)
        shapes = [tuple(operand.shape) for operand in node.args[:2]]
        if node.op == "cdist":  # (…, rows, 1, d) and (…, 1, columns, d)
            shapes = [(*shapes[0][:-1], 1, shapes[0][-1]), (*shapes[1][:-2], 1, *shapes[1][-2:])]
        whole = tuple(torch.broadcast_shapes(*shapes))
        used = [copies(shape, whole) for operand, shape in zip(node.args[:2], shapes, strict=True) if isinstance(operand, Node)]
        return Gain.of(*(above(factor * math.sqrt(count)) for count in used), method="norm")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(0.0, math.inf, node.shape)

    def center_error(self, node: Node, context: Context) -> float:
        """In ℓ2, torch takes the root of ‖x‖² + ‖y‖² − 2⟨x, y⟩ where there are many rows: between near ones, that is rounding."""
        found, value, order = super().center_error(node, context), context.center(node), float(node.argument(2, "p", 2.0))
        x, y = (_middle(operand, context) for operand in node.args[:2])
        if value is None or x is None or y is None:
            return found
        width = max(x.shape[-1], y.shape[-1])
        found += root_of_powers_error(order, width, value)
        if node.op == "cdist" and order == 2 and self._multiplies(node.argument(3, "compute_mode"), x, y):
            sizes = length(x, -1)[..., :, None] + length(y, -1)[..., None, :]
            found += math.sqrt(gamma(8 * (width + FEW))) * float(length(sizes))
        return above(found)

    @staticmethod
    def _multiplies(mode: int | None, x: torch.Tensor, y: torch.Tensor) -> bool:
        return mode == TOGETHER or (mode != APART and max(x.shape[-2], y.shape[-2]) > FEW_ROWS)


def _middle(operand: Operand, context: Context) -> torch.Tensor | None:
    return context.center(operand) if isinstance(operand, Node) else operand_interval(operand, context).low
