"""What patterns are made of: constants, products and sums written out, and the node that replaces a pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from normscope.graph.graph import Constant, Node


def constant_operand(node: Node) -> Constant | None:
    return next((operand for operand in node.args[:2] if isinstance(operand, Constant)), None)


MOST_FACTORS = 6  # and as many products inside each other: no pattern has more


def factors_of(node: Node, depth: int = MOST_FACTORS) -> tuple[float, list[Node]]:
    """A product written out: its constant coefficient and the nodes that are multiplied; itself where it is a long one."""
    whole = 1.0, [node]
    if not depth:
        return whole
    if node.op == "mul":
        coefficient = 1.0
        nodes: list[Node] = []
        for operand in node.args[:2]:
            if isinstance(operand, Node):
                inner, factors = factors_of(operand, depth - 1)
                coefficient, nodes = coefficient * inner, nodes + factors
            else:
                value = scalar(operand)
                if value is None:
                    return whole
                coefficient *= value
            if len(nodes) > MOST_FACTORS:
                return whole
        return coefficient, nodes
    if node.op == "div" and isinstance(node.args[0], Node):
        value = scalar(node.args[1])
        if value:
            coefficient, nodes = factors_of(node.args[0], depth - 1)
            return coefficient / value, nodes
    return whole


def plus_constant(node: Node) -> tuple[float | None, Node | None]:
    """(c, y) for y + c."""
    if node.op == "add" and len(node.inputs) == 1 and node.kwargs.get("alpha", 1) == 1:
        return scalar(next(a for a in node.args[:2] if a is not node.input)), node.input
    return None, None


def renewed(node: Node, op: str, target: Callable[..., Any], args: tuple[Any, ...], approximate: str | None = None) -> Node:
    kwargs = {"approximate": approximate} if approximate is not None else {}
    if approximate is not None:
        args = args[:1]
    return Node(node.name, op, target, args, kwargs, node.path, node.source, node.shape, node.dtype)


def scalar(value: Any) -> float | None:
    if isinstance(value, Constant):
        return float(value.value) if value.value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def is_number(value: Any, expected: float) -> bool:
    return scalar(value) == expected


def close_to(value: float, expected: float, node: Node) -> bool:
    """Up to the rounding of a number in the node's own type."""
    return node.dtype is not None and math.isclose(value, expected, rel_tol=torch.finfo(node.dtype).eps)
