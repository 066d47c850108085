"""What geometry reads of the groups of `ns.symmetries`: which entries of which parameters move together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

SCALES = ("scale", "joint-scale", "rescale")  # θ → c^degree θ
SHIFTS = ("shift", "weight-shift")  # θ → θ + t

Tensors = Mapping[str, torch.Tensor]


class SymmetryGroup(Protocol):
    """A family of `count` one-parameter groups; all but `kind` and `count` have one entry for each parameter."""

    @property
    def kind(self) -> str: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def axes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...
    @property
    def degrees(self) -> tuple[float, ...]: ...
    @property
    def count(self) -> int: ...
    def tangent(self, parameters: Tensors, amounts: torch.Tensor) -> dict[str, torch.Tensor]: ...
    def scaled(self, parameters: Tensors, logs: torch.Tensor) -> dict[str, torch.Tensor]: ...  # where it scales
    def directions(self, parameters: Tensors) -> torch.Tensor: ...


class Symmetries(Protocol):
    """A report of `ns.symmetries`, as far as geometry reads it."""

    @property
    def groups(self) -> Sequence[Any]: ...


def members(group: SymmetryGroup, parameters: Tensors) -> list[torch.Tensor]:
    """For each parameter the number of the one-parameter group that moves an entry, −1 for none; broadcasts to its shape.

    A group that says so itself, by `members`, is believed; else it is what axes and blocks describe.
    """
    return list(getattr(group, "members", None) or described_members(group, parameters))


def described_members(group: SymmetryGroup, parameters: Tensors) -> list[torch.Tensor]:
    """Members as axes and blocks number them: in the order of the axes, `block` indices at a time."""
    found = []
    for name, axes, block in zip(group.parameters, group.axes, group.blocks, strict=True):
        shape = parameters[name].shape
        axes = tuple(axis % len(shape) for axis in axes)
        sizes = [shape[axis] for axis in axes]
        numbers = torch.arange(math.prod(sizes)).reshape(sizes) // block
        ordered = numbers.permute(sorted(range(len(axes)), key=axes.__getitem__))
        found.append(ordered.reshape([size if axis in axes else 1 for axis, size in enumerate(shape)]))
    return found


def self_contained(group: SymmetryGroup, parameters: Tensors) -> bool:
    """Whether all that moves are members: no bias, listed without any, has to take something back."""
    return all(bool((numbers >= 0).any()) for numbers in members(group, parameters))


def shift_speeds(group: SymmetryGroup, parameters: Tensors) -> torch.Tensor:
    """How fast each entry of the first parameter moves with its member: 1, but for shifts that a scale stands before.

    A group that says so itself, by `speeds`, is believed; else its tangent tells, with all that a bias has to take back.
    """
    double = {name: tensor.detach().double() for name, tensor in parameters.items()}
    ones = torch.ones(group.count, dtype=torch.float64)
    said = getattr(group, "speeds", None)
    return group.tangent(double, ones)[group.parameters[0]] if said is None else said(double, ones)


def by_member(numbers: torch.Tensor, entries: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of the entries of each member, (count,), in float64."""
    inside = torch.where(numbers >= 0, entries.double(), 0.0)
    index = numbers.clamp(min=0).expand(entries.shape)
    return torch.zeros(count, dtype=torch.float64).index_add_(0, index.reshape(-1), inside.reshape(-1))


def log_by_member(numbers: torch.Tensor, logs: torch.Tensor, count: int) -> torch.Tensor:
    """log Σ exp of the entries of each member, (count,), without overflow; −∞ where there is none."""
    inside = torch.where(numbers >= 0, logs, -torch.inf)
    index = numbers.clamp(min=0).expand(logs.shape).reshape(-1)
    largest = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, index, inside.reshape(-1), "amax")
    largest = largest.nan_to_num(neginf=0.0)
    return largest + by_member(numbers, (inside - spread(numbers, largest)).exp(), count).log()


def norm_by_member(numbers: torch.Tensor, entries: torch.Tensor, count: int) -> torch.Tensor:
    """√Σ entry² of each member, (count,), without overflow."""
    return (log_by_member(numbers, 2 * entries.double().abs().log(), count) / 2).exp()


def spread(numbers: torch.Tensor, values: torch.Tensor, elsewhere: float = 0.0) -> torch.Tensor:
    """One value per member → one per entry; broadcasts to the parameter."""
    return torch.where(numbers >= 0, values[numbers.clamp(min=0)], elsewhere)


def charges(group: SymmetryGroup, parameters: Tensors) -> torch.Tensor:
    """Q = Σ d ‖w‖² of each member, d the degrees: what gradient flow conserves, ‖w‖² for a scale-free vector.

    The loss does not change along the orbit, so Σ d ⟨w, ∇L⟩ = 0 and dQ/dt = −2 Σ d ⟨w, ∇L⟩ = 0. For self-contained groups only.
    """
    total = torch.zeros(group.count, dtype=torch.float64)
    for name, numbers, degree in zip(group.parameters, members(group, parameters), group.degrees, strict=True):
        total += degree * by_member(numbers, parameters[name].detach().double().square(), group.count)
    return total
