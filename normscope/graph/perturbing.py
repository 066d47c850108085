"""Evaluations in which every rounding is drawn at random: what they change is what rounding can change, to first order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from normscope.graph.graph import Evaluate, Node

CANCELLING = ("tanhshrink", "gelu")  # their kernels subtract values of the size of the input from each other


def perturbed(noise: Callable[[Any], Any]) -> Evaluate:
    """How `Graph.run` computes a node with `noise` on every value each time it is read, and on every result."""

    def evaluate(node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
        result = noise(node.evaluate(values, dtype, noise))
        if node.op in CANCELLING:
            result = result + (noise(values[node.input]) - values[node.input])
        return result

    return evaluate
