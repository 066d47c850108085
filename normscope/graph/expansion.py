"""Operations that torch has for several at once, taken apart: lists of tensors, moments, products of many matrices, attention."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from normscope.graph.graph import Constant, Node

aten = torch.ops.aten

Make = Callable[..., Any]  # from an operation and its arguments to a node, or to a constant
FOREACH = "_foreach_"  # before the name of an operation on every tensor of a list
UNARY = (
    "abs", "neg", "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "sin", "cos",
    "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "erfc", "floor", "ceil", "round", "trunc", "frac", "sign",
)  # fmt: skip
TENSORS: dict[str, Any] = {  # of two tensors, or of three
    "add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor, "pow": aten.pow.Tensor_Tensor,
    "maximum": aten.maximum.default, "minimum": aten.minimum.default, "clamp_min": aten.clamp_min.Tensor,
    "clamp_max": aten.clamp_max.Tensor, "lerp": aten.lerp.Tensor, "addcmul": aten.addcmul.default, "addcdiv": aten.addcdiv.default,
}  # fmt: skip
NUMBERS: dict[str, Any] = {  # where the last operand is a number
    "add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor, "pow": aten.pow.Tensor_Scalar,
    "maximum": aten.clamp_min.default, "minimum": aten.clamp_max.default, "clamp_min": aten.clamp_min.default,
    "clamp_max": aten.clamp_max.default, "lerp": aten.lerp.Scalar,
}  # fmt: skip


def expanded(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """What the operation returns, made of ordinary operations; None where it is one itself."""
    if op in ("var_mean", "std_mean"):
        return _moments(op, target, args, kwargs, make)
    if op == "linalg_multi_dot":
        return reduce(lambda product, factor: make(aten.matmul.default, product, factor), args[0])
    if op == "scaled_dot_product_attention":
        return _biased_attention(args, kwargs, make)
    if op in ("addmm", "baddbmm", "addmv") and isinstance(args[0], Node):
        return _added_product(args, kwargs, make)
    if op == "bilinear" and isinstance(args[0], Node) and isinstance(args[1], Node) and isinstance(args[2], Constant):
        return _form_in_two(args, make)
    return _each(op.removeprefix(FOREACH), args, kwargs, make) if op.startswith(FOREACH) else None


def _moments(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> list[Any]:
    """The variance or deviation, in the same signature, and the mean."""
    packet, overload = {"var_mean": aten.var, "std_mean": aten.std}[op], target._overloadname
    axes = args[1] if overload in ("dim", "correction") else None
    keep = args[3] if overload == "dim" else kwargs.get("keepdim", False)
    mean = aten.mean.dim, args[0], list(range(len(args[0].shape))) if axes is None else axes, keep
    return [make(getattr(packet, overload), *args, **kwargs), make(*mean)]


def _biased_attention(args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """softmax(c · Q Kᵀ + B) V with a bias that depends on the input, as relative positions do; None where it does not."""
    query, key, value, bias, dropout = args[:5]
    if not isinstance(bias, Node) or bias.dtype is None or not bias.dtype.is_floating_point or dropout:
        return None
    groups = query.shape[-3] // key.shape[-3] if kwargs.get("enable_gqa") else 1
    if groups > 1:
        key, value = (make(aten.repeat_interleave.self_int, part, groups, -3) for part in (key, value))
    scale = kwargs.get("scale")
    scores = make(aten.matmul.default, query, make(aten.transpose.int, key, -2, -1))
    scores = make(aten.mul.Tensor, scores, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return make(aten.matmul.default, make(aten.softmax.int, make(aten.add.Tensor, scores, bias), -1), value)


def _added_product(args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """β A + α B C, where A depends on the input, as in a low-rank update `torch.addmm(y, x @ down, up)`."""
    product, term = make(aten.matmul.default, *args[1:3]), args[0]
    if kwargs.get("beta", 1) != 1:
        term = make(aten.mul.Tensor, term, kwargs["beta"])
    return make(aten.add.Tensor, term, product, alpha=kwargs.get("alpha", 1))


def _form_in_two(args: tuple[Any, ...], make: Make) -> Any:
    """Σ_ij x_i W_oij y_j + b_o, where x and y both depend on the input."""
    first, second, weight, bias = args[:4]
    leading = string.ascii_uppercase[: len(first.shape) - 1]
    turned = make(aten.einsum.default, f"{leading}b,cab->{leading}ca", [second, weight])
    product = make(aten.einsum.default, f"{leading}a,{leading}ca->{leading}c", [first, turned])
    return product if bias is None else make(aten.add.Tensor, product, bias)


def _each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> list[Any] | None:
    """The operation on every tensor of the first list, with the entry of each further list that stands at its place."""
    rows = list(
        zip(*(operand if isinstance(operand, (list, tuple)) else [operand] * len(args[0]) for operand in args), strict=True)
    )
    if name in UNARY:
        return [make(getattr(aten, name).default, row[0]) for row in rows]
    if name in ("addcmul", "addcdiv"):
        return [make(TENSORS[name], *row[:3], value=row[3] if len(row) > 3 else kwargs.get("value", 1)) for row in rows]
    tensors = all(isinstance(row[-1], (Node, Constant)) for row in rows)
    chosen = (TENSORS if tensors else NUMBERS).get(name)
    return None if chosen is None else [make(chosen, *row, **kwargs) for row in rows]


def grouped_product(node: Node) -> list[Node] | None:
    """Rows in groups times one matrix per group, where the groups are known: slices, products, and their concatenation as the last.

    None for other operations, and where rows belong to no group.
    """
    if node.op != "grouped_mm" or not isinstance(node.args[0], Node):
        return None
    rows, weight, ends = node.args[0], node.args[1], node.args[2]
    if not isinstance(weight, Constant) or not isinstance(ends, Constant) or len(rows.shape) != 2 or len(weight.shape) != 3:
        return None
    stops = [int(end) for end in ends.value.tolist()]
    if not stops or stops[-1] != rows.shape[0]:
        return None
    parts: list[Node] = []

    def made(op: str, target: Any, args: tuple[Any, ...], shape: tuple[int, ...]) -> Node:
        name = f"{node.name}_part_{len(parts)}"
        parts.append(Node(name, op, target, args, {}, node.path, node.source, shape, node.dtype))
        return parts[-1]

    products = []
    for group, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        if start < stop:
            own = made("slice", aten.slice.Tensor, (rows, 0, start, stop, 1), (stop - start, rows.shape[1]))
            matrix = Constant(weight.value[group], weight.sources, weight.learned, weight.rank)
            products.append(made("mm", aten.mm.default, (own, matrix), (stop - start, node.shape[1])))
    made("cat", aten.cat.default, (products, 0), node.shape)
    return parts
