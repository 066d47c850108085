"""Random choices that makers of operations share: axes, numbers, indices, masks and slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.networks import Draw

Step = Callable[[Tensor], Tensor]
Joint = Callable[[Tensor, Tensor], Tensor]
Parameter = Callable[..., Callable[[], Tensor]]  # a shape → the accessor of a parameter of that shape
Maker = Callable[[Draw, Tensor, Parameter], Step]


def any_axis(draw: Draw, x: Tensor) -> int:
    """An axis that is not the batch, counted from the front or from the back."""
    axis = draw(*range(1, x.dim()))
    return axis if draw.chance(0.5) else axis - x.dim()


def any_number(draw: Draw) -> float:
    """A factor: mostly ordinary, at times zero, one, tiny or huge."""
    return draw(0.5, -2.0, 3.0, 1.0, -1.0, 0.0, draw.power_of_ten(-2, 2), -draw.power_of_ten(-12, 12), draw.power_of_ten(-170, 170))


def any_indices(draw: Draw, size: int, count: int | None = None) -> Tensor:
    count = draw.integer(1, 2 * size) if count is None else count
    return torch.randint(0, size, (count,), generator=draw.generator)


def any_mask(draw: Draw, x: Tensor) -> Tensor:
    return torch.rand(x.shape[1:], generator=draw.generator) < draw(0.2, 0.5, 0.9)


def any_slice(draw: Draw, size: int) -> slice:
    start = draw(*range(size))
    return slice(start, draw(*range(start + 1, size + 1)), draw(1, 1, 1, 2, 3))
