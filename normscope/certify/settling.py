"""Decisions that come out the same on all of a region: there the graph is one without them.

Let G' be the graph G with every decision (a comparison, a rank, a cast to integers) replaced by its answer at the middle. If each
of these answers is certain on the region by the facts of G', then G = G' there: at any point the first decision of G that differs
would read what it reads in G', because those before it agree, and so could not differ.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._pytree import tree_map_only

from normscope.core.region import Region
from normscope.graph.graph import Constant, Graph, Node
from normscope.graph.holding import specialised
from normscope.rules.decisions import certain, is_decision, named, read_by
from normscope.rules.registry import Context


def settled(graph: Graph, region: Region | None) -> tuple[Graph, dict[Node, Node]]:
    """The graph with its decisions answered as at the region's middle, and for each decision the node that stands for it there.

    It is this graph on the region if `uncertain` finds nothing. The graph itself where there is nothing to decide.
    """
    decisions = [node for node in graph if is_decision(node)] if region is not None else []
    if region is None or not decisions:
        return graph, {}
    middle = [part if graph.whole_batch else part[None] for part in region.middle]
    with torch.no_grad():
        answers = graph.run(middle, torch.float64, capture=decisions)[1]
    renewed = specialised(graph, {node: Constant(answers[node]) for node in decisions})
    output = renewed[graph.output]
    if not isinstance(output, Node):
        return graph, {}
    asked = {node: _asking(node, renewed) for node in decisions}
    needed = _ancestors([output, *(source for asking in asked.values() for source in read_by(asking))])
    nodes = tuple(value for value in renewed.values() if isinstance(value, Node) and (value.is_input or value in needed))
    return replace(graph, nodes=tuple(dict.fromkeys(nodes)), output=output), asked


def _ancestors(nodes: list[Node]) -> set[Node]:
    found: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes.extend(node.inputs)
    return found


def _asking(node: Node, renewed: dict[Node, object]) -> Node:
    """A decision, reading what its inputs have become."""
    args, kwargs = tree_map_only(Node, renewed.__getitem__, (node.args, node.kwargs))
    return Node(node.name, node.op, node.target, args, kwargs, node.path, node.source, node.shape, node.dtype)


def uncertain(asked: dict[Node, Node], facts: Context) -> str:
    """The first decision that the facts of the settled graph do not show to be certain, in words; empty if all are."""
    doubtful = [node for node, asking in asked.items() if read_by(asking) and not certain(asking, facts)]
    return named(doubtful[0]) if doubtful else ""
