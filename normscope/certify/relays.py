"""Where columns of symbols end: at a relay, a node that everything behind it depends on through it alone, they become new symbols.

At a relay z with Δz = JΔx + Gη + e, the part Gη + e is a vector of its own, and no column goes past it. What is kept of it is an
ellipsoid per token (`certify/ellipsoids.py`), which costs next to no tightness, or, where its entries are multiples of rows of J, a
size per entry and per token, which loses how columns would add up and cancel behind z. So relays of the first kind stand where they
save work, and those of the second only where the work that is allowed does not do without.

As long as nodes act on each token alone, or move entries, the columns of different tokens never meet: they travel together, one
column for the same entry of all, and every entry of a node has an owner, the token whose symbols alone reach it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from normscope.certify.columns import CALL, behind, cost
from normscope.certify.ellipsoids import Ellipsoids
from normscope.certify.kernels import linear_map, matrix_of_tokens
from normscope.graph.graph import Graph, Node
from normscope.rules.readings import Activation, Normalizer
from normscope.rules.registry import Rule, registry
from normscope.rules.remainder import Sets
from normscope.rules.shape import entries_read

BENT = 0.02  # of the entries of a kinked activation: as many may change their slope, by a guess
NOTHING: Mapping[Node, float] = MappingProxyType({})
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


def plan(graph: Graph, most: float, shares: Mapping[Node, float] = NOTHING) -> Plan:
    """The cheapest relays that keep the shape of what arrives; where one sweep would cost more than `most`, any that are cheapest.

    Other relays lose more: they are taken only then, the fewest with which it costs no more. shares: as in `estimate`.
    """
    places = cut_vertices(graph)
    shaped = [node for node in places if framed(node) and any(_mixes(reader) for reader in graph.users[node])]
    best = min(_plans(graph, shaped, shares), key=lambda made: made.work)
    if best.work <= most or len(shaped) == len(places):
        return best
    plans = _plans(graph, places, shares)
    return next((made for made in plans if made.work <= most), min(plans, key=lambda made: made.work))


def _plans(graph: Graph, places: Sequence[Node], shares: Mapping[Node, float]) -> list[Plan]:
    chosen = dict.fromkeys(tuple(places[stride - 1 :: stride]) if stride else () for stride in STRIDES)
    return [Plan(relays, estimate(graph, relays, shares=shares)) for relays in chosen]


def framed(node: Node) -> bool:
    """Whether a relay's symbols are ellipsoids: not where they may be multiples of rows of J, nor where those are too large."""
    rule = registry.find(node)
    return (
        Ellipsoids.affordable(node.shape, Sets.along(node.shape, (-1,)))
        and rule is not None
        and type(rule).multiples is Rule.multiples
    )


def _mixes(node: Node) -> bool:
    """Whether it acts on whole tokens: without such a reader vectors along the last axis, of an image's rows say, mean nothing."""
    normalizer = registry.reading(node, Normalizer)
    if normalizer is not None:
        return normalizer.axes == (len(node.shape) - 1,) and not normalizer.by_channel
    return matrix_of_tokens(node) is not None


def cut_vertices(graph: Graph) -> list[Node]:
    """Nodes before the output that everything behind them depends on through them alone, and that several nodes read.

    No padding that is part of a convolution's operator: the gain of that is about padded values, and new symbols are any values.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    readers: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        for source in node.inputs:
            readers.setdefault(source, set()).add(node)
    last = {node: max((order[reader] for reader in readers.get(node, ())), default=order[node]) for node in graph.nodes}
    products = filter(None, map(linear_map, graph.nodes))
    padding = {product.kernel.pad for product in products if product.kernel is not None}
    found, farthest = [], -1
    for node in graph.nodes[: order[graph.output]]:  # others may follow that the output does not need
        if farthest <= order[node] and not node.is_input and len(readers.get(node, ())) > 1 and len(node.shape) > 1:
            found += [node] if node not in padding else []
        farthest = max(farthest, last[node])
    return found


def owners(node: Node, reached: Sequence[Node]) -> dict[Node, torch.Tensor]:
    """The owner of every entry, at a node and at those behind it, from the first on, in which no two tokens of the node meet."""
    places = torch.arange(math.prod(node.shape)).reshape(node.shape)
    found = {node: places // max(node.shape[-1], 1) if node.shape else places}
    for one in reached:
        own = _owner(one, found)
        if own is None:
            break
        found[one] = own
    return found


def _owner(node: Node, known: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """The owners of a node's entries; None where tokens meet, or where it is not known that they do not."""
    rule, sources = registry.find(node), list(dict.fromkeys(node.inputs))
    carrying = [known[source] for source in sources if source in known]  # no column reaches the others
    if rule is None or not node.shape or not math.prod(node.shape):
        return None
    if rule.linear(node) and not rule.terms(node):  # nothing is added up: it moves entries
        read = entries_read(node)
        moved = len(carrying) == len(sources) and int(read.min()) >= 0
        return torch.cat([owner.reshape(-1) for owner in carrying])[read].reshape(node.shape) if moved else None
    if not _tokenwise(node, rule) or any(source.shape[:-1] != node.shape[:-1] for source in sources):
        return None
    first = carrying[0][..., :1]
    return first.expand(node.shape) if all(torch.equal(owner, first.expand(owner.shape)) for owner in carrying) else None


def _tokenwise(node: Node, rule: Rule) -> bool:
    return rule.tokenwise(node) or matrix_of_tokens(node) is not None


def estimate(graph: Graph, relays: Sequence[Node] = (), bent: float = BENT, shares: Mapping[Node, float] = NOTHING) -> float:
    """About what the columns of one sweep cost.

    shares: of a node's entries, those that have symbols, as far as it is guessed; else all, and `bent` of a kinked activation's.
    """
    made, costs = Plan(tuple(relays)), {node: cost(node) for node in graph.nodes}
    total = sum(math.prod(node.shape) for node in graph.inputs) * sum(costs.values())
    for node in graph.nodes:
        rule, activation = registry.find(node), registry.reading(node, Activation)
        if node.is_input or (node not in made.relays and (rule is None or rule.linear(node))):
            continue
        kinked = node not in made.relays and activation is not None and activation.kinked
        columns, reached = math.prod(node.shape), behind(graph, [node], made.last(graph, node))
        few = 0 if kinked else len(owners(node, reached)) - 1
        total += math.prod(node.shape[-1:]) * sum(costs[one] for one in reached[:few]) + CALL * len(reached) * (not kinked)
        share = 1.0 if node in made.relays else shares.get(node, bent if kinked else 1.0)
        total += columns * share * sum(costs[one] for one in reached[few:])
    return total
