"""A group of parameter changes that leave a model's outputs as they are: what it moves, and random elements of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

CHUNK = 64  # tangents that are made at once
Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Action:
    """What a group does to one parameter.

    members: for every entry the number of the subgroup that moves it, −1 for none; an array that broadcasts to the shape.
    degree: the exponent of c where the group scales, 1 where it shifts, ±1 where it acts by A or by its inverse transpose.
    """

    parameter: str
    shape: tuple[int, ...]
    members: np.ndarray
    degree: float = 1.0

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which members differ."""
        return tuple(axis for axis, size in enumerate(self.members.shape) if size > 1)

    @property
    def block(self) -> int:
        """How many consecutive indices share a member, where all members have as many in a row; else 1."""
        line = self.members.ravel()
        cuts = np.flatnonzero(np.diff(line)) + 1
        lengths = np.diff([0, *cuts, len(line)])
        whole = len(self.axes) == 1 and len(set(lengths.tolist())) == 1 and len(np.unique(line)) == len(lengths)
        return int(lengths[0]) if whole else 1

    @property
    def whole(self) -> bool:
        """Whether every entry of the parameter belongs to some member."""
        return bool((self.members >= 0).all())

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value per member → one per entry, 0 where there is no member; broadcasts to the parameter."""
        members = torch.tensor(self.members, device=values.device)
        return torch.where(members >= 0, values[members.clamp(min=0)], torch.zeros((), dtype=values.dtype, device=values.device))


@dataclass(frozen=True, eq=False)
class Group(ABC):
    """A family of one-parameter groups (or, for `linear`, of matrix groups) that leave every output as it is.

    count: its dimension. mode: "train" (batch statistics) or "eval" (running statistics). path: what proves it, from the
    parameter to what ends it. A parameter may be listed twice, where its rows and its columns move at once.
    """

    kind: str
    actions: tuple[Action, ...]
    count: int
    mode: str = "train"
    path: tuple[str, ...] = ()
    measure: Callable[[Group], float] | None = field(default=None, repr=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(action.parameter for action in self.actions)

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(action.axes for action in self.actions)

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(action.block for action in self.actions)

    @property
    def degrees(self) -> tuple[float, ...]:
        return tuple(action.degree for action in self.actions)

    @property
    def members(self) -> tuple[torch.Tensor, ...]:
        """For each parameter the number of the subgroup that moves an entry, −1 for none; broadcasts to its shape."""
        return tuple(torch.tensor(action.members) for action in self.actions)

    @property
    def whole(self) -> bool:
        """Whether every entry of every parameter listed belongs to a member."""
        return all(action.whole for action in self.actions)

    @cached_property
    def defect(self) -> float:
        """How far a random element moves the outputs on the example, relative to their size: what ε and rounding do."""
        return float("nan") if self.measure is None else self.measure(self)

    @abstractmethod
    def transform(self, parameters: Parameters, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        """The parameters moved by a random element of the group."""

    @abstractmethod
    def flowed(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters after each of the `count` one-parameter groups has run for the given time."""

    @abstractmethod
    def tangent(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        """How the parameters move when each of the `count` one-parameter groups starts at the given speed."""

    def directions(self, parameters: Parameters) -> torch.Tensor:
        """(count, entries) tangents of the orbit at the parameters, entries of `dict.fromkeys(group.parameters)` in a row."""
        units = torch.eye(self.count, dtype=parameters[self.parameters[0]].dtype)
        along = torch.func.vmap(lambda unit: self._row(self.tangent(parameters, unit)), chunk_size=CHUNK, randomness="same")
        return along(units)

    def _row(self, tangent: Parameters) -> torch.Tensor:
        return torch.cat([tangent[name].reshape(-1) for name in dict.fromkeys(self.parameters)])

    def _normal(self, parameters: Parameters, generator: torch.Generator | None) -> torch.Tensor:
        """A number for each of the `count` one-parameter groups."""
        return torch.randn(self.count, generator=generator, dtype=torch.float64).to(parameters[self.parameters[0]])


class Compensating(Protocol):
    """Moves the biases that follow a group, after a step and along a direction."""

    def __call__(self, moved: dict[str, torch.Tensor], parameters: Parameters, factors: Parameters) -> None: ...

    def tangent(self, tangent: dict[str, torch.Tensor], parameters: Parameters, rates: Parameters) -> None: ...


@dataclass(frozen=True, eq=False)
class ScaleGroup(Group):
    """θ → c^degree θ, one c per member: scale, joint-scale and rescale. compensation: of what constants then add."""

    compensation: Compensating | None = field(default=None, repr=False)

    def transform(self, parameters: Parameters, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        return self.flowed(parameters, 0.5 * self._normal(parameters, generator))

    def flowed(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.scaled(parameters, amounts)

    def scaled(self, parameters: Parameters, logs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters with each member scaled by the exponential of its number, and biases that follow moved along."""
        factors = {name: rate.exp() for name, rate in self._rates(logs).items()}
        moved = {**parameters, **{name: parameters[name] * factor for name, factor in factors.items()}}
        if self.compensation is not None:
            self.compensation(moved, parameters, factors)
        return moved

    def tangent(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        rates = self._rates(amounts)
        found = {name: parameters[name].detach() * rate for name, rate in rates.items()}
        if self.compensation is not None:
            self.compensation.tangent(found, parameters, rates)
        return found

    def _rates(self, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        """The logarithm of what each parameter is scaled by."""
        rates: dict[str, torch.Tensor] = {}
        for action in self.actions:
            rates[action.parameter] = rates.get(action.parameter, 0) + action.degree * action.spread(amounts)
        return rates


@dataclass(frozen=True, eq=False)
class ShiftGroup(Group):
    """θ → θ + t, one t per member: shift and weight-shift. normal: by what t is multiplied along an axis, if not by 1."""

    compensation: Compensating | None = field(default=None, repr=False)
    normal: Callable[[Parameters], torch.Tensor] | None = field(default=None, repr=False)

    def transform(self, parameters: Parameters, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        return self.flowed(parameters, self._normal(parameters, generator))

    def flowed(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        step = self.tangent(parameters, amounts)
        return {**parameters, **{name: parameters[name] + part for name, part in step.items()}}

    def tangent(self, parameters: Parameters, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {self.actions[0].parameter: self.speeds(parameters, amounts)}
        if self.compensation is not None:
            self.compensation.tangent(found, parameters, {})
        return found

    def speeds(self, parameters: Parameters, amounts: torch.Tensor) -> torch.Tensor:
        """The tangent of the first parameter, which no bias has a part in."""
        first = self.actions[0]
        step = first.spread(amounts) if self.normal is None else first.spread(amounts) * self.normal(parameters)
        return step.expand(first.shape)


def shift_kind(shape: tuple[int, ...]) -> str:
    """Of a bias, or of something with more than one axis."""
    return "weight-shift" if sum(size > 1 for size in shape) > 1 else "shift"
