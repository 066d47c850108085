"""One pass over a graph, in topological order: everything that is known about each node, from what is known about those before it.

A node's facts are made in one fixed order: its value at the middle of the region, its gain, its link, the constant from the
inputs to it, the error of the computed middle, the interval of its values, and, on a region, what a `Refine` knows better. Each
is a function of finished facts of ancestors and of the node's own facts before it, and none changes later, so no answer depends
on who asks, or when. Norms, and intervals where there is no region, are made when something asks: from finished facts as well.

The middle's own value at a node is computed in float64, and how far it may be from the exact one is bounded along with the
rest. A float64 kernel is taken as mixed stable (Higham 2002, section 1.5): what it returns for x̂ is f(x̂ + δ) + η with f exact,
‖δ‖ ≤ κ‖x̂‖ and ‖η‖ ≤ κ(‖ŷ‖ + what it computes on the way), κ growing with the length of its sums. So, with L_i the gains of
the node and κ' the largest κ of those that read it,

    error(node) = Σ_i L_i error(source_i) + κ (‖ŷ‖ + on the way) + 2κ' ‖ŷ‖

covers its own rounding, that of its readers, and that of statistics that they take from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from normscope.certify.fold import foldable
from normscope.certify.known import Known
from normscope.certify.links import Link, LogRounding, link_of, signature
from normscope.core.errors import InputError, InternalError, Refusal, joined, unforeseen
from normscope.core.interval import Interval
from normscope.core.magnitude import INFINITY, ONE, Magnitude
from normscope.core.progress import Report
from normscope.core.region import Ball, Box, Region
from normscope.core.rounding import UNDERFLOW, above, length
from normscope.graph.graph import Graph, Node
from normscope.rules.jumps import Jump
from normscope.rules.readings import Random
from normscope.rules.registry import Gain, Rule, registry

T = TypeVar("T")


@dataclass(eq=False)
class Facts:
    """What is known about one node, in the order in which it becomes known; None is not known yet."""

    middle: torch.Tensor | None = None  # the computed value at the middle of the region
    gain: Gain | None = None
    link: Link | None = None
    at: Magnitude | None = None  # the constant from the inputs to the node
    reach: float = math.inf  # how far the node can be from its exact value at the middle
    near: float = math.inf  # and from its computed value, as far as a `Refine` knows
    error: float = math.inf  # of `middle`
    interval: Interval | None = None
    norm: float | None = None
    method: str = ""  # of the `Refine` that gave `at`, if one did


@dataclass(frozen=True)
class Refinement:
    """Tighter bounds of a node on a region: the constant from the inputs to it, and an interval of its values.

    deviation: how far it can be from its computed value at the middle, where that is known too.
    """

    at: Magnitude
    interval: Interval
    method: str
    deviation: float = math.inf


Refine = Callable[["Pass", Node], Refinement | None]


class Pass:
    """The facts of every node of a graph, and the `Context` that rules see."""

    def __init__(
        self,
        graph: Graph,
        region: Region | None = None,
        known: Known | None = None,
        report: Report | None = None,
        refine: Sequence[Refine] = (),
        partial: bool = False,
        unknown: Refusal | None = None,
    ) -> None:
        """known: what regions share, gains of linear maps above all, kept by the caller.

        refine: what may know better on a region. Each is asked about every node once, inputs included and in order, when the
        node's other facts are there and those of its ancestors are finished; it decides by the graph alone what it looks at.

        partial: operations without a bound are listed in `refused`, and unbounded here, instead of ending the pass. unknown: why
        some have no rule.
        """
        self.graph, self.region, self.local, self.whole_batch = graph, region, region is not None, graph.whole_batch
        self.known = Known() if known is None else known
        self.users = graph.users
        self.partial, self.unknown, self.refused = partial, unknown, dict[Node, Refusal | None]()
        middles = self._middles()
        self.facts = {node: Facts(middles.get(node)) for node in graph}
        self._rounding = LogRounding()
        self._turn: Node | None = None  # the node whose facts are being made
        folds = foldable(graph)
        for done, node in enumerate(graph):
            if report is not None:
                report("bounding", done, len(graph))
            self._turn = node
            facts = self.facts[node]
            if node.is_input:
                facts.at = ONE
            else:
                facts.gain = self._gain(node)
                facts.link = link_of(node, folds.get(node), self.gain, self.users)
                facts.at = facts.link.arriving(self.at)
                self._rounding.add(facts.link.gain.factors, facts.at)
            if region is not None:
                self._locate(node, facts, region, refine)
        self._turn = None
        if report is not None:
            report("bounding", len(graph), len(graph))

    # the pass ----------------------------------------------------------------------------------------------------------

    def _middles(self) -> dict[Node, torch.Tensor]:
        """Every node's value at the middle of the region."""
        region = self.region
        if region is None:
            return {}
        if not isinstance(region, (Ball, Box)):
            raise InputError(f"a region must be a Ball or a Box, got {type(region).__name__}")
        middle = [part if self.whole_batch else part[None] for part in region.middle]
        shapes = [tuple(part.shape) for part in middle]
        if shapes != [node.shape for node in self.graph.inputs]:
            wanted = ", ".join(str(node.shape if self.whole_batch else node.shape[1:]) for node in self.graph.inputs)
            raise InputError(f"the region holds points of shape {', '.join(str(s[1:]) for s in shapes)}, the model takes {wanted}")
        with torch.no_grad():
            values = self.graph.run(middle, torch.float64, capture=self.graph.nodes)[1]
        return {
            node: value
            for node, value in values.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isfinite().all())
        }

    def _gain(self, node: Node) -> Gain:
        key = signature(node)
        if key is not None and key in self.known:
            return self.known[key]
        rule = registry.find(node)
        if rule is None or registry.reading(node, Random) is not None:
            self.refused[node] = None  # `unknown` says why
            return Gain.infinite(node, "it has no rule")
        if _chosen_by_values(node) and not isinstance(rule, Jump):  # the decision that it rests on has the reason
            return Gain((INFINITY,) * len(node.inputs), "unbounded")
        if node.dtype is not None and not math.prod(node.shape):
            return Gain.of(*(0 for _ in node.inputs), method="no entries")
        gain = self._unless_raised(node, lambda node: _checked(node, rule, rule.gain(node, self)), None)
        if gain is None:
            return Gain.infinite(node, "its rule gives no bound")
        if key is not None:
            self.known[key] = gain
        return gain

    def _unless_raised(self, node: Node, make: Callable[[Node], T], otherwise: T) -> T:
        """What is made with a node's rule; where it raises, and the pass is partial, the node is refused."""
        try:
            return make(node)
        except (InputError, InternalError):
            raise
        except Exception as error:  # rules, which may be a user's own, raise anything
            if not self.partial:
                raise
            self.refused[node] = error if isinstance(error, Refusal) else unforeseen("its rule", error)
            return otherwise

    def _locate(self, node: Node, facts: Facts, region: Region, refine: Sequence[Refine]) -> None:
        """Where the values of a node are on the region."""
        facts.error = self._unless_raised(node, self._error, math.inf)
        facts.reach = self._reach(node, region)
        facts.interval = self._unless_raised(node, self._interval, Interval.unbounded(node.shape))
        for knows in refine:
            better = self._unless_raised(node, functools.partial(knows, self), None)
            if better is not None:
                facts.interval = facts.interval.within(better.interval)
                facts.near = min(facts.near, better.deviation)
                if better.at < self.at(node):
                    facts.at, facts.method = better.at, better.method
                    facts.reach = self._reach(node, region)
                    facts.interval = self._near_middle(node, facts.interval)

    def _reach(self, node: Node, region: Region) -> float:
        return (self.at(node).widened(self._rounding.relative) * region.reach).ceiling + UNDERFLOW

    def _error(self, node: Node) -> float:
        rule, middle = self._rule(node), self.center(node)
        error = 0.0 if node.is_input else math.inf if rule is None else rule.center_error(node, self)
        if middle is not None:
            error += self._reading(node) * float(length(middle))
        return math.inf if math.isnan(error) else above(error)

    def _interval(self, node: Node) -> Interval:
        rule = self._rule(node)
        if node.is_input and self.region is not None:
            bounds = self.region.intervals()[self.graph.inputs.index(node)]
            return bounds if self.whole_batch else Interval(bounds.low[None], bounds.high[None])
        return self._near_middle(node, Interval.unbounded(node.shape) if rule is None else rule.interval(node, self))

    def _near_middle(self, node: Node, bounds: Interval) -> Interval:
        """The part of an interval that the node can deviate to, and the computed value at the middle as others read it."""
        middle = self.center(node)
        if middle is None:
            return bounds
        both = bounds.within(Interval.around(middle, torch.full_like(middle, self.deviation(node))))
        read = Interval.around(middle, self._reading(node) * middle.abs())
        return Interval(torch.minimum(both.low, read.low), torch.maximum(both.high, read.high))

    def _norm(self, node: Node) -> float:
        """The least of what the rule, the interval and the middle give.

        Not less than that of the computed value at the middle, as others read it: between that and the exact value, norms are
        convex.
        """
        rule, bounds, middle, at_middle = self._rule(node), self.interval(node), self.center(node), 0.0
        lengths = [math.inf if rule is None else rule.norm(node, self)]
        if bounds.shape:
            sizes = length(bounds.sizes, -1)
            lengths.append(float(sizes.max()) if sizes.numel() else 0.0)
        if middle is not None and middle.dim():
            farthest = float(length(middle, -1).max()) if middle.numel() else 0.0
            lengths.append(farthest + self.deviation(node))
            at_middle = farthest * (1 + self._reading(node)) if math.isfinite(farthest) else 0.0
        return max(min(length for length in lengths if not math.isnan(length)), at_middle)

    def _rule(self, node: Node) -> Rule | None:
        """The rule of a node, if it has one that gives bounds."""
        return None if node in self.refused or _chosen_by_values(node) else registry.find(node)

    def _reading(self, node: Node) -> float:
        """2κ': what the readers of a node may add to its relative error."""
        rules = [(registry.find(user), user) for user in self.users[node]]
        return 2 * max((rule.roundoff(user) for rule, user in rules if rule is not None), default=0.0)

    @property
    def refusal(self) -> Refusal | None:
        """Why the output has no bound, where operations are `refused`."""
        return joined(self.unknown, [refusal for refusal in self.refused.values() if refusal is not None])

    # questions ---------------------------------------------------------------------------------------------------------

    def gain(self, node: Node) -> Gain:
        found = self.facts[node].gain
        if found is None:
            raise InternalError(f"the gain of {node.label} depends on itself, or is that of an input")
        return found

    def at(self, node: Node) -> Magnitude:
        """The constant from the inputs to a node."""
        found = self.facts[node].at
        assert found is not None, f"{node.name} has not had its turn"
        return found

    @property
    def links(self) -> dict[Node, Link]:
        """The links that compose: every node's own, but of those that another link has as a member."""
        links = {node: facts.link for node, facts in self.facts.items() if facts.link is not None}
        inside = {member for link in links.values() for member in link.members if member is not link.node}
        return {node: link for node, link in links.items() if node not in inside}

    def center(self, node: Node) -> torch.Tensor | None:
        return self.facts[node].middle

    def deviation(self, node: Node) -> float:
        facts = self.facts[node]
        return min(facts.reach + facts.error, facts.near)

    def error(self, node: Node) -> float:
        return self.facts[node].error

    def distances(self, node: Node) -> torch.Tensor | None:
        middle = self.center(node)
        if middle is None:
            return None
        bounds = self.interval(node)
        return above(torch.maximum(bounds.high - middle, middle - bounds.low).clamp(min=0))

    def interval(self, node: Node) -> Interval:
        return self._asked(node, "interval", self._interval)

    def norm(self, node: Node) -> float:
        return self._asked(node, "norm", self._norm)

    def _asked(self, node: Node, what: str, make: Callable[[Node], T]) -> T:
        """A fact that is made when something asks, after those of the nodes before it, and then kept.

        What a rule asks about its own node, while its other facts are made, is answered from what is known so far and not kept.
        """
        stack = [node]
        while stack:  # without recursion: a graph may be thousands of nodes deep
            top = stack[-1]
            unknown = getattr(self.facts[top], what) is None
            waiting = [source for source in top.inputs if getattr(self.facts[source], what) is None] if unknown else []
            stack.extend(waiting)
            if not waiting:
                stack.pop()
                if top is self._turn and unknown:
                    return make(top)
                if unknown:
                    setattr(self.facts[top], what, make(top))
        found: T = getattr(self.facts[node], what)
        return found


def _checked(node: Node, rule: Rule, gain: Gain) -> Gain:
    if len(gain.factors) != len(node.inputs):
        given = f"{type(rule).__name__}.gain gave {len(gain.factors)} factors for the {len(node.inputs)} inputs of {node.label}"
        raise InputError(f"a rule must give one factor per input, but {given}")
    return gain


class Fresh:
    """A pass whose middles count as exact: what a rule then says about the error of its node is that of its own kernel."""

    def __init__(self, facts: Pass) -> None:
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.facts, name)

    def error(self, node: Node) -> float:
        return 0.0


def _chosen_by_values(node: Node) -> bool:
    """Whether it reads integers or truth values that depend on the input: no rule knows which entries it takes."""
    return any(source.dtype is not None and not source.dtype.is_floating_point for source in node.inputs)
