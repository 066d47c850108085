"""Normalizers written by hand: centering, and division by a root mean square, a norm or a standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.expressions import constant_operand, is_number, renewed, scalar


def center(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """x minus its mean over `axes`: an orthogonal projection."""
    return x - x.mean(axes, keepdim=True)


def standardize(
    x: torch.Tensor, kind: str, axes: tuple[int, ...], epsilon: float, placement: str, correction: float
) -> torch.Tensor:
    """x over its scale on `axes`: root mean square (rms), norm (l2), or, centered, standard deviation (layer)."""
    if kind == "layer":
        x = center(x, axes)
    total = x.square().sum(axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    mean_square = total if kind == "l2" else total / (count - correction)
    if placement == "inside":
        return x * (mean_square + epsilon).rsqrt()
    root = mean_square.sqrt()
    return x / (root + epsilon if placement == "outside" else root.clamp(min=epsilon))


@dataclass(frozen=True)
class Scale:
    """A positive scale that is computed from `of`; squared while it is still under its root."""

    of: Node
    kind: str
    axes: tuple[int, ...]
    epsilon: float = 0.0
    placement: str = "inside"
    correction: float = 0.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of `standardize`."""
        return self.of, self.kind, self.axes, self.epsilon, self.placement, self.correction


def as_centering(node: Node) -> Node | None:
    """x − mean(x) over some axes."""
    if node.op != "sub" or len(node.inputs) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    x, mean = node.inputs
    if mean.op != "mean" or mean.input is not x or not _keeps_axes(mean):
        return None
    axes = _axes(mean.args[1], len(x.shape))
    return renewed(node, "center", center, (x, axes)) if axes else None


def as_standardization(node: Node) -> Node | None:
    """x · rsqrt(v + ε), x / √(v + ε), x / (std + ε), x / max(‖x‖, ε)."""
    if node.op not in ("mul", "div") or len(node.inputs) != 2:
        return None
    pairs = [tuple(node.args[:2])] if node.op == "div" else [tuple(node.args[:2]), tuple(node.args[1::-1])]
    for top, bottom in pairs:
        scale = _inverse_scale(bottom) if node.op == "mul" else _scale(bottom)
        if scale is None:
            continue
        if _is_numerator(top, scale) and top.shape == node.shape:
            return renewed(node, "standardize", standardize, scale.arguments)
        scaled = _scaled_numerator(top, scale)  # γ · (x − mean) / s: the same with γ applied afterwards
        if scaled is not None and top.shape == node.shape:
            normalized = renewed(top, "standardize", standardize, scale.arguments)
            return Node(
                node.name,
                "mul",
                torch.ops.aten.mul.Tensor,
                (normalized, scaled),
                {},
                node.path,
                node.source,
                node.shape,
                node.dtype,
            )
    return None


def _is_numerator(top: Any, scale: Scale) -> bool:
    """Whether `top` is what the scale belongs to: x itself, or x centered where the scale is a standard deviation."""
    if scale.kind == "layer":
        return isinstance(top, Node) and top.op == "center" and top.input is scale.of and top.args[1] == scale.axes
    return top is scale.of or _centered_alike(top, scale.of)


def _centered_alike(one: Any, other: Node) -> bool:
    """Whether two nodes are the same difference from the mean, written twice."""
    centered = isinstance(one, Node) and one.op == other.op == "center"
    return centered and one.input is other.input and one.args[1] == other.args[1]


def _scaled_numerator(top: Any, scale: Scale) -> Constant | None:
    """The constant γ where `top` is γ · numerator."""
    if not isinstance(top, Node) or top.op != "mul" or len(top.inputs) != 1 or not _is_numerator(top.input, scale):
        return None
    constant = constant_operand(top)
    return constant if constant is not None and top.input.shape == top.shape else None


def _inverse_scale(node: Any) -> Scale | None:
    if not isinstance(node, Node):
        return None
    if node.op in ("expand", "broadcast_to"):
        return _inverse_scale(node.inputs[0])
    if node.op == "rsqrt" or (node.op == "pow" and is_number(node.args[1], -0.5)):
        return _variance(node.args[0])
    if node.op == "reciprocal":
        return _scale(node.args[0])
    if node.op == "div" and is_number(node.args[0], 1.0):
        return _scale(node.args[1])
    if node.op == "mul" and len(node.inputs) == 1 and scalar(next(a for a in node.args[:2] if a is not node.input)) == 1.0:
        return _inverse_scale(node.input)
    return None


def _scale(node: Any) -> Scale | None:
    """√v with ε inside, outside or as a floor."""
    if not isinstance(node, Node):
        return None
    if node.op in ("expand", "broadcast_to"):
        return _scale(node.inputs[0])
    if node.op == "sqrt" or (node.op == "pow" and is_number(node.args[1], 0.5)):
        return _variance(node.args[0])
    if node.op in ("linalg_vector_norm", "norm"):
        order = node.args[1]
        axes = _axes(node.argument(2, "dim"), len(node.input.shape))
        if axes and (order is None or order in (2, "fro")) and _kept(node):
            return Scale(node.input, "l2", axes)
        return None
    if node.op == "std":
        return _spread(node)
    epsilon, inner, placement = _with_epsilon(node)
    if inner is None or placement == "":
        return None
    scale = _scale(inner)
    if scale is None or scale.epsilon:
        return None
    return Scale(scale.of, scale.kind, scale.axes, epsilon, placement, scale.correction)


def _with_epsilon(node: Node) -> tuple[float, Node | None, str]:
    """(ε, what it is added to, placement) for s + ε and max(s, ε)."""
    if node.op == "add" and len(node.inputs) == 1 and node.kwargs.get("alpha", 1) == 1:
        epsilon = scalar(next(a for a in node.args[:2] if a is not node.input))
        return (epsilon, node.input, "outside") if epsilon is not None and epsilon > 0 else (0.0, None, "")
    if node.op in ("clamp_min", "clamp") and len(node.inputs) == 1:
        ceiling = node.argument(2, "max") if node.op == "clamp" else None
        epsilon = scalar(node.argument(1, "min"))
        if epsilon is not None and epsilon > 0 and ceiling is None:
            return epsilon, node.input, "clamp"
    return 0.0, None, ""


def _variance(node: Any) -> Scale | None:
    """mean(x²), var(x), each with or without + ε."""
    if not isinstance(node, Node):
        return None
    if node.op == "add" and len(node.inputs) == 1 and node.kwargs.get("alpha", 1) == 1:
        epsilon = scalar(next(a for a in node.args[:2] if a is not node.input))
        inner = _variance(node.input)
        if epsilon is None or epsilon < 0 or inner is None or inner.epsilon:
            return None
        return Scale(inner.of, inner.kind, inner.axes, epsilon, "inside", inner.correction)
    if node.op in ("mean", "sum") and _keeps_axes(node):
        squared = _squared(node.input)
        if squared is not None:
            return Scale(squared, "rms" if node.op == "mean" else "l2", _axes(node.args[1], len(squared.shape)))
    if node.op == "var":
        return _spread(node)
    return None


def _spread(node: Node) -> Scale | None:
    """var or std over some axes, kept."""
    axes = _axes(node.argument(1, "dim") if "dim" in _argument_names(node) else None, len(node.input.shape))
    correction = bessel_correction(node)
    if not axes or not _kept(node) or correction not in (0.0, 1.0):
        return None
    return Scale(node.input, "layer", axes, correction=correction)


def bessel_correction(node: Node) -> float:
    """What a var or std node subtracts from the count it divides by, in any of torch's signatures."""
    names = _argument_names(node)
    if "unbiased" in names:
        return 1.0 if node.args[names.index("unbiased")] else 0.0
    correction = node.kwargs.get("correction", 1)
    return 1.0 if correction is None else float(correction)


def _argument_names(node: Node) -> list[str]:
    schema: Any = getattr(node.target, "_schema", None)
    return [argument.name for argument in schema.arguments]


def _squared(node: Node) -> Node | None:
    if node.op == "square" or (node.op == "pow" and is_number(node.args[1], 2.0)):
        return node.args[0] if isinstance(node.args[0], Node) else None
    if node.op == "mul" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]:
        return node.inputs[0]
    return None


def _keeps_axes(node: Node) -> bool:
    return len(node.args) > 1 and bool(_axes(node.args[1], len(node.input.shape))) and _kept(node)


def _kept(node: Node) -> bool:
    return len(node.shape) == len(node.input.shape)


def _axes(value: Any, rank: int) -> tuple[int, ...]:
    if value is None:
        return tuple(range(rank))
    listed = [value] if isinstance(value, int) else list(value)
    return tuple(sorted(axis % rank for axis in listed)) if listed and rank else tuple(range(rank))
