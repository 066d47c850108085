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
    """How `Graph.run` computes a node with `noise` on every value each time it is read, and on every result.

    Whole numbers that depend on answers alone, such as how many tokens go to an expert, are exact: what is counted is not rounded.
    """
    counts: dict[Node, bool] = {}

    def evaluate(node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
        counts[node] = bool(node.inputs) and all(_is_whole_type(source) or counts.get(source, False) for source in node.inputs)
        if counts[node] and _are_whole(plain := node.evaluate(values, dtype)):
            return plain
        result = noise(node.evaluate(values, dtype, noise))
        if node.op in CANCELLING:
            result = result + (noise(values[node.input]) - values[node.input])
        return result

    return evaluate


def _is_whole_type(node: Node) -> bool:
    return node.dtype is not None and not node.dtype.is_floating_point and not node.dtype.is_complex


def _are_whole(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return all(map(_are_whole, result))
    return isinstance(result, torch.Tensor) and (not result.is_floating_point() or bool((result == result.round()).all()))


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

    def rounding(self, value: Any, unit: float, least: float) -> Any:
        """The value, where it is a tensor of floating-point numbers: in every entry off by about `unit` of itself, and by `least`.

        By no more than itself, though: 0 is exact.
        """
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        lost = least / value.abs().clamp_(min=least)
        return value * self(value.shape).to(value).mul_(lost.add_(unit)).add_(1)


def roundoff(dtype: torch.dtype) -> tuple[float, float]:
    """By how much a type rounds: the unit roundoff, relative to a number, and what may be lost below the type's range.

    There kernels take numbers for 0, but those of half precision, which keep some digits of them.
    """
    limits = torch.finfo(dtype)
    return limits.eps / 2, limits.tiny * (limits.eps if dtype == torch.float16 else 1)
