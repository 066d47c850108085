"""What people write by hand, recognised as what it is.

Each recogniser looks at one node and the expression above it and returns the single node that computes the same, or
None. What was recognised is then checked: a match that does not compute the same values is left as it was written.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch

from normscope.core.randomness import preserved_random_state
from normscope.graph.drawing import DrawnAlike
from normscope.graph.graph import Graph, Node
from normscope.graph.patterns.activations import as_activation
from normscope.graph.patterns.attention import as_attention
from normscope.graph.patterns.normalizers import as_centering, as_standardization
from normscope.graph.patterns.rotary import as_rotary
from normscope.graph.perturbing import Noise

RECOGNISERS = (as_centering, as_activation, as_standardization, as_rotary, as_attention)


def recognise(graph: Graph) -> Graph:
    """The graph with every hand-written normalizer, activation, rotary embedding and attention as one node."""
    original = graph
    for recogniser in RECOGNISERS:
        found = {node: match for node in graph if (match := recogniser(node)) is not None}
        same = _confirmed(graph, found) if found else {}
        if same:
            graph = graph.replace(same)
    if graph is original:
        return graph
    kept = {id(constant) for node in graph for constant in node.constants}
    lost = [name for node in original for constant in node.constants if id(constant) not in kept for name in constant.sources]
    return replace(graph, absorbed=tuple(dict.fromkeys(lost)))


def _confirmed(graph: Graph, found: Mapping[Node, Node]) -> dict[Node, Node]:
    """The matches that compute what their nodes do, each from the same values: nothing behind them amplifies rounding."""
    noise = Noise(0)
    inputs = [
        torch.zeros(node.shape, dtype=node.dtype)  # ids and masks, where parameters and all inputs are nodes
        if node.dtype is not None and not node.dtype.is_floating_point
        else noise(node.shape)
        for node in graph.inputs
    ]
    members = set(graph)
    read = {node for match in found.values() for node in _made_of(match, members) if node in members}
    # a recognised constant may differ by its rounding in the model's type
    share = 1e-9 if graph.dtype == torch.float64 else 1e-5
    with torch.no_grad(), preserved_random_state(), DrawnAlike():
        values = graph.run(inputs, torch.float64, {*found, *read})[1]
        return {node: match for node, match in found.items() if _is_close(values[node], _value(match, values, members), share)}


def _made_of(match: Node, members: Container[Node]) -> list[Node]:
    """A match behind the nodes that it reads, down to those of the graph."""
    return [match] if match in members else [*(node for source in match.inputs for node in _made_of(source, members)), match]


def _value(match: Node, values: Mapping[Node, Any], members: Container[Node]) -> Any:
    known = dict(values)
    for node in _made_of(match, members):
        if node not in known:
            known[node] = node.evaluate(known, torch.float64)
    return known[match]


def _is_close(expected: torch.Tensor, found: torch.Tensor, share: float) -> bool:
    if not expected.numel():
        return True
    tolerance = share * (1 + float(expected.abs().nan_to_num(0, 0, 0).max()))
    return expected.shape == found.shape and torch.allclose(expected, found, rtol=0, atol=tolerance, equal_nan=True)
