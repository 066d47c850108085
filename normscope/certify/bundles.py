"""Columns of symbols that travel together, and what they add up to where they arrive: entry by entry, and set by set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.certify.ellipsoids import Ellipsoids, stretch
from normscope.certify.symbols import Symbols
from normscope.core.rounding import SQUARES_LOST, SUMMED
from normscope.rules.remainder import Sets


class Bundle(Protocol):
    """columns, everywhere: (columns, *shape) at some node, flat: the same as (columns, entries)."""

    def size(self, flat: torch.Tensor) -> float:
        """Σ_sets A ‖G_set‖_F."""

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        """Per entry Σ_u a_u |G_iu|, or Σ_sets A ‖G_i,set‖."""

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        """Per set of entries Σ_sets A ‖G_set there,set‖_F."""

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        """Around what arrives at each set of entries (`certify/ellipsoids.py`)."""


@dataclass
class Apart:
    """Some symbols of a node, whole sets if they can, one column each."""

    sizes: torch.Tensor
    limits: torch.Tensor  # A of each set
    member: torch.Tensor | None  # (sets, symbols): which symbol is in which; None where each is a set of its own

    @classmethod
    def of(cls, symbols: Symbols, chunk: slice) -> Apart:
        groups, sizes = symbols.groups[chunk], symbols.sizes[chunk]
        first, count = int(groups[0]), len(sizes)
        limits = symbols.group_sizes[first : int(groups[-1]) + 1]
        if symbols.single:
            return cls(sizes, limits, None)
        member = torch.zeros(len(limits), count, dtype=torch.float64)
        member[groups - first, torch.arange(count)] = 1.0
        return cls(sizes, limits, member)

    def size(self, flat: torch.Tensor) -> float:
        return float(self.limits @ self._norms(flat)) * SUMMED

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        found = self.sizes @ flat.abs()
        if self.member is None:
            return found
        return torch.minimum(found, self.limits @ ((self.member @ flat.square()).sqrt() + SQUARES_LOST))

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        return self.limits @ self._norms(sets.split(columns))

    def _norms(self, split: torch.Tensor) -> torch.Tensor:
        """Frobenius norms of blocks, (sets here, …), of (symbols, …, size)."""
        norms = torch.linalg.vector_norm(split, dim=-1) + SQUARES_LOST
        return norms if self.member is None else (self.member @ norms.square()).sqrt() + SQUARES_LOST

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        split = sets.split(columns)
        lengths = norms = self._norms(split)  # (sets here, sets there)
        if self.member is not None and bool((self.member.sum(1) == len(split) // len(norms)).all()):
            norms = stretch(split.reshape(len(norms), -1, *split.shape[1:]).permute(0, 2, 3, 1))
        weights = self.limits[:, None] / norms
        weights = weights if self.member is None else self.member.T @ weights
        scaled = split * weights.sqrt()[..., None]
        shapes = scaled.permute(1, 2, 0) @ scaled.transpose(0, 1)
        return Ellipsoids(self.limits @ norms, self.limits @ lengths, shapes, len(columns))


@dataclass
class Together:
    """All symbols of a node whose tokens have not met: column i has those of entry i of every token.

    owner: (entries,), the token whose columns alone reach each entry of the node that is looked at.
    """

    sizes: torch.Tensor  # (tokens, width)
    limits: torch.Tensor  # (tokens,), or (tokens, width) where each symbol is a set of its own
    owner: torch.Tensor

    def size(self, flat: torch.Tensor) -> float:
        return float(self._norms(flat[:, None], self.owner[None]).sum()) * SUMMED

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        found = (self.sizes.T[:, self.owner] * flat.abs()).sum(0)
        if self.limits.dim() == 2:
            return found
        return torch.minimum(found, self.limits[self.owner] * ((flat * flat).sum(0).sqrt() + SQUARES_LOST))

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        return self._norms(*self._split(columns, sets)).sum(1) * SUMMED

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        split, owners = self._split(columns, sets)
        if not _single(owners):  # a ball
            found, sizes = Ellipsoids.none(columns.shape[1:], sets), self.sets(columns, sets)
            found.add_scaled(torch.ones(len(sizes), sets.size, dtype=torch.float64), sizes[:, None])
            return found
        lengths = norms = torch.linalg.vector_norm(split, dim=-1).T + SQUARES_LOST  # (sets, width)
        if self.limits.dim() == 1:
            lengths, norms = (part[:, None] for part in (torch.linalg.vector_norm(lengths, dim=1), stretch(split.permute(1, 2, 0))))
        limits = self.limits.reshape(len(self.limits), -1)[owners[:, 0]]
        scaled = split.permute(1, 2, 0) * (limits / norms).sqrt()[:, None]  # (sets, entries, width)
        return Ellipsoids((limits * norms).sum(1), (limits * lengths).sum(1), scaled @ scaled.mT, len(columns))

    def _split(self, columns: torch.Tensor, sets: Sets) -> tuple[torch.Tensor, torch.Tensor]:
        """(width, sets, size), and the owners (sets, size)."""
        return sets.split(columns), sets.split(self.owner.reshape(columns.shape[1:]))

    def _norms(self, split: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """A ‖G_set there,set‖_F for every set there and, in the columns, every set of symbols."""
        tokens, count = len(self.sizes), len(owners)
        limits = self.limits.reshape(tokens, -1).T  # (width or 1, tokens)
        squares = split * split
        squares = squares.sum(0, keepdim=True) if len(limits) == 1 else squares
        if _single(owners):
            return (limits[:, owners[:, 0]] * (squares.sum(-1).sqrt() + SQUARES_LOST)).T
        blocks = (owners + tokens * torch.arange(count)[:, None]).reshape(-1)
        found = torch.zeros(len(squares), count * tokens, dtype=torch.float64).index_add_(1, blocks, squares.flatten(1))
        norms = found.sqrt().reshape(-1, count, tokens) + SQUARES_LOST
        return (norms * limits[:, None]).transpose(0, 1).reshape(count, -1)

    def apart(self, columns: torch.Tensor, token: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """The columns of some of the symbols, one each: of these entries of these tokens."""
        flat = columns.reshape(len(columns), -1)
        return torch.where(self.owner == token[:, None], flat[entry], 0.0).reshape(-1, *columns.shape[1:])


def _single(owners: torch.Tensor) -> bool:
    """Whether every set, (sets, size), has one owner."""
    return bool((owners == owners[:, :1]).all())
