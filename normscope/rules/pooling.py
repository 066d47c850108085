"""Max pooling, norms and order statistics; averages are in shape.py."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import Interval
from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.normalizers import bessel_correction
from normscope.rules.convolution import _per_axis
from normscope.rules.forms import Form, Forms
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.shape import reduced


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

    def form(self, node: Node, forms: Forms) -> Form:
        return pooled(node, forms, int(node.op[-2]))


@rule("max", "min", "amax", "amin", "sort", "msort", "topk", "median", "kthvalue", "cummax", "cummin")
class OrderStatistic(Rule):
    """The sorted values move no farther than the entries: each of these keeps a part of them (1-Lipschitz)."""

    def gain(self, node: Node, context: Context) -> Gain:
        if self._of_two(node):
            return Gain.of(*(math.sqrt(_broadcast(source, node)) for source in node.inputs), method="max", separate=True)
        if node.op in ("cummax", "cummin"):
            return Gain.of(math.sqrt(max(node.input.shape, default=1)), method="repeats")
        return Gain.of(1, method="sorting")

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
    """‖x‖_p is 1-Lipschitz in ℓ2 for p ≥ 2, and n^(1/p − 1/2)-Lipschitz for 1 ≤ p < 2."""

    def gain(self, node: Node, context: Context) -> Gain:
        order = _order(node)
        if not isinstance(order, (int, float)) or order < 1:
            return Gain.infinite(node, f"the {order}-norm is not Lipschitz")
        entries = math.prod(node.input.shape) / max(math.prod(node.shape), 1)
        factor = 1.0 if order >= 2 else entries ** (1 / order - 0.5)
        return Gain.of(factor * (1 + 2**-50), method="norm")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(0.0, math.inf, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        """‖c x‖_p = c ‖x‖_p for every p but 0, which counts the entries that are not 0."""
        if isinstance(_order(node), str):
            return forms.opaque()
        norm = reduced(node, forms, linear=False, constants=False, position=2)
        return forms.entrywise(norm, 0.0) if _order(node) == 0 else norm


def _order(node: Node) -> float | str:
    """p of a p-norm; a name that has none as it is."""
    order = node.args[1] if len(node.args) > 1 and node.args[1] is not None else 2.0
    return 2.0 if order == "fro" else order


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
        return Gain.of(2 * size * math.sqrt(entries) * scale**2 * (1 + 2**-50), method="square")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(0.0, math.inf, node.shape)

    def form(self, node: Node, forms: Forms) -> Form:
        spread = reduced(node, forms, linear=False, constants=False)
        return spread if node.op == "std" else forms.entrywise(spread, 2.0)
