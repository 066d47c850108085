"""What tables of cases are made of: a case, tensors and functions that several cases use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tests.networks import Function, randn


@dataclass(frozen=True)
class Case:
    """A module and the example it is traced on; upper ≤ slack · lower."""

    module: nn.Module
    example: Tensor
    mode: str = "eval"
    slack: float = 1.1
    effort: float = 1.0


attention = functional.scaled_dot_product_attention
aten = torch.ops.aten  # what no public function of torch calls, but an exported program may hold
Maker = Callable[[Tensor], Tensor] | nn.Module


def on(shape: tuple[int, ...], table: Mapping[str, Maker], mode: str = "eval") -> dict[str, Case]:
    """Cases that share the shape of their input."""
    return {
        op: Case(made if isinstance(made, nn.Module) else Function(made), randn(*shape, seed=i), mode)
        for i, (op, made) in enumerate(table.items())
    }


def within(low: float, high: float, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of values that are bounded first, with slope 1 inside."""
    return lambda x: function(functional.hardtanh(x, low, high))


MATRIX, VECTOR, BATCHED, FORM = randn(5, 4), randn(4), randn(1, 4, 2), randn(2, 4, 3)
LINE = randn(3, 2, 3)
TURNED = torch.tensor([[[0.9, 0.3, 0.1], [0.1, 0.7, -0.2]]])
GRID = functional.affine_grid(TURNED, [1, 1, 4, 4], align_corners=False)
VOLUME_GRID = torch.linspace(-0.9, 0.8, 24).reshape(1, 2, 2, 2, 3)
MASK, POSITIONS = torch.tensor([True, False, True, True]), torch.tensor([0, 2, 3, 1])

ZEROS = torch.zeros(3, dtype=torch.long)


def affine(normalizer: nn.Module) -> nn.Module:
    """A normalizer with γ and β of its own."""
    nn.init.normal_(normalizer.weight, generator=torch.Generator().manual_seed(0))
    return normalizer


def running(normalizer: nn.Module) -> nn.Module:
    """A normalizer with running statistics of its own."""
    normalizer.running_var.copy_(torch.linspace(0.2, 3, len(normalizer.running_var)))
    return normalizer


# Attention with one operand that varies: each law is reached where the others are as bad as they can be.
KEYS, VALUES, QUERIES = torch.tensor([[[3.0], [-3.0]]]), torch.tensor([[[2.0], [-2.0]]]), torch.full((1, 3, 1), 5.0)
ANGLES = torch.linspace(0, 3, 8).reshape(2, 4)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding: x cos + (−x₂, x₁) sin, the angles those of the position and the plane."""
    left, right = x.chunk(2, -1)
    angles = ANGLES[:, :2].repeat(1, 2)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def tripled(tensors: list[Tensor]) -> list[Tensor]:
    torch._foreach_mul_(tensors, 3.0)
    return tensors
