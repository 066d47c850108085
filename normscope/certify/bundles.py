"""Columns of symbols that travel together, and what they add up to where they arrive: entry by entry, and set by set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.certify.ellipsoids import Ellipsoids
from normscope.certify.symbols import SUMMED, Symbols
from normscope.core.rounding import SQUARES_LOST
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
        norms = torch.linalg.vector_norm(flat, dim=1) + SQUARES_LOST
        norms = norms if self.member is None else (self.member @ norms.square()).sqrt() + SQUARES_LOST
        return float(self.limits @ norms) * SUMMED

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        found = self.sizes @ flat.abs()
        if self.member is None:
            return found
        return torch.minimum(found, self.limits @ ((self.member @ flat.square()).sqrt() + SQUARES_LOST))

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        return self.limits @ self._norms(sets.split(columns))

    def _norms(self, split: torch.Tensor) -> torch.Tensor:
        """Frobenius norms of blocks, (sets here, sets there), of (symbols, sets there, size)."""
        norms = torch.linalg.vector_norm(split, dim=-1) + SQUARES_LOST
        return norms if self.member is None else (self.member @ norms.square()).sqrt() + SQUARES_LOST

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        split = sets.split(columns)
        norms = self._norms(split)
        weights = self.limits[:, None] / norms  # (sets here, sets there)
        weights = weights if self.member is None else self.member.T @ weights
        scaled = split * weights.sqrt()[..., None]
        shapes = scaled.permute(1, 2, 0) @ scaled.transpose(0, 1)
        return Ellipsoids(self.limits @ norms, shapes, len(columns))


@dataclass
class Together:
    """All symbols of a node on which tokenwise nodes alone have acted: column i has those of entry i of every token."""

    sizes: torch.Tensor  # (tokens, width)
    limits: torch.Tensor  # (tokens,), or (tokens, width) where each symbol is a set of its own

    def _split(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.reshape(len(columns), len(self.sizes), -1)  # (width, tokens, entries of a token)

    def size(self, flat: torch.Tensor) -> float:
        return float(self._per_token(self._split(flat)).sum()) * SUMMED

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        split = self._split(flat)
        found = torch.einsum("ti,itj->tj", self.sizes, split.abs())
        if self.limits.dim() == 1:
            rows = split.square().sum(0).sqrt() + SQUARES_LOST
            found = torch.minimum(found, self.limits[:, None] * rows)
        return found.reshape(-1)

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        """A set that is not a token gets what all tokens add."""
        split = self._split(columns)
        found = self._per_token(split)
        if self._are_tokens(columns, sets):
            return found
        return found.sum().expand(math.prod(columns.shape[1:]) // sets.size) * SUMMED

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        split = self._split(columns)
        if not self._are_tokens(columns, sets):
            found, sizes = Ellipsoids.none(columns.shape[1:], sets), self.sets(columns, sets)
            found.add_scaled(torch.ones(len(sizes), sets.size, dtype=torch.float64), sizes[:, None])
            return found
        norms, limits = self._norms(split), self.limits if self.limits.dim() == 2 else self.limits[:, None]
        scaled = split.permute(1, 2, 0) * (limits / norms).sqrt()[:, None]  # (tokens, entries, width)
        return Ellipsoids((limits * norms).sum(1), scaled @ scaled.mT, len(columns))

    @staticmethod
    def _are_tokens(columns: torch.Tensor, sets: Sets) -> bool:
        return sets == Sets(tuple(range(columns.dim() - 1)), columns.shape[-1])

    def _norms(self, split: torch.Tensor) -> torch.Tensor:
        """Frobenius norms of blocks: (tokens, 1), or (tokens, width) where each symbol is a set of its own."""
        norms = torch.linalg.vector_norm(split, dim=-1).T + SQUARES_LOST
        return norms if self.limits.dim() == 2 else torch.linalg.vector_norm(norms, dim=1, keepdim=True)

    def _per_token(self, split: torch.Tensor) -> torch.Tensor:
        limits = self.limits if self.limits.dim() == 2 else self.limits[:, None]
        return (limits * self._norms(split)).sum(1) * SUMMED

    def apart(self, columns: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The columns of some of the symbols, one each."""
        split = self._split(columns)
        symbols = torch.arange(chunk.start, chunk.stop)
        token, entry = symbols // len(split), symbols % len(split)
        made = split.new_zeros(len(symbols), *split.shape[1:])
        made[torch.arange(len(symbols)), token] = split[entry, token]
        return made.reshape(-1, *columns.shape[1:])
