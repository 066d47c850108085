"""How a bracket builds up with depth: both of its sides at every node, on the way from the input to the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope.certify.upper import Upper
from normscope.core.bracket import Witness
from normscope.core.magnitude import Magnitude, root_sum_square
from normscope.graph.graph import Graph, Node
from normscope.operators.dense import frobenius_norm
from normscope.rules.readings import Normalizer
from normscope.rules.registry import registry


def upper_along(above: Upper, normalizers: bool = True) -> dict[Node, Magnitude]:
    """A bound on the constant from the inputs to each node, composed layer by layer, without the bounds of whole chains.

    normalizers=False: the same with the gain of every normalizer taken as 1, to see what they do to the bound. A node that depends
    on an operation without a bound has none.
    """
    at, unbounded = dict(above.at), set(above.refused)
    for link in above.layered:
        if not normalizers:
            skipped = registry.reading(link.node, Normalizer) is not None and len(link.node.inputs) == 1
            at[link.node] = at[link.node.input] if skipped else link.arriving(at.__getitem__)
        if not unbounded.isdisjoint(link.node.inputs):
            unbounded.add(link.node)
    return {node: value.widened(above.certificate.rounding) for node, value in at.items() if node not in unbounded}


def separation_along(graph: Graph, nodes: Sequence[Node], witness: Witness) -> dict[Node, Magnitude]:
    """‖h(x) − h(y)‖/‖x − y‖ for the value h of each node and the witness's points x and y, computed in float64.

    At the output it is the lower bound, before rounding is taken off.
    """
    with torch.no_grad():
        first, second = (graph.run(point, torch.float64, capture=nodes)[1] for point in witness)
        apart = _distance(witness.first, witness.second)
        return {node: _distance([first[node]], [second[node]]) / apart for node in nodes}


def _distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> Magnitude:
    """Infinite where a value is not finite."""
    return root_sum_square(
        frobenius_norm((a.double() - b.double()).nan_to_num(math.inf)) for a, b in zip(first, second, strict=True)
    )
