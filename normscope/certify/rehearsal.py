"""A rehearsal of affine forms with a few random columns: about how large their bound would be. A guess that decides about work.

‖J_i‖ is about the root mean square of (Jz)_i, z normal. Σ_u |G_iu| a_u is about the median of |Σ_u G_iu a_u c_u|, the c_u
independent Cauchy numbers: a sum of those is a Cauchy number again, and scales add up. So the symbols of all nodes share a few
columns, and one walk through the graph does both sweeps (`certify/forms.py`). Where symbols are bounded by sets, the smaller of
both sizes is taken, and of a set the largest entry: the guess is rather too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from normscope.certify.columns import Linearized, rule_of
from normscope.certify.passing import Pass
from normscope.graph.graph import Node
from normscope.rules.remainder import Remainder, Sets

PROBES = 3  # columns of each kind


@dataclass
class Rehearsal:
    """bound: about the least that affine forms can give; 0 where nothing can be guessed.

    shares: of each curved node's entries, those that have symbols.
    """

    bound: float = 0.0
    shares: dict[Node, float] = field(default_factory=dict)


class _Guessed:
    """Sizes of changes, as far as they were guessed."""

    chords = False

    def __init__(self, linearized: Linearized) -> None:
        self.found, self.seen = dict[Node, torch.Tensor](), linearized.seen

    def entries(self, node: Node) -> torch.Tensor:
        return self.found[node]

    def sets(self, node: Node, sets: Sets) -> torch.Tensor:
        return sets.split(self.found[node]).amax(-1)


def rehearsed(facts: Pass) -> Rehearsal:
    """From the facts of a pass without affine forms."""
    graph, region = facts.graph, facts.region
    assert region is not None
    linearized = facts.known.derivative_at(graph, region.middle, facts).linearized
    generator = torch.Generator().manual_seed(0)
    curved = {node for node in graph.nodes if not node.is_input and not rule_of(node).linear(node)}
    read = {graph.output, *(source for node in curved for source in (*node.inputs, linearized.seen(node)))}
    away, moves = _Guessed(linearized), _Guessed(linearized)
    kinds = slice(0, PROBES), slice(PROBES, 2 * PROBES), slice(2 * PROBES, 3 * PROBES)  # of J, of symbols in both sweeps
    made = Rehearsal()

    def visit(node: Node, columns: torch.Tensor) -> None:
        if node in curved:
            for kind, sizes in zip(kinds[1:], (None, moves), strict=True):
                remainder = rule_of(node).remainder(node, facts, away, sizes)
                if remainder is None:
                    raise _Unknown
                columns[kind] += _symbols(remainder, generator)
                made.shares[node] = float((remainder.scale * remainder.entries != 0).double().mean())
        if node in read:
            straight = columns[kinds[0]].square().mean(0).sqrt()
            far, wide = (columns[kind].abs().median(0).values for kind in kinds[1:])
            far, wide = straight * region.reach + far, straight + wide
            if node is graph.output:
                made.bound = float(torch.minimum(far / region.reach, wide).max())
            known = facts.distances(node) if node in facts.facts else None  # logits are no node
            away.found[node] = far if known is None else torch.minimum(far, known)
            moves.found[node] = wide.clamp(max=float(facts.at(node))) if node in facts.facts else wide

    columns = torch.zeros(3 * PROBES, sum(math.prod(node.shape) for node in graph.inputs), dtype=torch.float64)
    columns[kinds[0]].normal_(generator=generator)
    try:
        linearized.carry_inputs(columns, visit)
    except _Unknown:
        return Rehearsal()
    return made if math.isfinite(made.bound) else Rehearsal()


def _symbols(remainder: Remainder, generator: torch.Generator) -> torch.Tensor:
    """Random columns whose median is what the symbols of a remainder add."""
    shape = (PROBES, *remainder.entries.shape)
    sizes, random = remainder.entries, torch.zeros(shape, dtype=torch.float64).cauchy_(generator=generator)
    if remainder.sets is not None:
        sets, limits = remainder.sets
        sizes = torch.minimum(sizes, sets.spread(limits, shape[1:]))
        shared = torch.zeros(PROBES, len(limits), dtype=torch.float64).cauchy_(generator=generator)
        random.normal_(generator=generator).mul_(torch.stack([sets.spread(one, shape[1:]) for one in shared]))
    return random * (remainder.scale * sizes)


class _Unknown(Exception):
    pass
