"""Rotary position embeddings written by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from normscope.graph.graph import Node
from normscope.graph.patterns.expressions import constant_operand, renewed


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(x₁, x₂) ↦ (−x₂, x₁), the halves of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Every plane (x_i, x_{i+d/2}) turned by its own angle."""
    return x * cos + rotate_half(x) * sin


def as_rotary(node: Node) -> Node | None:
    """x ⊙ cos + rotate_half(x) ⊙ sin with constants that are the same in both halves."""
    if node.op != "add" or len(node.inputs) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for straight, turned in (node.inputs, node.inputs[::-1]):
        if straight.op != "mul" or turned.op != "mul" or len(straight.inputs) != 1 or len(turned.inputs) != 1:
            continue
        x, cos, sin = straight.input, constant_operand(straight), constant_operand(turned)
        whole = len(x.shape) > 0 and x.shape[-1] % 2 == 0 and x.shape == node.shape
        if whole and cos is not None and sin is not None and _rotates(turned.input, x):
            halves = [constant.value.chunk(2, -1) for constant in (cos, sin)]
            if all(len(half) == 2 and bool((half[0] == half[1]).all()) for half in halves):
                return renewed(node, "rotary", rotary, (x, cos, sin))
    return None


def _rotates(node: Node, x: Node) -> bool:
    """Whether `node` is rotate_half(x), tried on entries that are all different."""
    entries = torch.arange(1, math.prod(x.shape) + 1, dtype=torch.float64).reshape(x.shape)
    values: dict[Node, Any] = {x: entries}
    stack = [node]
    while stack:
        top = stack[-1]
        if top in values:
            stack.pop()
            continue
        if top.op not in ("cat", "neg", "slice", "narrow"):
            return False
        waiting = [source for source in top.inputs if source not in values]
        if waiting:
            stack.extend(waiting)
        else:
            values[stack.pop()] = top.evaluate(values, torch.float64)
    return node.shape == x.shape and bool((values[node] == rotate_half(entries)).all())
