"""Sampling of images at the points of a grid."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import FEW, above
from normscope.graph.graph import Constant, Node
from normscope.operators.dense import spectral_norm
from normscope.rules.algebra import Form, Forms
from normscope.rules.averages import keeps_constants
from normscope.rules.registry import Context, Gain, Rule, rule

EXACT_ENTRIES = 4_000_000  # of a matrix whose norm is computed; beyond it Schur's test bounds the norm
CHUNK_ENTRIES = 4_000_000  # of planes that are evaluated together


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
class GridSample(Rule):
    """With a constant grid each plane is multiplied by one matrix, read off the operation itself."""

    def terms(self, node: Node) -> float:
        return 64  # a cubic kernel in three dimensions

    def linear(self, node: Node) -> bool:
        return not isinstance(node.args[1], Node)

    def gain(self, node: Node, context: Context) -> Gain:
        if not self.linear(node):
            return Gain.infinite(node, "its grid depends on the input, and what it samples there may be anything")
        inputs, outputs = (math.prod(shape[2:]) for shape in (node.input.shape, node.shape))
        size = (self._exact if inputs * outputs <= EXACT_ENTRIES else self._by_schur)(node)
        if not size.finite:
            return Gain.infinite(node, "its grid holds NaN")
        # a weight is the difference of a coordinate and a whole number, rounded as the coordinate is; a row has at most 64 of them
        rounding = 2.0**-50 * max(node.input.shape[2:]) * 8 * math.sqrt(outputs)
        return Gain(((size + rounding).raised(size, rounding),), "exact")

    def _columns(self, node: Node) -> list[torch.Tensor]:
        """Columns of every sample's matrix, in blocks (samples, columns, outputs)."""
        samples, _, *size = node.input.shape
        inputs = math.prod(size)
        chunk = max(1, CHUNK_ENTRIES // max(inputs, 1))
        found = []
        for some in torch.arange(inputs).split(chunk):
            planes = torch.zeros(len(some), inputs, dtype=torch.float64)
            planes[torch.arange(len(some)), some] = 1
            found.append(node.apply(planes.reshape(1, len(some), *size).expand(samples, -1, *size).contiguous()).flatten(2))
        return found

    def _exact(self, node: Node) -> Magnitude:
        matrix = torch.cat(self._columns(node), 1)
        return spectral_norm(matrix) if bool(matrix.isfinite().all()) else Magnitude(math.inf)

    def _by_schur(self, node: Node) -> Magnitude:
        """‖A‖² ≤ (largest row sum of |A|) · (largest column sum)."""
        rows, columns = 0.0, 0.0
        for block in self._columns(node):
            rows = rows + block.abs().sum(1)
            columns = max(columns, float(above(block.abs().sum(2), block.shape[2] + FEW).max()))
        largest = float(above(torch.as_tensor(rows), math.prod(node.input.shape[2:]) + FEW).max())
        return (Magnitude(columns) * largest).raised(columns, largest).sqrt()

    def interval(self, node: Node, context: Context) -> Interval:
        if not self.linear(node) or node.args[2] not in (0, 1):  # bilinear, nearest: weights ≥ 0
            return Interval.unbounded(node.shape)
        bounds = context.interval(node.input)
        return bounds.summed(node.apply, self.terms(node)) if bounds.finite else Interval.unbounded(node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        if not self.linear(node) or isinstance(node.args[0], Constant):
            return forms.opaque()
        axes = range(2 - len(node.shape), 0)
        return forms.mixed(forms.of(node.input), axes, node.shape, node.shape, constants=keeps_constants(node))
