"""Sums, means, averages over windows, and interpolation: linear maps whose matrix is known axis by axis.

An average over windows, or an interpolation, is a tensor product A = P_1 ⊗ P_2 ⊗ … of one matrix per axis, so ‖A‖ = ∏‖P_a‖ exactly.
The matrices are read off the operation itself; torch's backward is not asked (that of nearest upsampling is not the adjoint).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import ONE, Magnitude, product
from normscope.core.rounding import FEW, above, below, gamma
from normscope.graph.graph import Node
from normscope.operators.dense import spectral_norm
from normscope.rules.algebra import Form, Forms
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.shape import reduced

EXACT_SIZE = 2000  # of an axis whose matrix is made
CHUNK_ENTRIES = 4_000_000  # of inputs that are evaluated together


@rule("sum", "nansum", "mean", "trace", "cumsum", "col2im")
class Summation(Rule):
    """Every output is a sum of entries, or their mean.

    Over disjoint sets of n entries: √n, or 1/√n. Running sums of n: 1/(2 sin(π/(4n + 2))), from the eigenvalues of the inverse of
    their Gram matrix. col2im adds up to c patches at an entry and each patch entry goes to one place: AAᵀ = diag(c), √max c.
    """

    def terms(self, node: Node) -> float:
        if node.op == "col2im":
            return float(node.apply(torch.ones(node.input.shape, dtype=torch.float64)).max())
        if node.op == "trace":
            return min(node.input.shape)
        if node.op == "cumsum":
            return node.input.shape[node.args[1]] if node.input.shape else 1
        return math.prod(node.input.shape) / max(math.prod(node.shape), 1)

    def gain(self, node: Node, context: Context) -> Gain:
        count = self.terms(node)
        if node.op == "cumsum":
            return Gain.of(above(0.5 / math.sin(math.pi / (4 * count + 2))), method="exact")
        if node.op == "mean":
            return Gain.of(above(1 / math.sqrt(count)) if count else 0, method="exact")
        return Gain.of(above(math.sqrt(count)), method="exact")

    def interval(self, node: Node, context: Context) -> Interval:
        return context.interval(node.input).summed(node.apply, self.terms(node))

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        if node.op in ("col2im", "trace"):
            return forms.opaque()
        return reduced(node, forms, constants=node.op != "cumsum")


@rule(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
class AxisByAxis(Rule):
    """A tensor product of one matrix per axis: the product of their norms."""

    def terms(self, node: Node) -> float:
        return math.prod(node.input.shape[-_axes(node) :])

    def gain(self, node: Node, context: Context) -> Gain:
        axes = _axes(node)
        rows = _planes(node, torch.ones(1, *node.input.shape[-axes:], dtype=torch.float64))[0]  # A 1
        place = torch.unravel_index(rows.abs().argmax(), rows.shape)  # where A 1 is largest
        largest = float(rows[place].abs())
        if largest == 0:
            return Gain.of(0, method="exact")
        norms = [_axis_norm(node, axis, place) for axis in range(axes)]
        roundings = FEW * axes + sum(node.input.shape[-axes:])  # of weights, and of their sums along every axis
        divisors = [below(largest, roundings)] * (axes - 1)
        size = product(norms) / product(map(Magnitude, divisors))
        return Gain((size.raised(*norms, *divisors).widened(gamma(roundings)),), "exact")

    def interval(self, node: Node, context: Context) -> Interval:
        if "bicubic" in node.op:  # its weights have two signs
            return Interval.unbounded(node.shape)
        return context.interval(node.input).summed(node.apply, self.terms(node))

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        constants = "upsample" in node.op or keeps_constants(node)
        return forms.mixed(forms.of(node.input), range(-_axes(node), 0), node.shape, node.shape, constants=constants)


def keeps_constants(node: Node) -> bool:
    """Whether a linear node maps a constant to a constant."""
    image = node.apply(torch.ones(node.input.shape, dtype=torch.float64))
    return bool((image - image.flatten()[0]).abs().max() <= 1e-9 * image.abs().max())


def _axes(node: Node) -> int:
    return int(next(character for character in node.op if character.isdigit()))


def _planes(node: Node, planes: torch.Tensor) -> torch.Tensor:
    """The operation on each of several planes (count, *spatial), as samples or, without a batch axis, as channels."""
    batched = len(node.input.shape) == _axes(node) + 2
    found = node.apply(planes[:, None] if batched else planes)
    return found[:, 0] if batched else found


def _axis_norm(node: Node, axis: int, place: tuple[torch.Tensor, ...]) -> Magnitude:
    """‖P_a‖ times the other axes' row sums at `place`; by Schur's test where the axis is long."""
    inputs, outputs = node.input.shape[-_axes(node) :][axis], node.shape[-_axes(node) :][axis]
    blocks = _axis_matrix(node, axis, place)
    if min(inputs, outputs) <= EXACT_SIZE and inputs * outputs <= 4 * EXACT_SIZE**2:
        return spectral_norm(torch.cat(list(blocks), 1))
    rows, columns = torch.zeros(outputs, dtype=torch.float64), ONE * 0
    for block in blocks:
        rows += block.abs().sum(1)
        columns = max(columns, Magnitude(float(above(block.abs().sum(0), outputs + FEW).max())))
    most = above(float(rows.max()), inputs + FEW)
    return (columns * most).raised(columns, most).sqrt()


def _axis_matrix(node: Node, axis: int, place: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    """Blocks of columns of the map along one axis, read off at `place` on inputs that are 1 along the others."""
    size = node.input.shape[-_axes(node) :]
    chunk = max(1, CHUNK_ENTRIES // max(math.prod(size), math.prod(node.shape[-_axes(node) :])))
    for some in torch.arange(size[axis]).split(chunk):
        units = torch.zeros(len(some), size[axis], dtype=torch.float64)
        units[torch.arange(len(some)), some] = 1
        planes = units.reshape(len(some), *(size[axis] if i == axis else 1 for i in range(len(size)))).expand(-1, *size)
        found = _planes(node, planes.contiguous())
        where = tuple(slice(None) if i == axis else place[i] for i in range(len(size)))
        yield found[(slice(None), *where)].T
