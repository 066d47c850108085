"""How a value depends on the scale of each weight, operation by operation of torch's autograd graph.

A weight and its bias are multiplied by c > 0 together. A value of degree d in them is multiplied by c^d; a normalizer ends the
degree. A tensor without a gradient counts as a constant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESHAPE = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select",
    "Split", "SplitWithSizes", "Unbind", "Clone", "Alias", "ToCopy", "Narrow", "Repeat",
})  # fmt: skip
KEEP = RESHAPE | {  # f(cx) = c f(x), in the first operand
    "Diagonal", "Unfold", "AsStrided", "Flip", "Roll", "Index", "IndexSelect", "Gather", "Embedding", "Tril", "Triu", "Sum",
    "Mean", "Cumsum", "Amax", "Amin", "Max", "Min", "Neg", "Abs", "Relu", "LeakyRelu", "Prelu", "Rrelu", "NativeDropout",
    "PixelShuffle", "Im2Col", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D",
    "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "ReflectionPad1D", "ReflectionPad2D", "ReplicationPad1D",
    "ReplicationPad2D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleBilinear2D", "LinalgVectorNorm", "NllLoss",
    "NllLoss2D",
}  # fmt: skip
PRODUCTS = frozenset({"Mm", "Bmm", "Mv", "Dot"})
SUMS = frozenset({"Add", "Sub", "Rsub"})
JOINS = frozenset({"Cat", "Stack"})
SUM_AND_PRODUCT = frozenset({"Addmm", "Addmv", "Baddbmm"})  # operands: the summand, then the factors
PRODUCT_AND_BIAS = frozenset({"Convolution", "Linear"})
ACTIVATIONS = {  # node → function
    "Relu": "relu", "LeakyRelu": "leaky_relu", "Prelu": "prelu", "Rrelu": "rrelu", "Tanh": "tanh", "Sigmoid": "sigmoid",
    "Gelu": "gelu", "Silu": "silu", "Mish": "mish", "Elu": "elu", "Hardtanh": "hardtanh", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "Softplus": "softplus", "LogSigmoidForward": "logsigmoid",
}  # fmt: skip
SEE = frozenset({  # a power of c goes in, and none comes out
    *ACTIVATIONS, "Softmax", "SafeSoftmax", "LogSoftmax", "MseLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
    "SmoothL1Loss", "HuberLoss",
}) - KEEP  # fmt: skip
NORMALIZE = frozenset({
    "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm",
})  # fmt: skip
DIGITS = 9  # of a degree: (x⁴⁹)^(1/49) has degree 1
UNEVEN = (  # saved by operations that their kind does not tell from homogeneous ones: quotients that are rounded, counts of entries
    ("_saved_rounding_mode", "floor"), ("_saved_rounding_mode", "trunc"), ("_saved_ord", 0),
)  # fmt: skip
ROOTS = {"Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1.0}


@dataclass(frozen=True)
class Scale:
    """Of a value, the weights (as bits) whose scale it shows, by how it shows them.

    powers: degree → weights. mixed: a power plus a constant, or in some entries only, which a later normalizer may take away.
    seen: otherwise.
    unknown: there was an operation without a rule. parameter: the weight whose own entries these are; leaf: no input but one.
    """

    powers: Mapping[float, int] = field(default_factory=dict)
    mixed: int = 0
    seen: int = 0
    unknown: int = 0
    parameter: int = 0
    leaf: bool = False

    @property
    def moved(self) -> int:
        return _union(self.powers.values())

    @property
    def shown(self) -> int:
        return self.moved | self.mixed | self.seen

    @property
    def any(self) -> int:
        return self.shown | self.unknown


CONSTANT = Scale(leaf=True)


def kind_of(node: Any) -> str:
    """AddmmBackward0 → Addmm; the name of a user's own autograd function, which has no number, stays whole."""
    return re.sub(r"Backward\d+$", "", node.name())


def scale_of(node: Any, operands: Sequence[Scale]) -> Scale:
    """Of what a node of the graph computed, from its operands."""
    kind = kind_of(node)
    first = operands[0] if operands else CONSTANT
    if any(getattr(node, name, None) == value for name, value in UNEVEN):
        return Scale(unknown=_union(operand.any for operand in operands))
    if kind in PRODUCTS or kind == "Mul":
        return product(operands)
    if kind == "Div" and len(operands) == 2:
        return product([first, raised(operands[1], -1.0)])
    if kind in SUMS:
        return total(operands if len(operands) > 1 else [first, CONSTANT])
    if kind in JOINS:
        return total(operands, apart=True)
    if kind in SUM_AND_PRODUCT and len(operands) == 3:
        return total([product(operands[1:]), first])
    if kind in PRODUCT_AND_BIAS and len(operands) == 3:
        without_bias = kind == "Convolution" and not sum(getattr(node, "_saved_bias_sym_sizes_opt", None) or ())
        return product(operands[:2]) if without_bias else total([product(operands[:2]), operands[2]])
    if kind.startswith("ScaledDotProduct") and len(operands) >= 3:
        return product([seen([*operands[:2], *operands[3:]]), operands[2]])
    if kind in ROOTS:
        return raised(first, ROOTS[kind])
    if kind == "Pow" and isinstance(exponent := getattr(node, "_saved_exponent", None), (int, float)):
        return raised(first, float(exponent))
    if kind in KEEP and not any(operand.any for operand in operands[1:]):
        kept = kind in RESHAPE
        return Scale(first.powers, first.mixed, first.seen, first.unknown, first.parameter if kept else 0, first.leaf and kept)
    if kind in NORMALIZE and normalizes(node):
        return normalized(first, operands[1:])
    if kind in NORMALIZE:
        unknown = first.unknown | _union(operand.any for operand in operands[1:])
        return _made({}, first.moved | first.mixed, first.seen, unknown)
    return seen(operands) if kind in SEE else Scale(unknown=_union(operand.any for operand in operands))


def factors(node: Any, operands: Sequence[Scale]) -> int:
    """The weights that multiply something else here."""
    chosen = operands if kind_of(node) in PRODUCTS else operands[1:] if kind_of(node) in SUM_AND_PRODUCT else operands[:2]
    relevant = kind_of(node) in PRODUCTS | SUM_AND_PRODUCT | PRODUCT_AND_BIAS
    return _union(operand.parameter for operand in chosen) if relevant else 0


def normalizes(node: Any) -> bool:
    """By its input's own statistics; with running ones it is a map x ↦ ax + b."""
    return kind_of(node) in NORMALIZE and getattr(node, "_saved_training", True) is not False


def normalized(value: Scale, others: Sequence[Scale] = ()) -> Scale:
    """others: what else the normalizer used, such as a γ that the network computes, in a way that is not followed."""
    return _made({}, 0, value.seen, value.unknown | value.mixed | _union(other.any for other in others))


def seen(operands: Sequence[Scale]) -> Scale:
    return _made({}, 0, _union(operand.shown for operand in operands), _union(operand.unknown for operand in operands))


def product(operands: Sequence[Scale]) -> Scale:
    """Degrees add up."""
    found = operands[0]
    for other in operands[1:]:
        powers: dict[float, int] = {}
        for degree, weights in (*found.powers.items(), (0.0, ~found.moved)):
            for more, others in (*other.powers.items(), (0.0, ~other.moved)):
                if (sum_of := round(degree + more, DIGITS)) and weights & others:
                    powers[sum_of] = powers.get(sum_of, 0) | weights & others
        found = _made(powers, found.mixed | other.mixed, found.seen | other.seen, found.unknown | other.unknown)
    return found


def total(operands: Sequence[Scale], apart: bool = False) -> Scale:
    """Degrees must agree. A leaf of another degree, such as a bias, only shifts the value. apart: they are joined, not added."""
    ordered = sorted(operands, key=lambda operand: operand.leaf)
    found = ordered[0]
    for other in ordered[1:]:
        powers = {degree: both for degree, weights in found.powers.items() if (both := weights & other.powers.get(degree, 0))}
        differ = (found.moved | other.moved) & ~_union(powers.values())
        found = _made(
            powers,
            found.mixed | other.mixed | (differ if other.leaf or apart else 0),
            found.seen | other.seen | (0 if other.leaf or apart else differ),
            found.unknown | other.unknown,
        )
    return found


def raised(value: Scale, exponent: float) -> Scale:
    """A root of a sum may be that of a normalizer, with its ε."""
    powers = {round(degree * exponent, DIGITS): weights for degree, weights in value.powers.items() if exponent}
    whole = exponent >= 1 and exponent.is_integer()
    return _made(powers, 0, value.seen | (value.mixed if whole else 0), value.unknown | (0 if whole else value.mixed))


def _made(powers: Mapping[float, int], mixed: int, seen: int, unknown: int) -> Scale:
    """Every weight in one place: where more is known to be unclear, less is said."""
    seen &= ~unknown
    mixed &= ~(unknown | seen)
    left = ~(unknown | seen | mixed)
    return Scale({degree: kept for degree, weights in powers.items() if (kept := weights & left)}, mixed, seen, unknown)


def _union(masks: Any) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found
