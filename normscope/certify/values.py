"""What values the nodes of a graph can take on a region: intervals, norms, and distances from the region's middle.

The middle's own value at a node is computed in float64, and how far it may be from the exact one is bounded along with the
rest. A float64 kernel is taken as mixed stable (Higham 2002, section 1.5): what it returns for x̂ is f(x̂ + δ) + η with f exact,
‖δ‖ ≤ κ‖x̂‖ and ‖η‖ ≤ κ(‖ŷ‖ + what it computes on the way), κ growing with the length of its sums. So, with L_i the gains of
the node and κ' the largest κ of those that read it,

    error(node) = Σ_i L_i error(source_i) + κ (‖ŷ‖ + on the way) + 2κ' ‖ŷ‖

covers its own rounding, that of its readers, and that of statistics that they take from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from normscope.core.errors import InputError
from normscope.core.interval import Interval
from normscope.core.magnitude import ONE, Magnitude
from normscope.core.region import Ball, Box, Region
from normscope.core.rounding import UNDERFLOW, above, length
from normscope.graph.graph import Graph, Node
from normscope.rules.registry import Gain, registry

OUTWARD = 1 + 1e-12  # a few roundings of a float64 number, with room


class Values:
    """Bounds on the values of every node; with `gain` this is the `Context` that rules see."""

    def __init__(self, graph: Graph, region: Region | None) -> None:
        self.graph, self.region, self.local = graph, region, region is not None
        self.whole_batch = graph.whole_batch
        self.intervals: dict[Node, Interval] = {}
        self.lengths: dict[Node, float] = {}
        self.centers: dict[Node, torch.Tensor] = {}
        self.errors: dict[Node, float] = {}
        self.at: dict[Node, Magnitude] = dict.fromkeys(graph.inputs, ONE)  # the constant from the inputs to a node
        self.users = graph.users
        if region is not None:
            self._place(region)

    def _place(self, region: Region) -> None:
        """Value bounds of the inputs, and every node's value at the middle of the region."""
        if not isinstance(region, (Ball, Box)):
            raise InputError(f"a region is a Ball or a Box, not {type(region).__name__}")
        middle = [part if self.whole_batch else part[None] for part in region.middle]
        shapes = [tuple(part.shape) for part in middle]
        if shapes != [node.shape for node in self.graph.inputs]:
            wanted = ", ".join(str(node.shape if self.whole_batch else node.shape[1:]) for node in self.graph.inputs)
            raise InputError(f"the region holds points of shape {', '.join(str(s[1:]) for s in shapes)}, the model takes {wanted}")
        with torch.no_grad():
            values = self.graph.run(middle, torch.float64, capture=self.graph.nodes)[1]
        self.centers = {
            node: value
            for node, value in values.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isfinite().all())
        }
        for node, bounds in zip(self.graph.inputs, region.intervals(), strict=True):
            self.intervals[node] = bounds if self.whole_batch else Interval(bounds.low[None], bounds.high[None])
            self.errors[node] = self._reading(node) * self._size(node)

    def gain(self, node: Node) -> Gain:
        raise NotImplementedError

    def center(self, node: Node) -> torch.Tensor | None:
        return self.centers.get(node)

    def deviation(self, node: Node) -> float:
        """at · reach from the exact value at the middle, and the error of the computed one."""
        if self.region is None or node not in self.at:
            return math.inf
        return float(self.at[node] * self.region.reach) * (1 + 1e-9) + UNDERFLOW + self.error(node)

    def distances(self, node: Node) -> torch.Tensor | None:
        bounds, middle = self.interval(node), self.center(node)
        if middle is None:
            return None
        return above(torch.maximum(bounds.high - middle, middle - bounds.low).clamp(min=0))

    def error(self, node: Node) -> float:
        for top in self._unknown(node, self.errors):
            rule, value = registry.find(top), self.center(top)
            error = math.inf if rule is None else rule.center_error(top, self)
            if value is not None:
                error += self._reading(top) * self._size(top)
            self.errors[top] = math.inf if math.isnan(error) else error * OUTWARD
        return self.errors[node]

    def _size(self, node: Node) -> float:
        """‖ŷ‖ at the middle; infinite where the middle is too large for squares, or is not a number."""
        middle = self.center(node)
        return math.inf if middle is None else float(length(middle))

    def _reading(self, node: Node) -> float:
        """2κ': what the readers of a node may add to its relative error."""
        rules = [(registry.find(user), user) for user in self.users[node]]
        return 2 * max((rule.roundoff(user) for rule, user in rules if rule is not None), default=0.0)

    def interval(self, node: Node) -> Interval:
        for top in self._unknown(node, self.intervals):
            rule = registry.find(top)
            bounds = Interval.unbounded(top.shape) if rule is None else rule.interval(top, self)
            self.intervals[top] = self._near_center(top, bounds)
        return self.intervals[node]

    @staticmethod
    def _unknown(node: Node, known: Mapping[Node, object]) -> Iterator[Node]:
        """The nodes before `node` and itself that `known` lacks, each after what it reads."""
        stack = [node]
        while stack:  # without recursion: a graph may be thousands of nodes deep
            top = stack[-1]
            waiting = [] if top in known else [source for source in top.inputs if source not in known]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if top not in known:
                yield top

    def _near_center(self, node: Node, bounds: Interval) -> Interval:
        """The part of an interval that the node can deviate to, and the computed value at the middle as others read it."""
        middle = self.center(node)
        if middle is None:
            return bounds
        near = Interval.around(middle, torch.full_like(middle, self.deviation(node)))
        read = Interval.around(middle, self._reading(node) * middle.abs())
        both = bounds.within(near)
        return Interval(torch.minimum(both.low, read.low), torch.maximum(both.high, read.high))

    def norm(self, node: Node) -> float:
        """The largest ℓ2 norm along the last axis: the least of what the rule, the interval and the middle give.

        Not less than that of the computed value at the middle, as others read it: between that and the exact value, norms are
        convex.
        """
        if node not in self.lengths:
            rule = registry.find(node)
            lengths = [math.inf if rule is None else rule.norm(node, self)]
            bounds = self.interval(node)
            if bounds.shape:
                sizes = length(bounds.sizes, -1)
                lengths.append(float(sizes.max()) if sizes.numel() else 0.0)
            middle = self.center(node)
            at_middle = 0.0
            if middle is not None and middle.dim():
                farthest = float(length(middle, -1).max()) if middle.numel() else 0.0
                lengths.append(farthest + self.deviation(node))
                at_middle = farthest * (1 + self._reading(node)) if math.isfinite(farthest) else 0.0
            self.lengths[node] = max(min(length for length in lengths if not math.isnan(length)), at_middle)
        return self.lengths[node]
