"""Which rows of J a sweep keeps, and which symbols are multiples of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from normscope.certify.columns import Linearized, middle_of, rule_of
from normscope.certify.jacobian import Jacobian, guessed_rows
from normscope.certify.passing import Pass
from normscope.certify.symbols import Contribution
from normscope.core.rounding import SUMMED
from normscope.graph.graph import Graph, Node
from normscope.rules.readings import Activation
from normscope.rules.registry import registry
from normscope.rules.remainder import Sizes

GUESSED = 4  # times the guessed distance of an entry, within which a kink is taken to be reached
LARGER = 16  # times the radius: regions up to which may be asked for next
MOST_ROWS_KEPT = 30_000_000  # entries of all rows of J that are kept for the output


class SweepLike(Sizes, Protocol):
    """What is asked here of a sweep (certify/sweep.py)."""

    facts: Pass
    graph: Graph
    linearized: Linearized
    unit: float
    jacobian: Jacobian
    parts: list[Contribution]
    bent: dict[Node, torch.Tensor]
    brought: dict[Node, tuple[torch.Tensor, torch.Tensor]]

    @property
    def away(self) -> SweepLike | None: ...


def guessed(sweep: SweepLike) -> tuple[dict[Node, torch.Tensor], float]:
    """The entries whose rows of J are kept: those in front of a kink that may change their slope, by a guess.

    And up to which distance from the middle: farther than this region, if there is room.
    """
    kinked = {node: activation for node in sweep.graph.nodes if (activation := registry.reading(node, Activation))}
    sources = [node.input for node, activation in kinked.items() if activation.kinked and len(node.inputs) == 1]
    lengths = guessed_rows(sweep.linearized, sources)
    far = {source: (middle_of(sweep.facts, source).abs() / lengths[source]).reshape(-1).nan_to_num(0.0) for source in lengths}
    reach = GUESSED * sweep.unit
    for enough in (reach * LARGER, reach):
        places = {source: (distances <= enough).nonzero().reshape(-1) for source, distances in far.items()}
        if sum(map(len, places.values())) * _width(sweep) <= MOST_ROWS_KEPT:
            break
    return _affordable(sweep, places.items()), enough if far else math.inf


def wanted(sweep: SweepLike) -> dict[Node, torch.Tensor]:
    """The entries whose rows of J are kept: those that symbols of the first sweep are multiples of."""
    assert sweep.away is not None
    places = []
    for part in sweep.away.parts:
        multiples = None if part.columns is None else rule_of(part.node).multiples(part.node, sweep.facts, sweep.away, sweep.chords)
        if multiples is not None:
            places.append((part.node.input, multiples.places[part.symbols.places].reshape(-1)))
    return _affordable(sweep, places)


def _affordable(sweep: SweepLike, places: Iterable[tuple[Node, torch.Tensor]]) -> dict[Node, torch.Tensor]:
    wanted: dict[Node, torch.Tensor] = {}
    room, width = MOST_ROWS_KEPT, _width(sweep)
    for source, more in places:
        both = torch.cat([more, wanted.get(source, more[:0])]).unique()
        if len(more) and len(both) * width <= room:
            room -= (len(both) - len(wanted.get(source, ()))) * width
            wanted[source] = both
    return wanted


def _width(sweep: SweepLike) -> int:
    return sum(math.prod(node.shape) for node in sweep.graph.inputs)


def find_multiples(sweep: SweepLike, part: Contribution) -> None:
    """The rows of J that a node's symbols are multiples of, and what is left of their sizes."""
    assert sweep.away is not None
    if len(part.node.inputs) != 1 or part.node.input not in sweep.jacobian.rows:
        return
    found = rule_of(part.node).multiples(part.node, sweep.facts, sweep.away, sweep.chords)
    if found is None:
        return
    source, symbols = part.node.input, part.symbols
    kept = sweep.jacobian.wanted[source]
    places, weights, known = (values[symbols.places] for values in (found.places, found.weights, found.known))
    where = torch.searchsorted(kept, places).clamp(max=len(kept) - 1)
    known = known & (kept[where] == places).all(1)
    weights = weights * known[:, None]
    brought = torch.zeros((), dtype=torch.float64)
    if part.node in sweep.brought:  # a relay: its symbols are scale ⊙ ε and what columns bring, and not ε
        brought, scale = (values[symbols.places] for values in sweep.brought[part.node])
        weights = weights * scale[:, None]
    part.rows = torch.einsum("uk,ukd->ud", weights, sweep.jacobian.rows[source][where])
    part.least, part.most = (ends[symbols.places] for ends in (found.least, found.most))
    bent = (weights.abs() * sweep.bent[source][places]).sum(1) * SUMMED + brought * SUMMED + symbols.added
    part.rest = torch.where(known, bent, symbols.sizes)
