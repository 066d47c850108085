"""Where columns of symbols end: at a relay, a node that everything behind it depends on through it alone, they become new symbols.

At a relay z with Δz = JΔx + Gη + e, the part Gη + e is a vector of its own, and no column goes past it. What is kept of it is an
ellipsoid per token (`certify/ellipsoids.py`), which costs next to no tightness, or, where its entries are multiples of rows of J, a
size per entry and per token, which loses how columns would add up and cancel behind z. So relays of the first kind stand where they
save work, and those of the second only where the work that is allowed does not do without.

Within tokenwise nodes the columns of different tokens never meet: they travel together, one column for the same entry of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.certify.columns import CALL, behind, cost
from normscope.certify.ellipsoids import Ellipsoids
from normscope.graph.graph import Graph, Node
from normscope.rules.readings import Activation
from normscope.rules.registry import Rule, registry
from normscope.rules.remainder import Sets

BENT = 0.02  # of the entries of a kinked activation: as many may change their slope, by a guess
STRIDES = (0, 6, 4, 3, 2, 1)  # of the places where a relay could be, every so many are one; 0: none


@dataclass(frozen=True)
class Plan:
    """Relays, in order, and about what the columns of one sweep cost with them (`columns.cost`)."""

    relays: tuple[Node, ...] = ()
    work: float = 0.0

    def last(self, graph: Graph, node: Node) -> Node | None:
        """The first relay behind a node, where its columns end; None for the output."""
        if not self.relays:
            return None
        order = {one: place for place, one in enumerate(graph.nodes)}
        return next((relay for relay in self.relays if order[relay] > order[node]), None)


def plan(graph: Graph, most: float) -> Plan:
    """The cheapest relays that keep the shape of what arrives; where one sweep would cost more than `most`, any that are cheapest.

    Other relays lose more: they are taken only then, the fewest with which it costs no more.
    """
    places = cut_vertices(graph)
    shaped = [node for node in places if framed(node)]
    best = min(_plans(graph, shaped, STRIDES), key=lambda made: made.work)
    if best.work <= most or len(shaped) == len(places):
        return best
    plans = _plans(graph, places, STRIDES)
    return next((made for made in plans if made.work <= most), min(plans, key=lambda made: made.work))


def _plans(graph: Graph, places: Sequence[Node], strides: Sequence[int]) -> list[Plan]:
    chosen = dict.fromkeys(tuple(places[stride - 1 :: stride]) if stride else () for stride in strides)
    return [Plan(relays, estimate(graph, relays)) for relays in chosen]


def framed(node: Node) -> bool:
    """Whether a relay's symbols are ellipsoids: not where they may be multiples of rows of J, nor where those are too large."""
    rule = registry.find(node)
    return (
        Ellipsoids.affordable(node.shape, Sets.along(node.shape, (-1,)))
        and rule is not None
        and type(rule).multiples is Rule.multiples
    )


def cut_vertices(graph: Graph) -> list[Node]:
    """Nodes before the output that everything behind them depends on through them alone, and that several nodes read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    readers: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        for source in node.inputs:
            readers.setdefault(source, set()).add(node)
    last = {node: max((order[reader] for reader in readers.get(node, ())), default=order[node]) for node in graph.nodes}
    found, farthest = [], -1
    for node in graph.nodes[: order[graph.output]]:  # others may follow that the output does not need
        if farthest <= order[node] and not node.is_input and len(readers.get(node, ())) > 1 and len(node.shape) > 1:
            found.append(node)
        farthest = max(farthest, last[node])
    return found


def together(graph: Graph, node: Node, reached: Sequence[Node]) -> int:
    """How many of the nodes behind one, from the first on, act on each token alone."""
    alike = {node}
    for count, one in enumerate(reached):
        rule = registry.find(one)
        sources = [source for source in one.inputs if source in alike]
        same = all(source.shape[:-1] == one.shape[:-1] for source in one.inputs)
        if rule is None or not sources or not same or not rule.tokenwise(one):
            return count
        alike.add(one)
    return len(reached)


def estimate(graph: Graph, relays: Sequence[Node] = (), bent: float = BENT) -> float:
    """About what the columns of one sweep cost. bent: the share of entries of a kinked activation that have symbols."""
    made, costs = Plan(tuple(relays)), {node: cost(node) for node in graph.nodes}
    total = sum(math.prod(node.shape) for node in graph.inputs) * sum(costs.values())
    for node in graph.nodes:
        rule, activation = registry.find(node), registry.reading(node, Activation)
        if node.is_input or (node not in made.relays and (rule is None or rule.linear(node))):
            continue
        kinked = node not in made.relays and activation is not None and activation.kinked
        columns, reached = math.prod(node.shape), behind(graph, [node], made.last(graph, node))
        few = 0 if kinked else together(graph, node, reached)
        total += node.shape[-1] * sum(costs[one] for one in reached[:few]) + CALL * len(reached) * (not kinked)
        total += columns * (bent if kinked else 1.0) * sum(costs[one] for one in reached[few:])
    return total
