"""How much the float64 kernels of linear maps round, from the sizes of what they add: γ_n |W||x|, n the length of a sum.

Norms of W alone would cost a factor √n, and the readers' share of mixed stability (`certify/passing.py`), which products of gains
then carry through a whole network.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import replace

import torch

from normscope.core.rounding import gamma, length, summation_error
from normscope.graph.graph import Constant, Node
from normscope.rules.affine import with_absolute_constants
from normscope.rules.readings import LinearMap
from normscope.rules.registry import Gain, registry


def linear_map(node: Node) -> LinearMap | None:
    """A node that is a product with one constant weight, as it stands."""
    reading = registry.reading(node, LinearMap)
    return reading if reading is not None and reading.plain and reading.fixed else None


def matrix_of_tokens(node: Node) -> Node | None:
    """What a node reads, where it multiplies each vector along the last axis of that by one matrix."""
    product = linear_map(node)
    if product is None or product.kernel is not None or product.input_axis != -1:
        return None
    return node.input if node.input.shape[:-1] == node.shape[:-1] else None


def terms(reading: LinearMap) -> int:
    """The products that one output adds."""
    return math.prod(reading.weight.shape) // max(reading.channels, 1) + 1


def middle_error(node: Node, reading: LinearMap, middle: torch.Tensor) -> float:
    """How far (ℓ2) the node's computed value for this input can be from the exact one."""
    return float(length(summation_error(terms(reading), with_absolute_constants(node).apply(middle.abs()))))


def column_error(node: Node, reading: LinearMap, known: MutableMapping[object, Gain]) -> float:
    """How far (Frobenius) the node's columns can be from the exact ones, relative to those it reads: γ_n ‖|W|‖."""
    key = ("absolute", reading.key)
    if key not in known:
        assert isinstance(reading.weight, Constant)
        weight = Constant(reading.weight.double().abs(), reading.weight.sources)
        known[key] = Gain((replace(reading, weight=weight, bias=None).norm()[0],))
    return gamma(2 * terms(reading) + 8) * float(known[key].factors[0])
