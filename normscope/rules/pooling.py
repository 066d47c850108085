"""Max pooling, norms and order statistics; averages are in averages.py."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import UNDERFLOW
from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.normalizers import bessel_correction
from normscope.rules.convolution import _per_axis
from normscope.rules.forms import Form, Forms
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.shape import on_both_sides, reduced


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
class MaxPool(Rule):
    """|Δmax| ≤ ‖Δ‖ on each window, so the gain is √ of how many windows share an entry."""

    def gain(self, node: Node, context: Context) -> Gain:
        axes = int(next(character for character in node.op if character.isdigit()))
        kernel = _per_axis(node.args[1], axes)
        stride = _per_axis(node.argument(2, "stride") or kernel, axes)
        padding, dilation = (_per_axis(node.argument(i, name, d), axes) for i, name, d in ((3, "padding", 0), (4, "dilation", 1)))
        ceil_mode = bool(node.argument(5, "ceil_mode", False))
        reuse = 1
        for n, k, s, p, d in zip(node.input.shape[-axes:], kernel, stride, padding, dilation, strict=True):
            reach = d * (k - 1) + 1
            windows = (n + 2 * p - reach + (s - 1 if ceil_mode else 0)) // s + 1
            reads = torch.arange(windows)[:, None] * s - p + d * torch.arange(k)[None, :]
            inside = reads[(reads >= 0) & (reads < n)]
            reuse *= int(torch.bincount(inside).max()) if inside.numel() else 1
        return Gain.of(math.sqrt(reuse), method="windows")

    def interval(self, node: Node, context: Context) -> Interval:
        if node.op.endswith("indices"):
            return Interval.unbounded(node.shape)
        return context.interval(node.input).map(node.apply)

    def form(self, node: Node, forms: Forms) -> Form:
        return pooled(node, forms, int(next(character for character in node.op if character.isdigit())))


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
class AdaptiveMaxPool(Rule):
    """Windows from ⌊i n/m⌋ to ⌈(i+1) n/m⌉ along each axis; they overlap where m does not divide n."""

    def gain(self, node: Node, context: Context) -> Gain:
        axes = int(node.op[-2])
        outputs = _per_axis(node.args[1], axes)
        reuse = 1
        for n, m in zip(node.input.shape[-axes:], outputs, strict=True):
            covered = torch.zeros(n, dtype=torch.long)
            for i in range(m):
                covered[i * n // m : -(-(i + 1) * n // m)] += 1
            reuse *= int(covered.max())
        return Gain.of(math.sqrt(reuse), method="windows")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.unbounded(node.shape) if node.dtype is None else context.interval(node.input).map(node.apply)

    def form(self, node: Node, forms: Forms) -> Form:
        return pooled(node, forms, int(node.op[-2]))


@rule("max", "min", "amax", "amin", "aminmax", "sort", "msort", "topk", "median", "kthvalue", "cummax", "cummin", "logcumsumexp")
class OrderStatistic(Rule):
    """The sorted values move no farther than the entries: each of these keeps a part of them (1-Lipschitz)."""

    def gain(self, node: Node, context: Context) -> Gain:
        if self._of_two(node):
            return Gain.of(*(math.sqrt(_broadcast(source, node)) for source in node.inputs), method="max", separate=True)
        if node.op in ("cummax", "cummin", "logcumsumexp"):  # of n results each is 1-Lipschitz
            return Gain.of(math.sqrt(max(node.input.shape, default=1)) * (1 + 2**-50), method="repeats")
        axis = node.kwargs.get("dim")
        if node.op == "aminmax" and (math.prod(node.input.shape) if axis is None else node.input.shape[axis]) == 1:
            return Gain.of(math.sqrt(2) * (1 + 2**-50), method="repeats")  # the least may be the largest
        return Gain.of(1, method="sorting")

    def interval(self, node: Node, context: Context) -> Interval:
        """Each sorted value increases with every entry."""
        unknown = node.dtype is None or node.op == "logcumsumexp"
        return Interval.unbounded(node.shape) if unknown else on_both_sides(node, context)

    @staticmethod
    def _of_two(node: Node) -> bool:
        """Whether it compares two tensors entry by entry."""
        return len(node.args) > 1 and isinstance(node.args[1], (Node, Constant))

    def form(self, node: Node, forms: Forms) -> Form:
        if self._of_two(node):
            return forms.entrywise(forms.sum(*map(forms.of, node.args[:2])))
        return reduced(node, forms, linear=False)


@rule("maximum", "minimum", "fmax", "fmin")
class Extremum(Rule):
    """|Δ max(a, b)| ≤ max(|Δa|, |Δb|) entry by entry."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(math.sqrt(_broadcast(source, node)) for source in node.inputs), method="max", separate=True)

    def interval(self, node: Node, context: Context) -> Interval:
        return on_both_sides(node, context)

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.entrywise(forms.sum(*map(forms.of, node.args[:2])))


def pooled(node: Node, forms: Forms, axes: int) -> Form:
    """A maximum over windows of the last axes."""
    x = forms.of(node.input)
    shape = (*x.shape[:-axes], *_output_size(node)[-axes:])
    return forms.mixed(x, range(-axes, 0), shape, shape, linear=False)


def _output_size(node: Node) -> tuple[int, ...]:
    """The shape of a node's (first) output, found by running it where it has several."""
    if node.shape:
        return node.shape
    return tuple(node.apply(torch.zeros(node.input.shape, dtype=torch.float64))[0].shape)


def _broadcast(source: Node, node: Node) -> float:
    return max(1.0, math.prod(node.shape) / max(math.prod(source.shape), 1))


@rule("linalg_vector_norm", "norm")
class VectorNorm(Rule):
    """‖x‖_p is 1-Lipschitz in ℓ2 for p ≥ 2, n^(1/p − 1/2)-Lipschitz for 1 ≤ p < 2; min|x| (p = −∞) is 1-Lipschitz."""

    def gain(self, node: Node, context: Context) -> Gain:
        order = self._order(node)
        if order == -math.inf:
            return Gain.of(1, method="min")
        if not isinstance(order, (int, float)) or not order >= 0:
            return Gain.infinite(node, f"the {order}-norm is not Lipschitz")
        if order == 0:
            return Gain.infinite(node, "the 0-norm counts entries: it jumps, so no finite constant exists")
        entries = math.prod(node.input.shape) / max(math.prod(node.shape), 1)
        if order < 1 < entries:
            return Gain.infinite(node, f"the {order:g}-norm of several entries is not Lipschitz: its slope is unbounded near 0")
        factor = 1.0 if order >= 2 or entries <= 1 else entries ** (1 / order - 0.5)
        return Gain.of(factor * (1 + 2**-48), method="norm")

    @staticmethod
    def _order(node: Node) -> object:
        order = node.argument(1, "ord" if node.op == "linalg_vector_norm" else "p")
        return 2.0 if order is None or order == "fro" else order

    def interval(self, node: Node, context: Context) -> Interval:
        """‖x‖_p ≤ n^(1/p) max|x|."""
        order = self._order(node)
        size = context.interval(node.input).magnitude
        if not isinstance(order, (int, float)) or not order >= 1 or math.isinf(size):
            return Interval.constant(0.0, math.inf, node.shape)
        entries = math.prod(node.input.shape) / max(math.prod(node.shape), 1)
        return Interval.constant(0.0, size * entries ** (1 / order) * (1 + 2**-40) + UNDERFLOW, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        """‖c x‖_p = c ‖x‖_p for every p but 0, which counts the entries that are not 0."""
        order = self._order(node)
        if isinstance(order, str):
            return forms.opaque()
        norm = reduced(node, forms, linear=False, constants=False, position=2)
        return forms.entrywise(norm, 0.0) if order == 0 else norm


@rule("std", "var")
class Spread(Rule):
    """std = ‖x − mean‖/√(n − correction) is 1/√(n − correction)-Lipschitz; var grows like a square."""

    def gain(self, node: Node, context: Context) -> Gain:
        entries = math.prod(node.input.shape) // max(math.prod(node.shape), 1)
        if entries <= bessel_correction(node):
            return Gain.infinite(node, "it divides by a count that its correction makes 0 or less")
        scale = 1 / math.sqrt(entries - bessel_correction(node))
        if node.op == "std":
            return Gain.of(scale * (1 + 2**-50), method="norm")
        size = context.interval(node.input).magnitude
        if math.isinf(size):
            return Gain.infinite(node, "a variance grows like a square; bound the values by a region")
        return Gain.of(Magnitude(size) * (2 * math.sqrt(entries) * scale**2 * (1 + 2**-48)), method="square")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(0.0, math.inf, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        spread = reduced(node, forms, linear=False, constants=False)
        return spread if node.op == "std" else forms.entrywise(spread, 2.0)
