"""Evaluations in which every rounding is drawn at random: what they change is what rounding can change, to first order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from normscope.graph.graph import Evaluate, Node

LENGTH = 100_003  # a prime, so that no axis of a tensor falls in step with it

CANCELLING = ("tanhshrink", "gelu")  # their kernels subtract values of the size of the input from each other


def perturbed(noise: Callable[[Any], Any]) -> Evaluate:
    """How `Graph.run` computes a node with `noise` on every value each time it is read, and on every result."""

    def evaluate(node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
        result = noise(node.evaluate(values, dtype, noise))
        if node.op in CANCELLING:
            result = result + (noise(values[node.input]) - values[node.input])
        return result

    return evaluate


class Noise:
    """Normal numbers, for large tensors at the cost of a copy: stretches of one row of numbers, each from a random place on."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    @cached_property
    def row(self) -> torch.Tensor:
        return torch.randn(LENGTH, generator=self.generator, dtype=torch.float64)

    def __call__(self, shape: Sequence[int]) -> torch.Tensor:
        count = math.prod(shape)
        if count < LENGTH:
            return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        row, start = self.row, int(torch.randint(LENGTH, (1,), generator=self.generator))
        return row.repeat((start + count) // LENGTH + 1)[start : start + count].reshape(shape)

    def rounding(self, value: Any, unit: float) -> Any:
        """The value, off by about `unit` of itself in every entry, where it is a tensor of floating-point numbers."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value * self(value.shape).mul_(unit).add_(1).to(value)
