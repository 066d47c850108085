"""Linear relaxation on a region: every node is its linear part plus an error whose size is known.

An entrywise φ with slopes in [a, b] on the values that reach it satisfies φ(y) − φ(y') = C (y − y') + e with C = (a+b)/2
and |e| ≤ R |y − y'|, R = (b−a)/2, entry by entry. Pushing a difference Δx through the graph with every node replaced by its
linear part therefore gives Δout = V Δx + Σ_j V_j e_j exactly, where V and V_j are the derivatives of that linear network
with respect to the input and to node j, so

    L ≤ ‖V‖ + Σ_j ‖V_j R_j‖ L_j,        |Δout_i| ≤ ‖V_i‖ ‖Δx‖ + Σ_j Σ_l |V_j|_il R_jl |Δy_jl|,

with L_j the constant up to what enters node j. (LipLT, Fazlyab et al. 2023, with slopes neuron by neuron and on any graph.)
A normalizer, a product, softmax or attention is its derivative at the middle, and its rule says how far it is from that
(`Rule.curvature`). Where no unit changes sign on the region, R = 0 and the bound is the norm of the Jacobian. Any C will do with
R = max(b−C, C−a): a small graph is also relaxed with C in the middle of the slopes that φ has anywhere, which may be better.

The linear parts are those of the functions that run. Their derivatives are torch's, as long as they agree with them: not where an
operation has none, and not for nearest upsampling, whose backward belongs to another map. Such a node is applied to a basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.certify.passing import Pass, Refine, Refinement
from normscope.certify.runs import entrywise
from normscope.core.interval import Interval
from normscope.core.magnitude import ZERO, Magnitude, total
from normscope.core.region import Region
from normscope.core.rounding import UNIT_ROUNDOFF, above, length, summation_error
from normscope.graph.graph import Graph, Node
from normscope.operators.dense import spectral_norm
from normscope.rules.activations import Entrywise
from normscope.rules.registry import Rule, registry

FEW_OUTPUTS = 64  # rows of V: one vector-Jacobian product each
MOST_ENTRIES = 40_000_000  # of all V_j together
MOST_BASIS = 4_000_000  # entries of the matrix of a node that is applied to a basis
# entries of all nodes together, and nodes, up to which every activation's input is relaxed on its own
SMALL_GRAPH, FEW_NODES = 20_000, 120

Linear = Callable[[Node, dict[Node, torch.Tensor]], torch.Tensor]  # the linear part of a node, from the changes of its sources


def relaxation(graph: Graph) -> Refine:
    """What a relaxation knows better: of the output, and in a small graph of all that enters an activation."""
    small = len(graph) <= FEW_NODES and sum(math.prod(node.shape) for node in graph) <= SMALL_GRAPH
    agreed: dict[Node, bool] = {}  # whether torch's backward of a node's linear part is its adjoint
    entering = (node.input for node in graph if len(node.inputs) == 1 and isinstance(registry.find(node), Entrywise))
    wanted = {graph.output, *(entering if small else ())}.difference(graph.inputs)

    def refined(facts: Pass, node: Node) -> Refinement | None:
        if node not in wanted or facts.region is None:
            return None
        rows, nodes = math.prod(node.shape), graph.up_to(node).nodes
        if rows > FEW_OUTPUTS or rows * sum(math.prod(n.shape) for n in nodes) > MOST_ENTRIES:
            return None
        ways = (False, True) if small else (False,)
        found = [_relaxed(facts, facts.region, node, nodes, anywhere, agreed) for anywhere in ways]
        bounds, radii = zip(*filter(None, found), strict=True) if any(found) else ((), ())
        if not bounds:
            return None
        middle, interval = facts.center(node), Interval.unbounded(node.shape)
        if middle is not None and math.isfinite(facts.error(node)):
            interval = Interval.around(middle, torch.stack(radii).amin(0).reshape(node.shape) + facts.error(node))
        return Refinement(min(bounds), interval, "linear relaxation")

    return refined


def _relaxed(
    facts: Pass, region: Region, output: Node, nodes: Sequence[Node], anywhere: bool, agreed: dict[Node, bool]
) -> tuple[Magnitude, torch.Tensor] | None:
    """A bound on the constant of a node and on each of its entries' distance from the exact middle; None where it does not apply.

    anywhere: with the middle of the slopes that a function has anywhere, and not on the region.
    """
    pieces: dict[Node, _Piece] = {}
    for node in nodes:
        piece = None if node.is_input else _piece(facts, node, anywhere)
        if piece is not None and piece.runs:
            if node not in agreed:
                agreed[node] = has_adjoint(node, piece.linear, piece.gain)
            piece = piece if agreed[node] else _applied(facts, node, piece)
        if piece is not None:
            pieces[node] = piece
        elif not node.is_input:
            return None
    derivatives = _derivatives(facts.graph.inputs, pieces, output)
    return None if derivatives is None else _bounds(facts, region, derivatives, pieces)


def _derivatives(inputs: Sequence[Node], pieces: dict[Node, _Piece], output: Node) -> dict[Node, torch.Tensor] | None:
    """V and all V_j by torch's backward, each (entries of the output, entries of the node); None where that is wrong or fails."""
    nodes = (*inputs, *pieces)
    zeros = [torch.zeros(node.shape, dtype=torch.float64) for node in nodes]

    def linear_network(*changes: torch.Tensor) -> torch.Tensor:
        values: dict[Node, Any] = dict(zip(inputs, changes, strict=False))
        for (node, piece), error in zip(pieces.items(), changes[len(inputs) :], strict=True):
            values[node] = piece.linear(node, values) + error
        return values[output].reshape(-1)

    try:
        _, pull = torch.func.vjp(linear_network, *zeros)
        pulled = [part.flatten(1) for part in torch.vmap(pull)(torch.eye(math.prod(output.shape), dtype=torch.float64))]
    except (RuntimeError, NotImplementedError):  # an operation without a derivative
        return None
    return dict(zip(nodes, pulled, strict=True)) if is_adjoint(linear_network, pulled, zeros) else None


def is_adjoint(network: Callable[..., torch.Tensor], pulled: list[torch.Tensor], like: list[torch.Tensor]) -> bool:
    """Whether the rows that torch's backward gave are those of the network that runs forward, all changes together.

    What is small beside another change is not seen here: `has_adjoint` compares node by node.
    """
    generator = torch.Generator().manual_seed(0)
    point = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in like]
    forward = network(*point)
    back = [(rows @ part.reshape(-1), rows.abs() @ part.abs().reshape(-1)) for rows, part in zip(pulled, point, strict=True)]
    found, size = (torch.stack(parts).sum(0) for parts in zip(*back, strict=True))
    return bool(((forward - found).abs() <= 1e-9 * (size + forward.abs())).all())


def has_adjoint(node: Node, linear: Linear, gain: float = 0.0) -> bool:
    """Whether torch's backward of a node's linear part A is Aᵀ: ⟨u, A x⟩ = ⟨Aᵀ u, x⟩ at random u, and x at one source at a time.

    It is not for every operation (nearest upsampling). Both sides are linear, so if they differ, they differ at random points. They
    are compared with the sizes of their own terms, so no scale is too small, and with what the node rounds, given its gain.
    """
    generator = torch.Generator().manual_seed(0)
    sources = tuple(dict.fromkeys(node.inputs))
    zeros = [torch.zeros(source.shape, dtype=torch.float64) for source in sources]

    def applied(*changes: torch.Tensor) -> torch.Tensor:
        return linear(node, dict(zip(sources, changes, strict=True)))

    def agrees(place: int) -> bool:
        x = torch.randn(zeros[place].shape, generator=generator, dtype=torch.float64)
        u = torch.randn((2, *node.shape), generator=generator, dtype=torch.float64)
        there = u * applied(*zeros[:place], x, *zeros[place + 1 :])
        back = torch.vmap(pull)(u)[place] * x
        (forward, size), (found, other) = ((part.sum(1), part.abs().sum(1)) for part in (there.reshape(2, -1), back.reshape(2, -1)))
        rounded = _rounding(gain, node) * float(length(x)) * length(u.reshape(2, -1), 1)
        return bool(((forward - found).abs() <= 1e-9 * (size + other) + rounded).all())

    try:
        _, pull = torch.func.vjp(applied, *zeros)
        return all(map(agrees, range(len(sources))))
    except (RuntimeError, NotImplementedError):  # an operation without a derivative
        return False


def _rounding(gain: float, node: Node) -> float:
    """How far the computed product of a node's linear part may be from the exact one, for changes of norm 1."""
    terms = max(math.prod(source.shape) for source in node.inputs)
    return 16 * (terms + 8) * UNIT_ROUNDOFF * math.sqrt(terms) * gain


def _bounds(
    facts: Pass, region: Region, derivatives: dict[Node, torch.Tensor], pieces: dict[Node, _Piece]
) -> tuple[Magnitude, torch.Tensor]:
    straight = torch.cat([derivatives[node] for node in facts.graph.inputs], 1)
    bound, rounding = spectral_norm(straight), ZERO
    # V Δx moves an entry by its row's norm times the reach, and on a box by no more than the weighted half-widths
    widths = sum(_weighted(facts, derivatives[node], node) for node in facts.graph.inputs)
    radius = torch.minimum(length(straight, 1) * region.reach, widths)
    for node, piece in pieces.items():
        arriving = max((facts.at(source) for source in node.inputs), default=ZERO)
        if piece.spread is not None:
            scaled = derivatives[node] * piece.spread.reshape(1, -1)
            bound = bound + spectral_norm(scaled) * facts.at(node.input)
            radius = radius + _weighted(facts, scaled, node.input)
        elif piece.error is not None:
            bound = bound + spectral_norm(derivatives[node]) * piece.error
            radius = radius + length(derivatives[node], 1) * piece.error.ceiling * region.reach
        # rounding of this node's own product, carried on by V_j and reached with at most `arriving`
        rounding = rounding + arriving * (_rounding(piece.gain, node) * float(length(derivatives[node])))
    return bound + rounding, above(radius * (1 + 8 * len(pieces) * UNIT_ROUNDOFF) + rounding.ceiling * region.reach)


def _weighted(facts: Pass, weights: torch.Tensor, node: Node) -> torch.Tensor:
    """Σ_l |weight_il| times how far entry l of a node can be from its exact value at the middle, rounded up."""
    away = facts.distances(node)
    assert away is not None
    added = above(weights.abs()) @ above(away + facts.error(node)).reshape(-1)
    return added + summation_error(weights.shape[1], added)


@dataclass(frozen=True)
class _Piece:
    """The linear part of a node and what it leaves out: entrywise `spread`, or an error of `error` · ‖Δx‖ in all.

    A node is its own linear part, or `slope` entry by entry, or its derivative at `middles`, or nothing; `matrices`: its own linear
    part from each of its inputs, written out.
    """

    slope: torch.Tensor | None = None
    spread: torch.Tensor | None = None
    middles: tuple[torch.Tensor, ...] | None = None
    error: Magnitude | None = None
    gain: float = 1.0
    matrices: tuple[torch.Tensor, ...] | None = None

    @property
    def runs(self) -> bool:
        """Whether its linear part is made by the operation itself, whose backward may be wrong."""
        return self.slope is None and self.matrices is None and (self.middles is not None or self.error is None)

    def linear(self, node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        if self.slope is not None:
            return values[node.input] * self.slope
        if self.matrices is not None:
            sources = zip(self.matrices, dict.fromkeys(node.inputs), strict=True)
            return sum(matrix @ values[source].reshape(-1) for matrix, source in sources).reshape(node.shape)
        if self.middles is not None:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
                return torch.func.jvp(node.apply, self.middles, tuple(values[source] for source in dict.fromkeys(node.inputs)))[1]
        if self.error is not None:
            return torch.zeros(node.shape, dtype=torch.float64)
        return linear_part(node, values)


def linear_part(node: Node, changes: dict[Node, torch.Tensor]) -> torch.Tensor:
    """What an affine node does to changes, without what it adds."""
    nothing = {source: torch.zeros(source.shape, dtype=torch.float64) for source in node.inputs}
    return node.evaluate(changes, torch.float64) - node.evaluate(nothing, torch.float64)


def _piece(facts: Pass, node: Node, anywhere: bool) -> _Piece | None:
    rule = registry.find(node)
    if rule is None or not node.shape or node.dtype is None:  # several outputs at once
        return None
    if isinstance(rule, Entrywise) and entrywise(node) is rule and facts.center(node.input) is not None:
        low, high = rule.slopes_on(node, facts.interval(node.input))
        if bool((low.isfinite() & high.isfinite()).all()) and low.numel() in (1, math.prod(node.shape)):
            low, high = (side.expand(node.shape) if side.numel() == 1 else side.reshape(node.shape) for side in (low, high))
            middle = (low + high) / 2
            if anywhere and math.isfinite(sum(rule.slopes(node))):
                middle = torch.full_like(middle, sum(rule.slopes(node)) / 2)
            spread = torch.maximum(high - middle, middle - low) * (1 + UNIT_ROUNDOFF)
            return _Piece(slope=middle, spread=spread, gain=float(torch.maximum(low.abs(), high.abs()).max()))
    gains = [float(factor) for factor in facts.gain(node).factors]
    gain = max(gains, default=1.0) * math.sqrt(len(gains))
    if rule.linear(node):
        return _Piece(gain=gain) if math.isfinite(gain) else None
    if not facts.at(node).finite:
        return None
    return _derivative(facts, node, rule, gain) or _Piece(error=facts.at(node))


def _derivative(facts: Pass, node: Node, rule: Rule, gain: float) -> _Piece | None:
    """The derivative at the middle as the linear part, where that leaves out less than everything."""
    middles = [facts.center(source) for source in dict.fromkeys(node.inputs)]
    unknown = node.is_foreign or any(middle is None for middle in middles)  # forward mode takes a foreign derivative for 0
    factors = None if unknown else rule.curvature(node, facts)
    if factors is None:
        return None
    error = total(facts.at(source) * factor for source, factor in zip(node.inputs, factors, strict=True))
    solid = tuple(middle.contiguous() for middle in middles if middle is not None)  # some kernels refuse what was expanded
    return _Piece(middles=solid, error=error, gain=gain) if error < facts.at(node) else None


def _applied(facts: Pass, node: Node, piece: _Piece) -> _Piece | None:
    """A node whose derivative is missing or wrong: a linear one applied to a basis, of others only their error."""
    sources = tuple(dict.fromkeys(node.inputs))
    large = math.prod(node.shape) * sum(math.prod(source.shape) for source in sources) > MOST_BASIS
    nothing = {source: torch.zeros(source.shape, dtype=torch.float64) for source in sources}
    # what is added may cancel digits of what it does to a basis
    if piece.middles is not None or large or bool(node.evaluate(nothing, torch.float64).any()):
        return _Piece(error=facts.at(node)) if facts.at(node).finite else None

    def matrix(source: Node) -> torch.Tensor:
        basis = torch.eye(math.prod(source.shape), dtype=torch.float64).reshape(-1, *source.shape)
        return torch.stack([piece.linear(node, nothing | {source: unit}).reshape(-1) for unit in basis], 1)

    return replace(piece, matrices=tuple(map(matrix, sources)))
