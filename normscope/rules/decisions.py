"""Answers that are no number of a continuum: comparisons, ranks, casts to integers.

Routers of experts, masks made from values and piecewise functions rest on them. On a region where an answer is the same for all
inputs it is a constant, and what depends on it is a function like any other (`certify/settling.py`).
"""

from __future__ import annotations

import torch

from normscope.core.interval import Interval
from normscope.graph.graph import Constant, Node
from normscope.rules.registry import Context

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
RANKS = ("topk", "sort", "max", "min")  # values and places, along an axis
PLACES = ("argmax", "argmin", "argsort")
FINITE = ("isnan", "isinf", "isfinite")
CASTS = ("to", "_to_copy", "type_as")


def is_decision(node: Node) -> bool:
    """Whether a node turns floating-point numbers into integers or truth values."""
    discrete = node.dtype is not None and not node.dtype.is_floating_point and not node.dtype.is_complex
    return discrete and not node.is_input and bool(node.inputs) and all(map(_is_floating, node.inputs))


def read_by(node: Node) -> tuple[Node, ...]:
    """The tensors whose values a decision rests on: what is ranked, of the places of a rank."""
    return tuple(source for one in node.inputs for source in ((one,) if one.dtype is not None else one.inputs))


def named(node: Node) -> str:
    """How a message names a decision: the places of a rank by the rank."""
    return node.input.label if node.op == "getitem" else node.label


def _is_floating(source: Node) -> bool:
    if source.dtype is not None:
        return source.dtype.is_floating_point
    return bool(source.inputs) and all(map(_is_floating, source.inputs))  # values and places of a rank


def certain(node: Node, context: Context) -> bool:
    """Whether a decision is the same on all of the region, by the intervals of what it reads."""
    if node.op in COMPARISONS and len(node.args) == 2:
        first, second = (_interval(operand, context) for operand in node.args)
        return bool(((first.low > second.high) | (first.high < second.low)).all())
    if node.op == "getitem" and node.args[1] == 1 and node.input.op in RANKS:
        return _ranked(node.input, context)
    if node.op in PLACES:
        return _ranked(node, context)
    if node.op in FINITE:
        return context.interval(node.input).finite
    if node.op in CASTS and node.inputs == (node.args[0],):
        bounds = context.interval(node.input)
        if node.dtype == torch.bool:
            return bool(((bounds.low > 0) | (bounds.high < 0)).all())
        return bounds.finite and torch.equal(bounds.low.trunc(), bounds.high.trunc())
    return False


def _interval(operand: object, context: Context) -> Interval:
    if isinstance(operand, Node):
        return context.interval(operand)
    value = operand.double() if isinstance(operand, Constant) else torch.tensor(operand, dtype=torch.float64)
    return Interval(value, value)


def _ranked(node: Node, context: Context) -> bool:
    """Whether the entries along the node's axis have the same order everywhere, as far as it looks at the order."""
    source = node.inputs[0]
    if len(node.inputs) > 1 or not source.shape:
        return False
    bounds = context.interval(source)
    if not bounds.finite:
        return False
    if node.op == "topk":
        wanted, axis, largest, ordered = node.args[1:5]
    elif node.op in ("sort", "argsort"):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        axis = node.argument(names.index("dim"), "dim", -1)
        largest, wanted, ordered = False, source.shape[axis], True
    else:
        axis, largest, wanted, ordered = node.argument(1, "dim"), "max" in node.op, 1, True
    low, high = (bounds.low, bounds.high) if largest else (-bounds.high, -bounds.low)
    if axis is None:
        low, high, axis = low.reshape(-1), high.reshape(-1), 0
    count = low.shape[axis]
    order = low.sort(dim=axis, descending=True).indices
    low, high = low.gather(axis, order).movedim(axis, -1), high.gather(axis, order).movedim(axis, -1)
    above = high.flip(-1).cummax(-1).values.flip(-1)  # the largest that any entry from here on can be
    compared = min(wanted if ordered else count, count - 1)
    return bool((low[..., :compared] > above[..., 1 : compared + 1]).all())
