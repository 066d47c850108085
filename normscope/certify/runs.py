"""Runs of dense layers and entrywise functions in a graph, bounded as whole chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from normscope.certify import chains
from normscope.certify.links import Link, log_ratio
from normscope.certify.passing import Pass
from normscope.core.magnitude import product
from normscope.graph.graph import Node
from normscope.rules.activations import Entrywise
from normscope.rules.affine import constant_map
from normscope.rules.readings import LinearMap, Normalizer
from normscope.rules.registry import Gain, Rule, registry


def dense_runs(facts: Pass) -> list[Link]:
    """Runs of dense layers and entrywise functions, each bounded as a whole where that is smaller."""
    made, found = [], facts.links
    taken: set[Node] = set()
    for start in found:
        if start in taken or _matrix(start, found) is None:
            continue
        run = [start]
        while (following := _next(facts, run[-1], found)) is not None:
            run.append(following)
        while _matrix(run[-1], found) is None:
            run.pop()
        taken.update(run)
        if sum(_matrix(node, found) is not None for node in run) > 1:
            made.append(_chain(facts, [found[node] for node in run]))
    return made


def _next(facts: Pass, node: Node, found: dict[Node, Link]) -> Node | None:
    """The only reader of a node, if the chain can go on through it."""
    readers = facts.users[node]
    if node is facts.graph.output or len(readers) != 1:
        return None
    reader = readers[0]
    while reader not in found:  # a linear map whose BN is folded is represented by that BN
        if len(facts.users[reader]) != 1:
            return None
        reader = facts.users[reader][0]
    onward = found[reader].sources == (node,) and (_matrix(reader, found) is not None or _slopes(facts, reader) is not None)
    return reader if onward else None


def _matrix(node: Node, found: dict[Node, Link]) -> Callable[[], torch.Tensor] | None:
    """A maker of the dense matrix that a link applies to the last axis, or None."""
    members = [(member, applied) for member in found[node].members if (applied := _dense(member)) is not None]
    if len(members) != 1 or not found[node].gain.factors[0].finite:
        return None
    linear, applied = members[0]
    if node is linear:
        return applied.matrix
    normalizer = registry.reading(node, Normalizer)
    return (lambda: applied.scaled(normalizer.affine[0]).matrix()) if normalizer is not None and normalizer.fixed else None


def _dense(node: Node) -> LinearMap | None:
    """The map of a node that applies a constant matrix to the last axis."""
    applied = constant_map(node)
    return applied if applied is not None and applied.kernel is None and applied.input_axis == applied.output_axis == -1 else None


def entrywise(node: Node) -> Rule | None:
    """The rule of a node whose every entry is a function of that same entry of its only input: nothing broadcasts."""
    if len(node.inputs) != 1 or node.shape != node.input.shape:
        return None
    rule = registry.find(node)
    return rule if rule is not None and rule.slopes(node) is not None else None


def _slopes(facts: Pass, node: Node) -> tuple[float, float] | None:
    rule = entrywise(node)
    slopes = None if rule is None else rule.slopes(node)
    if facts.local and isinstance(rule, Entrywise):
        low, high = rule.slopes_on(node, facts.interval(node.input))
        slopes = float(low.min()), float(high.max())
    return slopes if slopes is not None and all(map(math.isfinite, slopes)) else None


def _followed(facts: Pass, layer: chains.Layer, node: Node) -> chains.Layer:
    """A layer with one more entrywise function behind it."""
    slopes = _slopes(facts, node)
    assert slopes is not None
    rule, neurons = registry.find(node), None
    if facts.local and isinstance(rule, Entrywise) and math.prod(node.shape) == layer.width and layer.slopes == (1.0, 1.0):
        sides = rule.slopes_on(node, facts.interval(node.input))
        neurons = tuple(side.reshape(-1).expand(layer.width).contiguous() for side in sides)
    return chains.Layer(layer.matrix, layer.norm, layer.width, _slope_product(layer.slopes, slopes), neurons)


def _chain(facts: Pass, run: Sequence[Link]) -> Link:
    layers: list[chains.Layer] = []
    found = {link.node: link for link in run}
    for link in run:
        maker = _matrix(link.node, found)
        if maker is not None:
            layers.append(chains.Layer(maker, link.gain.factors[0], link.node.shape[-1]))
        else:
            layers[-1] = _followed(facts, layers[-1], link.node)
    bound, method = chains.bound(layers)
    apart = product(link.gain.factors[0] for link in run)
    members = tuple(member for link in run for member in link.members)
    shares = {node: share for link in run for node, share in link.shares.items()}
    weights = [node for node in shares if _dense(node) is not None]
    for node in weights:  # what the chain saves over the product belongs to its layers alike
        shares[node] += log_ratio(min(bound, apart), apart) / len(weights)
    gain = Gain((min(bound, apart),), f"chain of {len(layers)}: {method}")
    return Link(run[-1].node, run[0].sources, gain, members, shares)


def _slope_product(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    corners = [a * b for a in first for b in second]
    return min(corners), max(corners)
