"""Activations written by hand: SiLU, GELU, Mish and their relatives."""

from __future__ import annotations

import math

import torch

from normscope.graph.graph import Node
from normscope.graph.patterns.expressions import close_to, factors_of, is_number, plus_constant, renewed, scalar


def quick_gelu(x: torch.Tensor, sharpness: float) -> torch.Tensor:
    """x · sigmoid(sharpness · x)."""
    return x * torch.sigmoid(sharpness * x)


def as_activation(node: Node) -> Node | None:
    """SiLU, quick GELU, Mish, GELU (both forms), hard swish, softsign and tanhshrink, written out."""
    if node.op == "sub" and len(node.inputs) == 2 and node.kwargs.get("alpha", 1) == 1:
        x, other = node.inputs
        return (
            renewed(node, "tanhshrink", torch.nn.functional.tanhshrink, (x,)) if other.op == "tanh" and other.input is x else None
        )
    if node.op == "div" and len(node.inputs) == 2:
        x, below = node.inputs
        one, inner = plus_constant(below)
        if one == 1.0 and inner is not None and inner.op == "abs" and inner.input is x:
            return renewed(node, "softsign", torch.nn.functional.softsign, (x,))
    coefficient, factors = factors_of(node)
    if len(factors) != 2 or node.op not in ("mul", "div"):
        return None
    for x, gate in (factors, factors[::-1]):
        found = _gated(node, x, gate)
        if found is not None:
            return _scaled(node, coefficient / found[1], found[0])
    return None


def _scaled(node: Node, factor: float, activation: Node) -> Node:
    """`node` as factor · activation, whatever the factor is."""
    if factor == 1.0:
        return activation
    activation.name = f"{node.name}_{activation.op}"
    return renewed(node, "mul", torch.ops.aten.mul.Tensor, (activation, factor))


def _gated(node: Node, x: Node, gate: Node) -> tuple[Node, float] | None:
    """The activation of which x · gate(x) is a multiple, and 1 over which, if it is a known one."""
    aten = torch.ops.aten
    if x.shape != node.shape or gate.shape != node.shape or len(gate.inputs) != 1:
        return None
    if gate.op == "sigmoid":
        sharpness, inner = factors_of(gate.input)
        if inner == [x]:
            plain = sharpness == 1.0
            arguments = ("silu", aten.silu.default, (x,)) if plain else ("quick_gelu", quick_gelu, (x, sharpness))
            return renewed(node, *arguments), 1.0
    if gate.op == "tanh" and gate.input.op == "softplus" and gate.input.input is x:
        beta, threshold = (scalar(gate.input.argument(i, name, d)) for i, name, d in ((1, "beta", 1), (2, "threshold", 20)))
        return (renewed(node, "mish", aten.mish.default, (x,)), 1.0) if beta == 1.0 and (threshold or 0) >= 20 else None
    if gate.op in ("hardtanh", "relu6", "clamp") and len(gate.inputs) == 1:
        three, inner_node = plus_constant(gate.input)
        limits = (0.0, 6.0) if gate.op == "relu6" else tuple(scalar(a) for a in gate.args[1:3])
        if three == 3.0 and inner_node is x and limits == (0.0, 6.0):
            return renewed(node, "hardswish", aten.hardswish.default, (x,)), 1 / 6
    one, inner_node = plus_constant(gate)
    if one == 1.0 and inner_node is not None:
        if inner_node.op == "erf":
            scale, inner = factors_of(inner_node.input)
            if inner == [x] and close_to(scale, math.sqrt(0.5), node):
                return renewed(node, "gelu", aten.gelu.default, (x, "none"), approximate="none"), 0.5
        if inner_node.op == "tanh" and _is_tanh_gelu_argument(inner_node.input, x):
            return renewed(node, "gelu", aten.gelu.default, (x, "tanh"), approximate="tanh"), 0.5
    return None


def _is_tanh_gelu_argument(node: Node, x: Node) -> bool:
    """√(2/π)(x + 0.044715 x³)."""
    scale, inner = factors_of(node)
    if len(inner) != 1 or inner[0].op != "add" or not close_to(scale, math.sqrt(2 / math.pi), node):
        return False
    terms = [operand for operand in inner[0].args[:2] if isinstance(operand, Node)]
    if len(terms) != 2 or x not in terms:
        return False
    cubic = terms[1] if terms[0] is x else terms[0]
    weight, powers = factors_of(cubic)
    cube = powers == [x, x, x] or (
        len(powers) == 1 and powers[0].op == "pow" and powers[0].args[0] is x and is_number(powers[0].args[1], 3.0)
    )
    return cube and close_to(weight, 0.044715, node)
