"""J, the derivative of a linearized graph: carried in chunks of columns, of which norms of rows and of sets of them are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from normscope.certify.columns import Linearized, behind, rule_of
from normscope.certify.grams import Grams
from normscope.certify.kernels import linear_map, matrix_of_tokens
from normscope.core.region import Ball, Region
from normscope.core.rounding import SQUARES_LOST, SUMMED, above, length
from normscope.graph.graph import Node
from normscope.rules.remainder import Sets

MOST_OUTPUTS = 640  # up to which columns at the output are kept
PROBES = 6  # random columns that tell about how long rows are


@dataclass
class Jacobian:
    """Norms of J from the inputs to each node, per entry and per set; across: Σ_j |J_ij| width_j on a box.

    behind_matrix: ‖WJ_t‖ of each token of a node that multiplies tokens by W, J of what it reads. size: Frobenius norms. matrix:
    (outputs, inputs), where it is small enough. wanted, rows: entries of some nodes, and their rows; enough: up to which distance
    from the middle those are all that may be asked for.
    """

    norms: dict[Node, torch.Tensor] = field(default_factory=dict)
    across: dict[Node, torch.Tensor] = field(default_factory=dict)
    sets: dict[tuple[Node, Sets], torch.Tensor] = field(default_factory=dict)
    behind_matrix: dict[Node, torch.Tensor] = field(default_factory=dict)
    size: dict[Node, float] = field(default_factory=dict)
    matrix: torch.Tensor | None = None
    wanted: Mapping[Node, torch.Tensor] = field(default_factory=dict)
    rows: dict[Node, torch.Tensor] = field(default_factory=dict)
    enough: float = math.inf

    def has(self, watched: Mapping[Node, Collection[Sets]], measured: Collection[Node], reach: float) -> bool:
        """Whether all that is asked for is there, with the rows for changes up to a distance from the middle."""
        sets = all((node, one) in self.sets for node, some in watched.items() for one in some)
        return sets and watched.keys() <= self.norms.keys() and set(measured) <= self.size.keys() and reach <= self.enough

    def straight(self, node: Node, reach: float) -> torch.Tensor:
        """How far JΔx can move each entry, ‖Δx‖ ≤ reach."""
        rows = self.norms[node] * reach
        return torch.minimum(rows, self.across[node]) if node in self.across else rows


def watched_sets(linearized: Linearized, relays: Iterable[Node]) -> dict[Node, set[Sets]]:
    """What curved nodes read, and relays: the nodes whose sizes are wanted, with the sets that are."""
    watched: dict[Node, set[Sets]] = {}
    for node in linearized.graph.nodes:
        if not node.is_input and not rule_of(node).linear(node):
            for source, sets in zip(node.inputs, rule_of(node).measured(node), strict=True):
                watched.setdefault(source, set()).update(sets)
        logits = linearized.seen(node)
        if logits is not None:
            watched[logits] = {Sets.along(logits.shape, (-1,))}
    for node in relays:
        watched.setdefault(node, set()).add(Sets.along(node.shape, (-1,)))
    return watched


def carried(
    linearized: Linearized,
    watched: Mapping[Node, Collection[Sets]],
    measured: Collection[Node],
    widths: torch.Tensor | None,
    wanted: Mapping[Node, torch.Tensor],
    spend: Callable[[float], None],
) -> Jacobian:
    """watched: nodes and sets whose norms are wanted; measured: nodes whose Frobenius norm is. widths: of a box, per input."""
    graph, made = linearized.graph, Jacobian(wanted=wanted)
    sizes = [math.prod(node.shape) for node in graph.inputs]
    total, reached = sum(sizes), behind(graph, graph.inputs)
    made.size = dict.fromkeys(measured, 0.0)
    affordable = {(node, sets): Grams.wanted(linearized, node, sets, total) for node in watched for sets in watched[node]}
    grams = {place: made for place, made in affordable.items() if made is not None}
    squares: dict[Node, torch.Tensor] = {}
    at_output: list[torch.Tensor] = []
    kept: dict[Node, list[torch.Tensor]] = {node: [] for node in wanted}
    step = linearized.chunk([*graph.inputs, *reached])
    for first in range(0, total, step):
        last = min(first + step, total)
        spend(linearized.work(last - first, reached))

        def visit(node: Node, columns: torch.Tensor, first: int = first, last: int = last) -> None:
            if node in made.size:
                made.size[node] = math.hypot(made.size[node], float(torch.linalg.vector_norm(columns)) + SQUARES_LOST)
            if node not in watched and node not in kept:
                return
            flat = columns.reshape(len(columns), -1)
            if node in watched:
                squares[node] = squares.get(node, 0.0) + (flat * flat).sum(0)
                if widths is not None:
                    made.across[node] = made.across.get(node, 0.0) + widths[first:last] @ flat.abs()
                for sets in watched[node]:
                    if (node, sets) in grams:
                        grams[node, sets].add(columns)
            if node in kept:
                kept[node].append(flat[:, wanted[node]])
            if node is graph.output and flat.shape[1] <= MOST_OUTPUTS:
                at_output.append(flat)

        units = torch.zeros(last - first, total, dtype=torch.float64)
        units[torch.arange(last - first), torch.arange(first, last)] = 1.0
        linearized.carry_inputs(units, visit)
    made.size = {node: size * SUMMED for node, size in made.size.items()}
    for node in watched:
        nothing = torch.zeros(math.prod(node.shape), dtype=torch.float64)
        made.norms[node] = squares.get(node, nothing).sqrt().add(SQUARES_LOST)
        for sets in watched[node]:
            rows, found = made.norms[node].reshape(node.shape), grams.get((node, sets))
            made.sets[node, sets] = length(sets.split(rows), -1) if found is None else found.norms(rows)
        for sets in watched[node]:
            for smaller in watched[node]:
                if smaller.within(sets) and (node, sets) not in grams:  # no larger than what the sets that make it up give
                    parts = made.sets[node, smaller].reshape(len(made.sets[node, sets]), -1)
                    made.sets[node, sets] = torch.minimum(made.sets[node, sets], length(parts, 1))
    for node in watched:
        source, product = matrix_of_tokens(node), linear_map(node)
        read = None if source is None else grams.get((source, Sets.along(source.shape, (-1,))))
        if source is not None and product is not None and read is not None and Sets.along(node.shape, (-1,)) in watched[node]:
            around = read.ellipsoids(made.norms[source].reshape(source.shape))
            if around is not None:
                made.behind_matrix[node] = around.norms_behind(product.matrix())
    made.matrix = torch.cat(at_output).T if at_output else None
    made.rows = {node: torch.cat(parts).T for node, parts in kept.items() if parts}
    return made


def half_widths(region: Region) -> torch.Tensor | None:
    """Of a box, how far each entry can be from the middle: Σ |J_ij| width_j may be less than ‖J_i‖ times the diagonal."""
    if isinstance(region, Ball):
        return None
    pairs = zip(region.intervals(), region.middle, strict=True)
    away = [above(torch.maximum(bounds.high - middle, middle - bounds.low)) for bounds, middle in pairs]
    return torch.cat([part.reshape(-1) for part in away])


def guessed_rows(linearized: Linearized, nodes: Collection[Node]) -> dict[Node, torch.Tensor]:
    """About how long the rows of J at some nodes are, from a few random columns: no bound."""
    found = dict[Node, torch.Tensor]()
    total = sum(math.prod(node.shape) for node in linearized.graph.inputs)
    columns = torch.randn(PROBES, total, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def visit(node: Node, columns: torch.Tensor) -> None:
        if node in nodes:
            found[node] = columns.square().mean(0).sqrt()

    linearized.carry_inputs(columns, visit)
    return found
