"""Normalizers and activations written by hand, recognised as what they are.

Each recogniser looks at one node and the expression above it and returns the single node that computes the same, or
None. What was recognised is then checked: the rewritten graph must give the same output as the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from normscope.graph.graph import Constant, Graph, Node


def recognise(graph: Graph) -> Graph:
    """The graph with every hand-written normalizer and activation as one node."""
    original = graph
    for recogniser in (as_centering, as_activation, as_standardization, as_rotary):
        found = {node: match for node in graph if (match := recogniser(node)) is not None}
        if found:
            graph = graph.replace(found)
    if graph is not original:
        _check_same_function(original, graph)
    return graph


def _check_same_function(before: Graph, after: Graph) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.zeros(node.shape, dtype=node.dtype)  # ids and masks, where parameters and all inputs are nodes
        if node.dtype is not None and not node.dtype.is_floating_point
        else torch.randn(node.shape, generator=generator, dtype=torch.float64)
        for node in before.inputs
    ]
    with torch.no_grad():
        expected, found = before.run(inputs, torch.float64)[0], after.run(inputs, torch.float64)[0]
    error = float((expected - found).abs().max()) if expected.numel() else 0.0
    if not error <= 1e-5 * (1 + float(expected.abs().max())):
        raise AssertionError(f"a bug of normscope: recognising patterns changed the output by {error:.3g}; please report it")


# Normalizers -------------------------------------------------------------------------------------------------------


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
    return _renewed(node, "center", center, (x, axes)) if axes else None


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
            return _renewed(node, "standardize", standardize, scale.arguments)
        scaled = _scaled_numerator(top, scale)  # γ · (x − mean) / s: the same with γ applied afterwards
        if scaled is not None and top.shape == node.shape:
            normalized = _renewed(top, "standardize", standardize, scale.arguments)
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
    return top is scale.of


def _scaled_numerator(top: Any, scale: Scale) -> Constant | None:
    """The constant γ where `top` is γ · numerator."""
    if not isinstance(top, Node) or top.op != "mul" or len(top.inputs) != 1 or not _is_numerator(top.input, scale):
        return None
    constant = _constant_operand(top)
    return constant if constant is not None and top.input.shape == top.shape else None


def _inverse_scale(node: Any) -> Scale | None:
    if not isinstance(node, Node):
        return None
    if node.op in ("expand", "expand_as", "broadcast_to"):
        return _inverse_scale(node.inputs[0])
    if node.op == "rsqrt" or (node.op == "pow" and _is(node.args[1], -0.5)):
        return _variance(node.args[0])
    if node.op == "reciprocal":
        return _scale(node.args[0])
    if node.op == "div" and _is(node.args[0], 1.0):
        return _scale(node.args[1])
    if node.op == "mul" and len(node.inputs) == 1 and _scalar(next(a for a in node.args[:2] if a is not node.input)) == 1.0:
        return _inverse_scale(node.input)
    return None


def _scale(node: Any) -> Scale | None:
    """√v with ε inside, outside or as a floor."""
    if not isinstance(node, Node):
        return None
    if node.op in ("expand", "expand_as", "broadcast_to"):
        return _scale(node.inputs[0])
    if node.op == "sqrt" or (node.op == "pow" and _is(node.args[1], 0.5)):
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
        epsilon = _scalar(next(a for a in node.args[:2] if a is not node.input))
        return (epsilon, node.input, "outside") if epsilon is not None and epsilon > 0 else (0.0, None, "")
    if node.op in ("clamp_min", "clamp") and len(node.inputs) == 1:
        ceiling = node.argument(2, "max") if node.op == "clamp" else None
        epsilon = _scalar(node.argument(1, "min"))
        if epsilon is not None and epsilon > 0 and ceiling is None:
            return epsilon, node.input, "clamp"
    return 0.0, None, ""


def _variance(node: Any) -> Scale | None:
    """mean(x²), var(x), each with or without + ε."""
    if not isinstance(node, Node):
        return None
    if node.op == "add" and len(node.inputs) == 1 and node.kwargs.get("alpha", 1) == 1:
        epsilon = _scalar(next(a for a in node.args[:2] if a is not node.input))
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
    if not axes or not _kept(node):
        return None
    return Scale(node.input, "layer", axes, correction=bessel_correction(node))


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
    if node.op == "square" or (node.op == "pow" and _is(node.args[1], 2.0)):
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
    return tuple(sorted(axis % rank for axis in listed)) if listed else tuple(range(rank))


# Rotary embeddings ---------------------------------------------------------------------------------------------------


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
        x, cos, sin = straight.input, _constant_operand(straight), _constant_operand(turned)
        whole = len(x.shape) > 0 and x.shape[-1] % 2 == 0 and x.shape == node.shape
        if whole and cos is not None and sin is not None and _rotates(turned.input, x):
            halves = [constant.value.chunk(2, -1) for constant in (cos, sin)]
            if all(len(half) == 2 and bool((half[0] == half[1]).all()) for half in halves):
                return _renewed(node, "rotary", rotary, (x, cos, sin))
    return None


def _constant_operand(node: Node) -> Constant | None:
    return next((operand for operand in node.args[:2] if isinstance(operand, Constant)), None)


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
        if top.op not in ("cat", "neg", "slice", "chunk", "split", "split_with_sizes", "getitem", "narrow", "tensor_split"):
            return False
        waiting = [source for source in top.inputs if source not in values]
        if waiting:
            stack.extend(waiting)
        else:
            values[stack.pop()] = top.evaluate(values, torch.float64)
    return node.shape == x.shape and bool((values[node] == rotate_half(entries)).all())


# Activations -------------------------------------------------------------------------------------------------------


def quick_gelu(x: torch.Tensor, sharpness: float) -> torch.Tensor:
    """x · sigmoid(sharpness · x)."""
    return x * torch.sigmoid(sharpness * x)


def as_activation(node: Node) -> Node | None:
    """SiLU, quick GELU, Mish, GELU (both forms), hard swish, softsign and tanhshrink, written out."""
    if node.op == "sub" and len(node.inputs) == 2 and node.kwargs.get("alpha", 1) == 1:
        x, other = node.inputs
        return (
            _renewed(node, "tanhshrink", torch.nn.functional.tanhshrink, (x,)) if other.op == "tanh" and other.input is x else None
        )
    if node.op == "div" and len(node.inputs) == 2:
        x, below = node.inputs
        one, inner = _plus(below)
        if one == 1.0 and inner is not None and inner.op == "abs" and inner.input is x:
            return _renewed(node, "softsign", torch.nn.functional.softsign, (x,))
    coefficient, factors = _factors(node)
    if len(factors) != 2 or node.op not in ("mul", "div"):
        return None
    for x, gate in (factors, factors[::-1]):
        found = _gated(node, coefficient, x, gate)
        if found is not None:
            return found
    return None


def _gated(node: Node, coefficient: float, x: Node, gate: Node) -> Node | None:
    """The activation x · gate(x) · coefficient, if it is a known one."""
    aten = torch.ops.aten
    if x.shape != node.shape or gate.shape != node.shape:
        return None
    if gate.op == "sigmoid" and _close(coefficient, 1.0):
        sharpness, inner = _factors(gate.input)
        if inner == [x]:
            if sharpness == 1.0:
                return _renewed(node, "silu", aten.silu.default, (x,))
            return _renewed(node, "quick_gelu", quick_gelu, (x, sharpness))
    if gate.op == "tanh" and gate.input.op == "softplus" and gate.input.input is x and _close(coefficient, 1.0):
        beta, threshold = (_scalar(gate.input.argument(i, name, d)) for i, name, d in ((1, "beta", 1), (2, "threshold", 20)))
        return _renewed(node, "mish", aten.mish.default, (x,)) if beta == 1.0 and (threshold or 0) >= 20 else None
    if gate.op in ("hardtanh", "relu6", "clamp") and _close(coefficient, 1 / 6):
        three, inner_node = _plus(gate.input)
        limits = (0.0, 6.0) if gate.op == "relu6" else tuple(_scalar(a) for a in gate.args[1:3])
        if three == 3.0 and inner_node is x and limits == (0.0, 6.0):
            return _renewed(node, "hardswish", aten.hardswish.default, (x,))
    one, inner_node = _plus(gate)
    if one == 1.0 and inner_node is not None and _close(coefficient, 0.5):
        if inner_node.op == "erf":
            scale, inner = _factors(inner_node.input)
            if inner == [x] and _close(scale, math.sqrt(0.5)):
                return _renewed(node, "gelu", aten.gelu.default, (x, "none"), approximate="none")
        if inner_node.op == "tanh" and _is_tanh_gelu_argument(inner_node.input, x):
            return _renewed(node, "gelu", aten.gelu.default, (x, "tanh"), approximate="tanh")
    return None


def _is_tanh_gelu_argument(node: Node, x: Node) -> bool:
    """√(2/π)(x + 0.044715 x³)."""
    scale, inner = _factors(node)
    if len(inner) != 1 or inner[0].op != "add" or not _close(scale, math.sqrt(2 / math.pi)):
        return False
    terms = [operand for operand in inner[0].args[:2] if isinstance(operand, Node)]
    if len(terms) != 2 or x not in terms:
        return False
    cubic = terms[1] if terms[0] is x else terms[0]
    weight, powers = _factors(cubic)
    cube = powers == [x, x, x] or (
        len(powers) == 1 and powers[0].op == "pow" and powers[0].args[0] is x and _is(powers[0].args[1], 3.0)
    )
    return cube and _close(weight, 0.044715)


def _factors(node: Node) -> tuple[float, list[Node]]:
    """A product written out: its constant coefficient and the nodes that are multiplied."""
    if node.op == "mul":
        coefficient = 1.0
        nodes: list[Node] = []
        for operand in node.args[:2]:
            if isinstance(operand, Node):
                inner, factors = _factors(operand)
                coefficient, nodes = coefficient * inner, nodes + factors
            else:
                value = _scalar(operand)
                if value is None:
                    return 1.0, [node]
                coefficient *= value
        return coefficient, nodes
    if node.op == "div" and isinstance(node.args[0], Node):
        value = _scalar(node.args[1])
        if value:
            coefficient, nodes = _factors(node.args[0])
            return coefficient / value, nodes
    return 1.0, [node]


def _plus(node: Node) -> tuple[float | None, Node | None]:
    """(c, y) for y + c."""
    if node.op == "add" and len(node.inputs) == 1 and node.kwargs.get("alpha", 1) == 1:
        return _scalar(next(a for a in node.args[:2] if a is not node.input)), node.input
    return None, None


def _renewed(node: Node, op: str, target: Callable[..., Any], args: tuple[Any, ...], approximate: str | None = None) -> Node:
    kwargs = {"approximate": approximate} if approximate is not None else {}
    if approximate is not None:
        args = args[:1]
    return Node(node.name, op, target, args, kwargs, node.path, node.source, node.shape, node.dtype)


def _scalar(value: Any) -> float | None:
    if isinstance(value, Constant):
        return float(value.value) if value.value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is(value: Any, expected: float) -> bool:
    return _scalar(value) == expected


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-6)
