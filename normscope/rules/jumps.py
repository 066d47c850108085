"""Functions that jump: steps, comparisons, casts to integers. No finite constant exists where a jump can be reached."""

from __future__ import annotations

import torch

from normscope.core.interval import Interval
from normscope.graph.graph import Node
from normscope.rules.activations import homogeneity, number
from normscope.rules.algebra import Form, Forms, Lookup
from normscope.rules.registry import Context, Gain, Rule, register, rule

DECIDES = "its answer depends on the input's values, so the result may jump; give a region on which it is the same everywhere"


class Jump(Rule):
    """Its value jumps somewhere, wherever the inputs are."""

    def __init__(self, reason: str = "it jumps, so no finite constant exists") -> None:
        self.reason = reason

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.infinite(node, self.reason)

    def form(self, node: Node, forms: Forms) -> Form:
        power = homogeneity(node)
        return forms.opaque() if power is None else forms.entrywise(forms.of(node.input), power)


class StepRule(Jump):
    """A function of each entry that never decreases and takes whole numbers: constant on a region that stays between two jumps."""

    def gain(self, node: Node, context: Context) -> Gain:
        bounds = self.interval(node, context)
        if bounds.finite and torch.equal(bounds.low, bounds.high):
            return Gain.of(*(0 for _ in node.inputs), method="constant on the region")
        return super().gain(node, context)

    def terms(self, node: Node) -> float:
        return 1

    def interval(self, node: Node, context: Context) -> Interval:
        plain = len(node.inputs) == 1 and node.input is node.args[0] and not any(node.kwargs.values()) and len(node.args) == 1
        return context.interval(node.input).map(node.apply) if plain else Interval.unbounded(node.shape)


for _name in ("sign", "sgn", "floor", "ceil", "round", "trunc"):
    register(_name, StepRule())
for _name in ("frac", "hardshrink", "heaviside", "remainder", "fmod", "floor_divide"):
    register(_name, Jump())
for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
    "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "argmax", "argmin", "argsort", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit",
    "all", "any", "count_nonzero", "isin",
    "histc", "searchsorted", "bucketize", "one_hot", "grouped_mm",
):  # fmt: skip
    register(_name, Jump(DECIDES))
for _name in ("to", "_to_copy", "type_as"):  # between floating-point types they are identities, and no nodes of a graph
    register(_name, Jump("a cast to integers or truth values, or from them, jumps, so no finite constant exists"))


@rule("threshold")
class Threshold(Rule):
    """x where x > t, else v: continuous only if t = v, and then a clamp."""

    def form(self, node: Node, forms: Forms) -> Form:
        power = homogeneity(node)
        return forms.opaque() if power is None else forms.entrywise(forms.of(node.input), power)

    def gain(self, node: Node, context: Context) -> Gain:
        if number(node.args[1], 0.0) != number(node.args[2], 0.0):
            return Gain.infinite(node, "it jumps at its threshold, so no finite constant exists")
        return Gain.of(1, method="slope")


@rule("embedding")
class Embedding(Jump):
    """Rows of a table; where indices are computed from the input, as by vector quantization, it jumps from row to row."""

    def __init__(self) -> None:
        super().__init__(DECIDES)

    def form(self, node: Node, forms: Forms) -> Form:
        return Lookup((forms.of(node.args[0]),), node.shape, node=node)
