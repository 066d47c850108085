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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.certify.runs import entrywise
from normscope.core.interval import Interval
from normscope.core.magnitude import ZERO, Magnitude, total
from normscope.graph.graph import Node
from normscope.operators.dense import UNIT_ROUNDOFF, spectral_norm
from normscope.rules.activations import Entrywise
from normscope.rules.registry import Rule, registry

if TYPE_CHECKING:
    from normscope.certify.upper import Composition

FEW_OUTPUTS = 64  # rows of V: one vector-Jacobian product each
MOST_ENTRIES = 40_000_000  # of all V_j together


@dataclass(frozen=True)
class Relaxed:
    """A bound on the Lipschitz constant of one node, and on each of its entries' distance from the region's middle."""

    bound: Magnitude
    radius: torch.Tensor


def relax(context: Composition, output: Node) -> Relaxed | None:
    """The relaxation of the part of the graph before `output`, or None where it does not apply."""
    rows = math.prod(output.shape)
    nodes = _before(output)
    if context.region is None or rows > FEW_OUTPUTS or rows * sum(math.prod(n.shape) for n in nodes) > MOST_ENTRIES:
        return None
    found = [_relaxed(context, output, nodes, anywhere) for anywhere in ((False, True) if context.small else (False,))]
    usable = [one for one in found if one is not None]
    if not usable:
        return None
    return Relaxed(min(one.bound for one in usable), torch.stack([one.radius for one in usable]).amin(0))


def _relaxed(context: Composition, output: Node, nodes: list[Node], anywhere: bool) -> Relaxed | None:
    """With the slopes' middle on the region, or `anywhere`."""
    rows = math.prod(output.shape)
    pieces = {node: _piece(context, node, anywhere) for node in nodes if node.op != "input"}
    if any(piece is None for piece in pieces.values()):
        return None
    inputs = [node for node in nodes if node.op == "input"]
    inner = [node for node in nodes if node.op != "input"]
    zeros = [torch.zeros(node.shape, dtype=torch.float64) for node in (*inputs, *inner)]

    def linear_network(*changes: torch.Tensor) -> torch.Tensor:
        values: dict[Node, Any] = dict(zip(inputs, changes, strict=False))
        for node, error in zip(inner, changes[len(inputs) :], strict=True):
            piece = pieces[node]
            assert piece is not None
            values[node] = piece.linear(node, values) + error
        return values[output].reshape(-1)

    _, pull = torch.func.vjp(linear_network, *zeros)
    pulled = [part.flatten(1) for part in torch.vmap(pull)(torch.eye(rows, dtype=torch.float64))]
    if not is_adjoint(linear_network, pulled, zeros):
        return None
    return _bounds(context, dict(zip((*inputs, *inner), pulled, strict=True)), inputs, inner, pieces)


def is_adjoint(network: Callable[..., torch.Tensor], pulled: list[torch.Tensor], like: list[torch.Tensor]) -> bool:
    """Whether the rows that torch's backward gave are those of the network that runs forward.

    It is not for every operation (nearest upsampling). Both sides are linear, so if they differ, they differ at a random point.
    """
    generator = torch.Generator().manual_seed(0)
    point = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in like]
    forward = network(*point)
    back = [(rows @ part.reshape(-1), rows.abs() @ part.abs().reshape(-1)) for rows, part in zip(pulled, point, strict=True)]
    found, size = (torch.stack(parts).sum(0) for parts in zip(*back, strict=True))
    return bool(((forward - found).abs() <= 1e-9 * (size + forward.abs())).all())


def _bounds(
    context: Composition,
    derivatives: dict[Node, torch.Tensor],
    inputs: list[Node],
    inner: list[Node],
    pieces: dict[Node, _Piece | None],
) -> Relaxed:
    straight = torch.cat([derivatives[node] for node in inputs], 1)
    bound = spectral_norm(straight)
    radius = _straight_radius(context, derivatives, inputs)
    rounding = ZERO
    for node in inner:
        piece = pieces[node]
        assert piece is not None
        arriving = max((context.at.get(source, ZERO) for source in node.inputs), default=ZERO)
        if piece.spread is not None:
            scaled = derivatives[node] * piece.spread.reshape(1, -1)
            bound = bound + spectral_norm(scaled) * context.at[node.input]
            radius = radius + scaled.abs() @ _half_width(context, node.input).reshape(-1)
        elif piece.error is not None:
            bound = bound + spectral_norm(derivatives[node]) * piece.error
            radius = radius + torch.linalg.vector_norm(derivatives[node], dim=1) * float(piece.error) * context.region.reach  # type: ignore[union-attr]
        # rounding of this node's own product, carried on by V_j and reached with at most `arriving`
        terms = max(math.prod(source.shape) for source in node.inputs)
        size = float(torch.linalg.vector_norm(derivatives[node])) * math.sqrt(terms) * piece.gain
        rounding = rounding + arriving * (16 * (terms + 8) * UNIT_ROUNDOFF * size)
    radius = radius * (1 + 1e-9) + float(rounding) * context.region.reach  # type: ignore[union-attr]
    return Relaxed(bound + rounding, radius)


def _straight_radius(context: Composition, derivatives: dict[Node, torch.Tensor], inputs: list[Node]) -> torch.Tensor:
    """How far V Δx can move each entry: by rows' norms on a ball, by weighted half-widths on a box, the smaller of both."""
    assert context.region is not None
    rows = torch.linalg.vector_norm(torch.cat([derivatives[node] for node in inputs], 1), dim=1) * context.region.reach
    widths = sum(derivatives[node].abs() @ _half_width(context, node).reshape(-1) for node in inputs)
    return torch.minimum(rows, widths)


def _half_width(context: Composition, node: Node) -> torch.Tensor:
    """How far each entry can be from its exact value at the middle."""
    away = context.distances(node)
    assert away is not None
    return away + context.error(node)


@dataclass(frozen=True)
class _Piece:
    """The linear part of a node and what it leaves out: entrywise `spread`, or an error of `error` · ‖Δx‖ in all.

    A node is its own linear part, or `slope` entry by entry, or its derivative at `middles`, or nothing.
    """

    slope: torch.Tensor | None = None
    spread: torch.Tensor | None = None
    middles: tuple[torch.Tensor, ...] | None = None
    error: Magnitude | None = None
    gain: float = 1.0

    def linear(self, node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        if self.slope is not None:
            return values[node.input] * self.slope
        if self.middles is not None:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
                return torch.func.jvp(node.apply, self.middles, tuple(values[source] for source in dict.fromkeys(node.inputs)))[1]
        if self.error is not None:
            return torch.zeros(node.shape, dtype=torch.float64)
        nothing = {source: torch.zeros(source.shape, dtype=torch.float64) for source in node.inputs}
        return node.evaluate(values, torch.float64) - node.evaluate(nothing, torch.float64)


def _piece(context: Composition, node: Node, anywhere: bool) -> _Piece | None:
    rule = registry.find(node)
    if rule is None or not node.shape or node.dtype is None:  # several outputs at once
        return None
    if isinstance(rule, Entrywise) and entrywise(node) is rule:
        low, high = rule.slopes_on(node, context.interval(node.input))
        if bool((low.isfinite() & high.isfinite()).all()) and low.numel() in (1, math.prod(node.shape)):
            low, high = (side.expand(node.shape) if side.numel() == 1 else side.reshape(node.shape) for side in (low, high))
            middle = (low + high) / 2
            if anywhere and math.isfinite(sum(rule.slopes(node))):
                middle = torch.full_like(middle, sum(rule.slopes(node)) / 2)
            spread = torch.maximum(high - middle, middle - low) * (1 + UNIT_ROUNDOFF)
            return _Piece(slope=middle, spread=spread, gain=float(torch.maximum(low.abs(), high.abs()).max()))
    gains = [float(factor) for factor in context.gain(node).factors]
    gain = max(gains, default=1.0) * math.sqrt(len(gains))
    if rule.linear(node):
        return _Piece(gain=gain)
    if node not in context.at or not context.at[node].finite:
        return None
    return _derivative(context, node, rule, gain) or _Piece(error=context.at[node])


def _derivative(context: Composition, node: Node, rule: Rule, gain: float) -> _Piece | None:
    """The derivative at the middle as the linear part, where that leaves out less than everything."""
    middles = [context.center(source) for source in dict.fromkeys(node.inputs)]
    factors = None if any(middle is None for middle in middles) else rule.curvature(node, context)
    if factors is None:
        return None
    error = total(context.at[source] * factor for source, factor in zip(node.inputs, factors, strict=True))
    solid = tuple(middle.contiguous() for middle in middles if middle is not None)  # some kernels refuse what was expanded
    return _Piece(middles=solid, error=error, gain=gain) if error < context.at[node] else None


def _before(output: Node) -> list[Node]:
    """Everything that `output` needs, itself included, in order."""
    order: dict[Node, None] = {}
    stack = [output]
    while stack:
        top = stack[-1]
        waiting = [source for source in top.inputs if source not in order]
        if waiting:
            stack.extend(waiting)
            continue
        order[stack.pop()] = None
    return list(order)


def tighten(context: Composition, node: Node) -> None:
    """Replace a node's bounds by those of the relaxation where they are smaller."""
    if node.op == "input" or context.center(node) is None or not math.isfinite(context.error(node)):
        return
    found = relax(context, node)
    if found is None:
        return
    if node in context.at:
        context.at[node] = min(context.at[node], found.bound)
    middle, bounds = context.center(node), context.interval(node)
    assert middle is not None
    radius = found.radius.reshape(node.shape) + context.error(node)
    context.intervals[node] = bounds.within(Interval.around(middle, radius))
