"""What people write by hand, recognised as what it is.

Each recogniser looks at one node and the expression above it and returns the single node that computes the same, or
None. What was recognised is then checked: the rewritten graph must give the same output as the original.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from normscope.core.randomness import preserved_random_state
from normscope.graph.drawing import DrawnAlike
from normscope.graph.graph import Graph
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
        if found:
            graph = graph.replace(found)
    if graph is original:
        return graph
    _check_same_function(original, graph)
    kept = {id(constant) for node in graph for constant in node.constants}
    lost = [name for node in original for constant in node.constants if id(constant) not in kept for name in constant.sources]
    return replace(graph, absorbed=tuple(dict.fromkeys(lost)))


def _check_same_function(before: Graph, after: Graph) -> None:
    noise = Noise(0)
    inputs = [
        torch.zeros(node.shape, dtype=node.dtype)  # ids and masks, where parameters and all inputs are nodes
        if node.dtype is not None and not node.dtype.is_floating_point
        else noise(node.shape)
        for node in before.inputs
    ]
    with torch.no_grad(), preserved_random_state(), DrawnAlike():
        expected, found = before.run(inputs, torch.float64)[0], after.run(inputs, torch.float64)[0]
    if not expected.numel():
        return
    # a recognised constant may differ by its rounding in the model's type, which later layers amplify
    share = 1e-9 if before.dtype == torch.float64 else 1e-5
    tolerance = share * (1 + float(expected.abs().nan_to_num(0, 0, 0).max()))
    wrong = ~torch.isclose(expected, found, rtol=0, atol=tolerance, equal_nan=True)
    if bool(wrong.any()):
        error = float((expected - found)[wrong].abs().max())
        raise AssertionError(f"a bug of normscope: recognising patterns changed the output by {error:.3g}; please report it")
