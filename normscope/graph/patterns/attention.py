"""Attention written by hand: softmax(c · Q Kᵀ + mask) V, by matmul or einsum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.expressions import constant_operand, factors_of, scalar

HIDDEN = -1e30  # a fill at or below this hides a key


def as_attention(node: Node) -> Node | None:
    """The fused operation, where the last two axes of Q, K, V are (tokens, features) and every query sees some key."""
    parts = _weighted_values(node)
    if parts is None:
        return None
    given, value = parts
    weights = _heads_apart(given)
    if (
        weights.op not in ("softmax", "_softmax", "special_softmax")
        or weights.args[1] % len(weights.shape) != len(weights.shape) - 1
    ):
        return None
    logits, mask = _unmasked(weights.input)
    coefficient, factors = factors_of(logits)
    scores = _scores(factors[0]) if len(factors) == 1 else None
    if scores is None or coefficient == 0 or len(value.shape) < 3 or not _same_entries(logits.shape, given.shape):
        return None
    leading = value.shape[:-2]
    query, key = (_heads_as(part, leading) for part in scores)
    if {query.shape[:-2], key.shape[:-2], given.shape[:-2]} != {leading} or (mask is not None and not _sees_a_key(mask.value)):
        return None
    if mask is not None and logits.shape[:-2] != leading:
        mask = replace(mask, value=mask.value.expand(logits.shape).reshape(given.shape))
    target = torch.ops.aten.scaled_dot_product_attention.default
    arguments, settings = (query, key, value, mask, 0.0, False), {"scale": coefficient}
    name = "scaled_dot_product_attention"
    return Node(node.name, name, target, arguments, settings, node.path, node.source, node.shape, node.dtype)


def _weighted_values(node: Node) -> tuple[Node, Node] | None:
    """(P, V) of P V."""
    if len(node.inputs) != 2:
        return None
    if node.op in ("matmul", "bmm") and node.args[:2] == node.inputs:
        return node.inputs[0], node.inputs[1]
    letters = _einsum(node)
    if letters is None:
        return None
    weights, values, result = letters
    batch, i, j, d = weights[:-2], weights[-2], weights[-1], values[-1]
    return node.inputs if values == batch + j + d and result == batch + i + d else None  # type: ignore[return-value]


def _scores(node: Node) -> tuple[Node, Node] | None:
    """(Q, K) of Q Kᵀ."""
    if len(node.inputs) != 2:
        return None
    if node.op in ("matmul", "bmm") and node.args[:2] == node.inputs:
        return node.inputs[0], _transposed(node.inputs[1])
    letters = _einsum(node)
    if letters is None:
        return None
    queries, keys, result = letters
    batch, i, d, j = queries[:-2], queries[-2], queries[-1], keys[-2]
    return node.inputs if keys == batch + j + d and result == batch + i + j else None  # type: ignore[return-value]


def _einsum(node: Node) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, each operand of two axes or more."""
    if node.op != "einsum" or "." in node.args[0] or "->" not in node.args[0] or tuple(node.args[1]) != node.inputs:
        return None
    operands, result = node.args[0].replace(" ", "").split("->")
    first, second = operands.split(",")
    return (first, second, result) if min(len(first), len(second)) >= 2 else None


def _transposed(node: Node) -> Node:
    """The node of which `node` is the transpose in the last two axes, or a new one that transposes it back."""
    rank = len(node.shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if node.op == "mT":
        return node.input
    if node.op == "transpose" and {axis % rank for axis in node.args[1:3]} == {rank - 2, rank - 1}:
        return node.input
    if node.op == "permute" and tuple(axis % rank for axis in node.args[1]) == swapped:
        return node.input
    shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
    return Node(f"{node.name}_mT", "mT", torch.ops.aten.mT.default, (node,), {}, node.path, node.source, shape, node.dtype)


def _heads_apart(node: Node) -> Node:
    """What a reshape of the axes in front of queries and keys alone was given; else the node itself."""
    return node.input if node.op == "reshape" and node.input.shape[-2:] == node.shape[-2:] else node


def _heads_as(node: Node, leading: tuple[int, ...]) -> Node:
    """The node with these axes in front of tokens and features, where it has as many entries along its own."""
    shape = (*leading, *node.shape[-2:])
    if node.shape == shape or not _same_entries(node.shape, shape):
        return node
    target, args = torch.ops.aten.reshape.default, (node, list(shape))
    return Node(f"{node.name}_heads", "reshape", target, args, {}, node.path, node.source, shape, node.dtype)


def _same_entries(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a reshape of the axes before the last two makes one shape of the other."""
    return one[-2:] == other[-2:] and math.prod(one) == math.prod(other)


def _unmasked(node: Node) -> tuple[Node, Constant | None]:
    """(logits, mask) of masked logits: of all that is added, filled in by masked_fill or where, or the first part of a baddbmm."""
    mask: Constant | None = None
    while True:
        if len(node.inputs) == 1 and (inner := _heads_apart(node)) is not node:
            mask = None if mask is None else replace(mask, value=mask.value.expand(node.shape).reshape(inner.shape))
            node = inner
            continue
        found = _mask(node)
        if found is None:
            return node, mask
        node, more = found
        mask = more if mask is None else _both(mask, more)


def _mask(node: Node) -> tuple[Node, Constant] | None:
    """(logits, mask) of one step; a mask of truth values says which keys are seen."""
    if node.op == "baddbmm" and isinstance(node.args[0], Constant) and len(node.inputs) == 2:
        beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
        product = replace(node, op="bmm", target=torch.ops.aten.bmm.default, args=node.args[1:3], kwargs={})
        scaled = replace(node, op="mul", target=torch.ops.aten.mul.Tensor, args=(product, float(alpha)), kwargs={})
        return scaled, replace(node.args[0], value=float(beta) * node.args[0].value.expand(node.shape))
    if len(node.inputs) != 1:
        return None
    if node.op == "add" and node.kwargs.get("alpha", 1) == 1 and (added := constant_operand(node)) is not None:
        table = added.value.to(torch.promote_types(added.value.dtype, torch.float32))
        table = table if table.dim() > 1 else table.expand(node.shape[-2:])
        return node.input, Constant(table, added.sources, added.learned)
    if node.op == "masked_fill" and node.input is node.args[0] and _hides(node.args[2]) and isinstance(node.args[1], Constant):
        return node.input, Constant(node.args[1].value.logical_not())
    if node.op == "where" and node.input is node.args[1] and _hides(node.args[2]) and isinstance(node.args[0], Constant):
        return node.input, Constant(node.args[0].value.bool())
    return None


def _both(one: Constant, other: Constant) -> Constant:
    tables = [part.value.double() if part.value.dtype != torch.bool else part.value.double().log() for part in (one, other)]
    return Constant(tables[0] + tables[1], (*one.sources, *other.sources), one.learned or other.learned)


def _hides(fill: Any) -> bool:
    value = scalar(fill)
    return value is not None and value <= HIDDEN


def _sees_a_key(mask: torch.Tensor) -> bool:
    kept = mask if mask.dtype == torch.bool else mask > HIDDEN
    return bool(kept.any(-1).all()) if kept.dim() else bool(kept)
