"""The softmax family, and the gate of its logistic case."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.core.rounding import FEW, FUNCTION, SMALLEST_NORMAL, UNDERFLOW, above, below, root
from normscope.graph.graph import Node
from normscope.rules import readings
from normscope.rules.algebra import Form, Forms
from normscope.rules.logits import lost
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.remainder import Remainder, Sizes
from normscope.rules.scalars import ROUNDING

MASKS = ("add", "sub", "masked_fill", "where")
FAR_BELOW = 1e4  # a logit so far below the largest has the probability e^-10000, which is 0 in float64


@rule("softmax", "_softmax", "special_softmax")
class SoftmaxRule(Rule):
    """J = diag(p) − ppᵀ has norm at most 1/2, reached at p = (1/2, 1/2, 0, …)."""

    def reading(self, node: Node) -> readings.Softmax:
        return readings.Softmax(node.inputs[0], node.args[1])

    def gain(self, node: Node, context: Context) -> Gain:
        if node.shape[node.args[1]] == 1:
            return Gain.of(0, method="softmax")
        if not context.local:
            return Gain.of(0.5, method="softmax")
        p = self.interval(node, context)  # by Gershgorin ‖J‖ ≤ max 2 p_i (1 − p_i)
        nearest_half = torch.maximum(p.low, torch.minimum(p.high, torch.full_like(p.high, 0.5)))
        return Gain.of(min(0.5, float((2 * nearest_half * (1 - nearest_half)).max()) * (1 + ROUNDING)), method="softmax")

    def interval(self, node: Node, context: Context) -> Interval:
        if not context.local:
            return Interval.constant(0.0, 1.0, node.shape)
        logits, axis = context.interval(node.input), node.args[1]
        top = logits.high.amax(axis, keepdim=True).nan_to_num(0, 0, 0)
        low, high = logits.low - top, logits.high - top
        rounding = lost(node.shape[axis])
        least, largest = (
            torch.sigmoid(own - rest + sign * rounding * (1 + own.abs() + rest.abs()))  # of ln p/(1 − p)
            for own, rest, sign in ((low, _of_others(high, axis), -1), (high, _of_others(low, axis), 1))
        )
        return Interval(below(least.nan_to_num(0), FEW + FUNCTION), above(largest.nan_to_num(1), FEW + FUNCTION) + SMALLEST_NORMAL)

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """‖J(p) − J(p̂)‖ ≤ max|p − p̂| + 2‖p − p̂‖, and ‖p − p̂‖ is at most half of the logits' deviation.

        p runs through all logits between two reachable ones, so |p − p̂| comes from the logits' box, which is convex, and not from
        the probabilities that can be reached.
        """
        middle, reach = context.center(node.input), context.distances(node.input)
        if middle is None or reach is None or not reach.numel():
            return None
        away, _ = probability_changes(torch.softmax(middle, node.args[1]), reach, node.args[1])
        rows = float(torch.linalg.vector_norm(away, dim=node.args[1]).max())
        least = min(float(away.max()) + 2 * rows, 1.5 * context.deviation(node.input))
        return (above(least, node.shape[node.args[1]] + FEW),)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """(J(p) − J(p̂))Δz with J(p)Δz = p ⊙ (Δz − pᵀΔz): |p − p̂| (|Δz| + pᵀ|Δz|) + p̂ |p − p̂|ᵀ|Δz|; from the middle half."""
        middle, axis = context.center(node.input), node.args[1]
        if middle is None:
            return None
        p, reach = torch.softmax(middle, axis), away.entries(node.input)
        changed, most = probability_changes(p, reach, axis)
        moved = reach if moves is None else moves.entries(node.input)
        changed = on_the_way(changed) if moves is None else changed
        average = (most * moved).sum(axis, keepdim=True)
        entries = changed * (moved + average) + p * (changed * moved).sum(axis, keepdim=True)
        return Remainder(torch.ones(node.shape, dtype=torch.float64), above(entries, 2 * (node.shape[axis] + FEW)) + 2 * UNDERFLOW)

    def center_error(self, node: Node, context: Context) -> float:
        """Half of the logits' error, or of what was masked: entries far below the largest have probability 0 with any error."""
        p, logits, error = context.center(node), node.input, context.error(node.input)
        if p is None:
            return math.inf
        if logits.op in MASKS and len(logits.inputs) == 1 and (middle := context.center(logits.input)) is not None:
            error = min(error, context.error(logits.input) + 3 * self.roundoff(node) * self._unmasked(node, middle))
        if error > FAR_BELOW / 4:
            return math.inf
        return 0.5 * error + self.roundoff(node) * math.sqrt(p.numel()) * 4

    @staticmethod
    def _unmasked(node: Node, middle: torch.Tensor) -> float:
        """The norm of the logits that are not masked."""
        logits = node.input.apply(middle)
        close = logits > logits.amax(node.args[1], keepdim=True) - FAR_BELOW
        return float(torch.linalg.vector_norm(logits[close]))

    def norm(self, node: Node, context: Context) -> float:
        return 1.0 if node.args[1] % len(node.shape) == len(node.shape) - 1 else math.inf

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.softmax(forms.of(node.input), node.args[1])


def probability_changes(p: torch.Tensor, away: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds on |q − p| and on q for all q = softmax(z) with |z − ẑ| ≤ away, p = softmax(ẑ).

    q_j = p_j e^δ_j/Σ p e^δ with |δ| ≤ away, so that ln(q_j/p_j) is at most away_j + ln Σ p e^away in size.
    """
    p = p.clamp(min=1e-304)  # what underflowed, or is masked
    together = torch.logsumexp(away + p.log(), axis, keepdim=True).clamp(min=0)
    changed = (p * torch.expm1(above(away + together) + lost(p.shape[axis]))).nan_to_num(1, 1).clamp(max=1)
    return changed, (p + changed).clamp(max=1)


def on_the_way(changed: torch.Tensor) -> torch.Tensor:
    """The mean of |q − p| from the middle to the end: half of the bound, which is convex, but where it was cut at 1."""
    return changed * torch.where(changed < 1, 0.5, 1.0)


def _of_others(logits: torch.Tensor, axis: int) -> torch.Tensor:
    """ln Σ e^x over all entries along an axis but each one itself: of those before it and those behind it, nothing subtracted."""
    nothing = torch.full_like(logits.narrow(axis, 0, 1), -math.inf)
    count = logits.shape[axis] - 1
    before = torch.cat([nothing, logits.logcumsumexp(axis).narrow(axis, 0, count)], axis)
    behind = torch.cat([nothing, logits.flip(axis).logcumsumexp(axis).narrow(axis, 0, count)], axis).flip(axis)
    return torch.logaddexp(before, behind)


@rule("log_softmax", "_log_softmax", "special_log_softmax")
class LogSoftmax(Rule):
    """J = I − 1pᵀ has norm below √n, its supremum as p → e_i; a single entry is constant."""

    def reading(self, node: Node) -> readings.Softmax:
        return readings.Softmax(node.inputs[0], node.args[1])

    def gain(self, node: Node, context: Context) -> Gain:
        n = node.shape[node.args[1]]
        return Gain.of(root(n) if n > 1 else 0.0, method="log-softmax")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(-math.inf, 0.0, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.softmax(forms.of(node.input), node.args[1], stochastic=False)


@rule("logsumexp")
class LogSumExp(Rule):
    """Its gradient is a softmax, of norm at most 1."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(1, method="slope")


@rule("glu")
class GatedLinearUnit(Rule):
    """a · sigmoid(b) with (a, b) the halves of x: ‖J‖ ≤ √(1 + (sup|a|/4)²)."""

    def gain(self, node: Node, context: Context) -> Gain:
        gate = context.interval(node.input).magnitude
        if math.isinf(gate):
            return Gain.infinite(node, "a gate times an unbounded value; bound the values by a region or a normalizer before it")
        return Gain.of(above(math.hypot(1.0, gate / 4)), method="product")

    def interval(self, node: Node, context: Context) -> Interval:
        size = context.interval(node.input).magnitude
        return Interval.constant(-size, size, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        x, axis = forms.of(node.input), node.argument(1, "dim", -1)
        value = forms.moved([x], lambda values: values[0].chunk(2, axis)[0], node.shape)
        gate = forms.moved([x], lambda values: values[0].chunk(2, axis)[1], node.shape)
        return forms.product(value, forms.opaque_of(gate))
