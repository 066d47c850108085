"""Products of all entries along an axis, and running ones."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude
from normscope.graph.graph import Node
from normscope.operators.dense import spectral_norm
from normscope.rules.registry import Context, Gain, Rule, rule

LONGEST = 512  # of running products, whose matrix of derivatives is made, and of products whose values are bounded


@rule("prod", "cumprod")
class EntriesProduct(Rule):
    """∂(x_1 ⋯ x_k)/∂x_i is the product of the other entries, so with |x_j| ≤ b_j the derivative is at most M, entry by entry.

    M_ki = ∏_{j ≤ k, j ≠ i} b_j, of which `prod` has the last row alone, and ‖J‖ ≤ ‖M‖. Logarithms keep it from underflow.
    """

    def gain(self, node: Node, context: Context) -> Gain:
        sizes = self._lines(node, context.interval(node.input).sizes)  # (lines, n)
        count = sizes.shape[1]
        if count == 1:
            return Gain.of(1, method="isometry")
        if not bool(sizes.isfinite().all()):
            return Gain.infinite(node, f"a product of {count} entries that are unbounded; bound them by a region or a normalizer")
        if node.op == "cumprod" and count > LONGEST:
            return Gain.infinite(node, f"running products of more than {LONGEST} entries are not bounded")
        logs = sizes.log()
        largest = self._derivatives(logs, running=node.op == "cumprod")  # (lines, rows, n), logarithms
        top = float(largest.max())
        if top == -math.inf:
            return Gain.of(0, method="product")
        rounding = 8 * torch.finfo(torch.float64).eps * (count + float(logs[logs.isfinite()].abs().sum()) + abs(top))
        size = spectral_norm((largest - top).exp()) * Magnitude.from_log(top)
        return Gain((size.widened(math.expm1(min(rounding, 1.0))),), "product")

    @staticmethod
    def _lines(node: Node, values: torch.Tensor) -> torch.Tensor:
        """What is multiplied together, in rows; an axis that is not named is all of them."""
        axis = node.argument(1, "dim")
        if axis is None or isinstance(axis, torch.dtype) or not values.dim():
            return values.reshape(1, -1)
        return values.movedim(axis, -1).reshape(-1, values.shape[axis])

    @staticmethod
    def _derivatives(logs: torch.Tensor, running: bool) -> torch.Tensor:
        """log M, row by row: each is the row before with one more factor."""
        row = torch.full_like(logs, -math.inf)
        before, rows = torch.zeros_like(logs[:, 0]), []
        for k in range(logs.shape[1]):
            row = row + logs[:, k : k + 1]
            row[:, k] = before
            before = before + logs[:, k]
            rows.append(row)
        return torch.stack(rows if running else rows[-1:], 1)

    def interval(self, node: Node, context: Context) -> Interval:
        bounds = context.interval(node.input)
        low, high = (self._lines(node, side) for side in (bounds.low, bounds.high))
        if low.shape[1] > LONGEST:
            return Interval.unbounded(node.shape)
        found = [Interval(low[:, 0], high[:, 0])]
        for k in range(1, low.shape[1]):
            found.append(found[-1] * Interval(low[:, k], high[:, k]))
        if node.op == "prod":
            return Interval(found[-1].low.reshape(node.shape), found[-1].high.reshape(node.shape))
        if not node.shape:
            return bounds
        axis = node.args[1]
        moved = torch.empty(node.shape).movedim(axis, -1).shape
        sides = (torch.stack([one.low for one in found], 1), torch.stack([one.high for one in found], 1))
        return Interval(*(side.reshape(moved).movedim(-1, axis) for side in sides))
