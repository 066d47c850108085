"""Convolutions of one to three axes, and their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normscope.core.interval import Interval
from normscope.core.rounding import length
from normscope.graph.graph import Node
from normscope.rules.affine import propagate
from normscope.rules.algebra import Form, Forms
from normscope.rules.readings import Kernel, LinearMap
from normscope.rules.registry import Context, Gain, Rule, rule


def _kernel(node: Node) -> Kernel:
    """How a convolution node applies its weight.

    A transposed convolution is the adjoint of the convolution with the same kernel from its output's size to its input's.
    """
    taps = node.args[1].shape[2:]
    axes = len(taps)
    stride, padding, dilation, groups, transposed = _settings(node)
    stride, dilation = _per_axis(stride, axes), _per_axis(dilation, axes)
    if padding == "valid":
        pads = [(0, 0)] * axes
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in _per_axis(padding, axes)]
    size, mode, pad = (node.shape if transposed else node.args[0].shape)[-axes:], "zeros", absorbed_padding(node)
    if pad is not None:
        size, pads, mode = pad.input.shape[-axes:], _spatial_padding(pad, axes) or [], _PADDING_MODES[pad.args[2]]
    return Kernel(tuple(size), tuple(stride), tuple(pads), tuple(dilation), groups, transposed, mode, pad)


def absorbed_padding(node: Node) -> Node | None:
    """The padding node before a convolution that is part of its operator: it pads in space and the convolution does not."""
    _, padding, _, _, transposed = _settings(node)
    pad, axes = node.args[0], len(node.args[1].shape) - 2
    if transposed or not isinstance(pad, Node) or pad.op != "pad":
        return None
    padded_twice = padding == "same" or (padding != "valid" and any(_per_axis(padding, axes)))
    return None if padded_twice or _spatial_padding(pad, axes) is None else pad


_PADDING_MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _spatial_padding(pad: Node, axes: int) -> list[tuple[int, int]] | None:
    """(before, after) an axis, if `pad` pads only the convolution's axes and adds no values of its own."""
    amounts = list(pad.args[1])
    if not amounts or len(amounts) > 2 * axes or min(amounts) < 0 or pad.args[2] not in _PADDING_MODES:
        return None
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)][::-1]
    return [(0, 0)] * (axes - len(pairs)) + pairs


def _settings(node: Node) -> tuple[Any, Any, Any, int, bool]:
    """(stride, padding, dilation, groups, transposed) from any of torch's signatures."""
    if node.op == "convolution":
        _, _, _, stride, padding, dilation, transposed, _, groups = node.args[:9]
        return stride, padding, dilation, groups, transposed
    if node.op.startswith("conv_transpose"):
        _, _, _, stride, padding, _, groups, dilation = node.args[:8]
        return stride, padding, dilation, groups, True
    _, _, _, stride, padding, dilation, groups = node.args[:7]
    return stride, padding, dilation, groups, False


def _per_axis(value: Any, axes: int) -> list[int]:
    if isinstance(value, Sequence):
        return list(value) if len(value) == axes else list(value) * axes
    return [value] * axes


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
class ConvolutionRule(Rule):
    """x ↦ K ∗ x + b. With `absorbed_padding` the gain counts from what is padded."""

    first_alone = "its kernel or bias depends on the input"

    def reading(self, node: Node) -> LinearMap:
        x, weight, bias = node.args[:3]
        kernel = _kernel(node)
        channels = 1 - len(weight.shape)
        return LinearMap(x, weight, bias, (1,) if kernel.transposed else (0,), channels, channels, kernel=kernel)

    def terms(self, node: Node) -> float:
        """n terms err by n u |K||x|, and ‖|K|‖ ≤ √n ‖K‖."""
        shape = node.args[1].shape
        return (math.prod(shape) / min(shape[:2])) ** 1.5

    def gain(self, node: Node, context: Context) -> Gain:
        bound, method = self.reading(node).norm()
        return Gain((bound,), method)

    def interval(self, node: Node, context: Context) -> Interval:
        shape = node.args[1].shape
        rows = length(self.reading(node).matrix(), 1).reshape(-1, *[1] * (len(shape) - 2))
        return propagate(node, context, math.prod(shape) // min(shape[:2]), rows)

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        """Channels are contracted group by group; positions and taps are mixed, alike for all channels."""
        x, weight = map(forms.of, node.args[:2])
        bias = None if node.args[2] is None else forms.of(node.args[2])
        axes = len(weight.shape) - 2
        _, padding, _, groups, transposed = _settings(node)
        batch = ("batch",) if len(node.shape) == axes + 2 else ()
        positions, taps, made = ([f"{what}{i}" for i in range(axes)] for what in ("position", "tap", "made"))
        leading, split = x.shape[: len(batch)], lambda size: (groups, size // groups)
        product = forms.contraction(
            x, weight,
            ((*batch, "group", "in", *positions), ("group", *(("in", "out") if transposed else ("out", "in")), *taps)),
            (*batch, "group", "out", *made), node.shape,
            ((*leading, *split(x.shape[len(batch)]), *x.shape[-axes:]), (*split(weight.shape[0]), *weight.shape[1:])),
            (*leading, *split(node.shape[len(batch)]), *node.shape[-axes:]),
            constants=not transposed and (padding == "valid" or (padding != "same" and not any(_per_axis(padding, axes)))),
        )  # fmt: skip
        return product if bias is None else forms.sum(product, forms.view(bias, (*bias.shape, *[1] * axes)))
