"""Runs of dense layers and entrywise functions in a graph, bounded as whole chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from normscope.certify import chains
from normscope.certify.fold import applies_weight, folded_weight
from normscope.core.magnitude import Magnitude, product
from normscope.graph.graph import Node
from normscope.rules.activations import Entrywise
from normscope.rules.normalizers import normalizer_of
from normscope.rules.registry import Gain, Rule, registry

if TYPE_CHECKING:
    from normscope.certify.upper import Composition


@dataclass(eq=False)
class Link:
    """One step of the composition: from `sources` to `node`, over `members` that nothing else reads."""

    node: Node
    sources: tuple[Node, ...]
    gain: Gain
    members: tuple[Node, ...]
    shares: dict[Node, float] = field(default_factory=dict)  # log gain of each member, for the ledger


def dense_runs(context: Composition, found: dict[Node, Link]) -> list[Link]:
    """Runs of dense layers and entrywise functions, each bounded as a whole where that is smaller."""
    made = []
    taken: set[Node] = set()
    for start in found:
        if start in taken or _matrix(start, found) is None:
            continue
        run, node = [start], start
        while (following := _next(context, node, found)) is not None:
            run.append(following)
            node = following
        while _matrix(run[-1], found) is None:
            run.pop()
        taken.update(run)
        if sum(_matrix(node, found) is not None for node in run) > 1:
            made.append(_chain(context, [found[node] for node in run]))
    return made


def _next(context: Composition, node: Node, found: dict[Node, Link]) -> Node | None:
    """The only reader of a node, if the chain can go on through it."""
    readers = context.users[node]
    if node is context.graph.output or len(readers) != 1:
        return None
    reader = readers[0]
    while reader not in found:  # a linear map whose BN is folded is represented by that BN
        onward = context.users[reader]
        if len(onward) != 1:
            return None
        reader = onward[0]
    if found[reader].sources != (node,):
        return None
    if _matrix(reader, found) is not None or _slopes(context, reader) is not None:
        return reader
    return None


def _matrix(node: Node, found: dict[Node, Link]) -> Callable[[], torch.Tensor] | None:
    """A maker of the dense matrix that a link applies to the last axis, or None."""
    members = [member for member in found[node].members if member.op == "linear"]
    if len(members) != 1 or not applies_weight(members[0]) or not found[node].gain.factors[0].finite:
        return None
    linear = members[0]
    if node is linear:
        return lambda: linear.args[1].double()
    normalizer = normalizer_of(node)
    return (lambda: folded_weight(linear, normalizer)) if normalizer is not None and normalizer.fixed else None


def entrywise(node: Node) -> Rule | None:
    """The rule of a node whose every entry is a function of that same entry of its only input: nothing broadcasts."""
    if len(node.inputs) != 1 or node.shape != node.input.shape:
        return None
    rule = registry.find(node)
    return rule if rule is not None and rule.slopes(node) is not None else None


def _slopes(context: Composition, node: Node) -> tuple[float, float] | None:
    rule = entrywise(node)
    slopes = None if rule is None else rule.slopes(node)
    if context.local and isinstance(rule, Entrywise):
        low, high = rule.slopes_on(node, context.interval(node.input))
        slopes = float(low.min()), float(high.max())
    return slopes if slopes is not None and all(map(math.isfinite, slopes)) else None


def _followed(context: Composition, layer: chains.Layer, node: Node) -> chains.Layer:
    """A layer with one more entrywise function behind it."""
    slopes = _slopes(context, node)
    assert slopes is not None
    rule, neurons = registry.find(node), None
    if context.local and isinstance(rule, Entrywise) and math.prod(node.shape) == layer.width and layer.slopes == (1.0, 1.0):
        sides = rule.slopes_on(node, context.interval(node.input))
        neurons = tuple(side.reshape(-1).expand(layer.width).contiguous() for side in sides)
    return chains.Layer(layer.matrix, layer.norm, layer.width, _slope_product(layer.slopes, slopes), neurons)


def _chain(context: Composition, run: Sequence[Link]) -> Link:
    layers: list[chains.Layer] = []
    found = {link.node: link for link in run}
    for link in run:
        maker = _matrix(link.node, found)
        if maker is not None:
            layers.append(chains.Layer(maker, link.gain.factors[0], link.node.shape[-1]))
        else:
            layers[-1] = _followed(context, layers[-1], link.node)
    bound, method = chains.bound(layers)
    apart = product(link.gain.factors[0] for link in run)
    members = tuple(member for link in run for member in link.members)
    chain = Link(run[-1].node, run[0].sources, Gain((min(bound, apart),), f"chain of {len(layers)}: {method}"), members)
    chain.shares = {node: share for link in run for node, share in link.shares.items()}
    weights = [node for node in chain.shares if node.op == "linear"]
    saved = log_ratio(chain.gain.factors[0], apart) / max(len(weights), 1)
    for node in weights:  # what the chain saves over the product belongs to its layers alike
        chain.shares[node] += saved
    return chain


def log_ratio(larger: Magnitude, smaller: Magnitude) -> float:
    """log(larger/smaller), zero where it is not defined."""
    return larger.log - smaller.log if math.isfinite(larger.log) and math.isfinite(smaller.log) else 0.0


def _slope_product(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    corners = [a * b for a in first for b in second]
    return min(corners), max(corners)
