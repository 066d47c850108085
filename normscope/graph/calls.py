"""Calls of a model like a given one, several calls as one, and what of an output belongs to one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from normscope.core.data import Call


def part(place: int, count: int, together: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
    """What belongs to one of the samples; all of it where no axis grows with the batch."""
    if together.shape == alone.shape or together.dim() != alone.dim():
        return together
    grown = [axis for axis in range(alone.dim()) if together.shape[axis] != alone.shape[axis]]
    axis = grown[0]
    return (
        together.narrow(axis, place * alone.shape[axis], alone.shape[axis])
        if _is_stacked(together, alone, grown, count)
        else together
    )


def _is_stacked(together: torch.Tensor, alone: torch.Tensor, grown: list[int], count: int) -> bool:
    return len(grown) == 1 and together.shape[grown[0]] == count * alone.shape[grown[0]]


def together(calls: Sequence[Call]) -> Call:
    """Calls of one sample each as one call of several."""

    def cat(*values: Any) -> Any:
        return torch.cat(values) if isinstance(values[0], torch.Tensor) and values[0].dim() else values[0]

    args = tuple(cat(*values) for values in zip(*(call.args for call in calls), strict=True))
    return Call(args, {name: cat(*(call.kwargs[name] for call in calls)) for name in calls[0].kwargs})


def others(call: Call) -> list[Call]:
    """Three calls like the given one: around it, much smaller and much larger in its floating-point inputs."""
    generator = torch.Generator().manual_seed(0)

    def moved(value: Any, center: float, factor: float) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            return value
        middle = value.nan_to_num(0, 0, 0)
        size = float(middle.detach().abs().max()) if middle.numel() else 1.0
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        return center * middle + factor * (size or 1.0) * noise

    settings = ((1.0, 0.3), (0.0, 1e-2), (1.0, 5.0))
    return [
        Call(
            tuple(moved(value, *setting) for value in call.args),
            {name: moved(value, *setting) for name, value in call.kwargs.items()},
        )
        for setting in settings
    ]


def scaled(call: Call, factor: float) -> Call:
    """The call with its floating-point inputs times a factor, in float64."""

    def one(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return factor * value.double().nan_to_num(1, 1, 1) if floating else value

    return Call(tuple(map(one, call.args)), {name: one(value) for name, value in call.kwargs.items()})
