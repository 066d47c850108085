"""How a bracket builds up with depth: both of its sides at every node, on the way from the input to the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope.certify.runs import Link
from normscope.certify.upper import Upper, arriving
from normscope.core.bracket import Witness
from normscope.core.magnitude import ONE, Magnitude, root_sum_square
from normscope.graph.graph import Graph, Node
from normscope.operators.dense import frobenius_norm
from normscope.rules.normalizers import normalizer_of
from normscope.rules.registry import Gain


def upper_along(above: Upper, normalizers: bool = True) -> dict[Node, Magnitude]:
    """A bound on the constant from the inputs to each node, composed layer by layer, without the bounds of whole chains.

    normalizers=False: the same with the gain of every normalizer taken as 1, to see what they do to the bound.
    """
    at = dict.fromkeys(above.graph.inputs, ONE)
    for link in above.layered:
        before = _folded_map(link, above)
        if before is not None:
            at[before] = above.norms[before] * at[link.sources[0]]
        at[link.node] = arriving(link if normalizers else _without_normalizer(link, above), at)
    return {node: value.widened(above.certificate.rounding) for node, value in at.items()}


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


def _folded_map(link: Link, above: Upper) -> Node | None:
    """The linear map that a BN is folded into."""
    if normalizer_of(link.node) is None:
        return None
    return next((member for member in link.members if member is not link.node and member in above.norms), None)


def _without_normalizer(link: Link, above: Upper) -> Link:
    if normalizer_of(link.node) is None or len(link.sources) != 1:
        return link
    before = _folded_map(link, above)
    return Link(link.node, link.sources, Gain((ONE if before is None else above.norms[before],), "without its gain"), link.members)
