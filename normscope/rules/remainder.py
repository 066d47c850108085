"""What a node's linear part leaves out on a region, entry by entry and set by set.

Between any two points of a region a node's value changes by its linear part A (the derivative at the computed middle, or a slope
per entry) times the change of what it reads, plus a remainder scale ⊙ ε, where |ε_u| ≤ entries_u, and ‖ε‖₂ over each of some
sets of entries (a token, a group of channels) is at most a number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.core.rounding import UNDERFLOW, above, length
from normscope.graph.graph import Node, Shape

LinearPart = Callable[[torch.Tensor], torch.Tensor]  # (columns, *shape of the only input) → (columns, *shape)


@dataclass(frozen=True)
class Sets:
    """The entries of a tensor in sets of one size: its axes in `order`, then cut into pieces of `size` entries."""

    order: tuple[int, ...]
    size: int

    @classmethod
    def along(cls, shape: Shape, axes: Sequence[int]) -> Sets:
        """One set for every place of the other axes."""
        inner = [axis % len(shape) for axis in axes]
        return cls((*(axis for axis in range(len(shape)) if axis not in inner), *inner), math.prod(shape[axis] for axis in inner))

    @classmethod
    def whole(cls, shape: Shape) -> Sets:
        return cls(tuple(range(len(shape))), max(math.prod(shape), 1))

    def within(self, others: Sets) -> bool:
        """Whether each of the others is cut into several of these, in order."""
        return self.order == others.order and 1 < self.size < others.size and others.size % self.size == 0

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """(…, *shape) → (…, sets, size)."""
        leading = values.dim() - len(self.order)
        moved = values.permute([*range(leading), *(leading + axis for axis in self.order)])
        return moved.reshape(*values.shape[:leading], -1, self.size)

    def spread(self, values: torch.Tensor, shape: Shape) -> torch.Tensor:
        """One number per set → one per entry."""
        moved = values[:, None].expand(-1, self.size).reshape([shape[axis] for axis in self.order])
        return moved.permute([self.order.index(axis) for axis in range(len(shape))])


@dataclass(frozen=True)
class Multiples:
    """ε_u = δ_u Σ_k weights_uk Δy_places_uk with least_u ≤ δ_u ≤ most_u, y the only input; `known` says for which u.

    places: (entries, k), of y laid flat. weights: the same shape. least, most: within [−1, 1].
    """

    places: torch.Tensor
    weights: torch.Tensor
    known: torch.Tensor
    least: torch.Tensor
    most: torch.Tensor


class Sizes(Protocol):
    """How large something about every node is: its distance from the computed middle, or its change per distance of inputs.

    chords: whether linear parts are those that `Rule.linear_part` gives for the distances from the middle.
    """

    chords: bool

    def entries(self, node: Node) -> torch.Tensor:
        """Entry by entry."""

    def sets(self, node: Node, sets: Sets) -> torch.Tensor:
        """In ℓ2 over each set; only for sets that `Rule.measured` names, and for the whole node."""

    def seen(self, node: Node) -> Node | None:
        """What stands for a linear map of all that attention reads, and can be asked for like a node; None where there is none.

        √p times the change of each logit s(Δq·k̂ + q̂·Δk) less its mean with the weights p, all at the middle; its sets are the keys
        of a query.
        """


@dataclass(frozen=True)
class Remainder:
    """e = scale ⊙ ε, |ε| ≤ entries, and ‖ε over a set‖₂ ≤ the number that belongs to it."""

    scale: torch.Tensor
    entries: torch.Tensor
    sets: tuple[Sets, torch.Tensor] | None = None

    def twice(self, most: float) -> Remainder:
        """The difference of two of them, of which the second is at most `most` in ℓ2."""
        more = torch.minimum(self.entries, above(most / self.scale.clamp(min=UNDERFLOW)))
        more = torch.where(self.scale > 0, more, 0.0)  # else nothing is left out there
        sets = self.sets
        if sets is not None:
            sets = sets[0], above(sets[1] + torch.minimum(sets[1], length(sets[0].split(more), -1)))
        return Remainder(self.scale, above(self.entries + more), sets)
