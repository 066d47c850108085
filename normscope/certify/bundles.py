"""Columns of symbols that travel together, and what they add up to where they arrive: entry by entry, and set by set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.certify.ellipsoids import Ellipsoids
from normscope.certify.symbols import SUMMED, Symbols
from normscope.core.rounding import SQUARES_LOST, length
from normscope.operators.dense import gram_norms
from normscope.rules.remainder import Sets

LARGE = 0.3  # of the largest block of a chunk, beyond which the norm of a block is found exactly
TINY = 1e-140  # Frobenius norms below which squares of squares say nothing


class Bundle(Protocol):
    """columns, everywhere: (columns, *shape) at some node, flat: the same as (columns, entries)."""

    def size(self, flat: torch.Tensor) -> float:
        """Σ_sets A ‖G_set‖_F."""

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        """Per entry Σ_u a_u |G_iu|, or Σ_sets A ‖G_i,set‖."""

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        """Per set of entries a bound on Σ_sets A ‖G_set there,set‖."""

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        """Around what arrives at each set of entries (`certify/ellipsoids.py`)."""


@dataclass
class Apart:
    """Some symbols of a node, whole sets if they can, one column each."""

    sizes: torch.Tensor
    limits: torch.Tensor  # A of each set
    member: torch.Tensor | None  # (sets, symbols): which symbol is in which; None where each is a set of its own
    each: int = 0  # symbols of every set, if they are as many in all

    @classmethod
    def of(cls, symbols: Symbols, chunk: slice) -> Apart:
        groups, sizes = symbols.groups[chunk], symbols.sizes[chunk]
        first, count = int(groups[0]), len(sizes)
        limits = symbols.group_sizes[first : int(groups[-1]) + 1]
        if symbols.single:
            return cls(sizes, limits, None, 1)
        member = torch.zeros(len(limits), count, dtype=torch.float64)
        member[groups - first, torch.arange(count)] = 1.0
        counts = member.sum(1).unique()
        return cls(sizes, limits, member, int(counts[0]) if len(counts) == 1 else 0)

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
        split = sets.split(columns)  # (symbols, sets there, size)
        norms = torch.linalg.vector_norm(split, dim=-1) + SQUARES_LOST
        if self.member is not None:
            norms = (self.member @ norms.square()).sqrt() + SQUARES_LOST  # Frobenius, (sets here, sets there)
            if self.each and min(self.each, sets.size) > 1:
                blocks = split.reshape(-1, self.each, *split.shape[1:]).permute(0, 2, 1, 3)
                norms = block_norms(blocks.reshape(-1, self.each, sets.size), norms.reshape(-1)).reshape(norms.shape)
        return self.limits @ norms

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        split = sets.split(columns)
        norms = torch.linalg.vector_norm(split, dim=-1) + SQUARES_LOST
        if self.member is not None:
            norms = (self.member @ norms.square()).sqrt() + SQUARES_LOST
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
        return float(self._per_token(self._split(flat), exact=False).sum()) * SUMMED

    def entries(self, flat: torch.Tensor) -> torch.Tensor:
        split = self._split(flat)
        found = torch.einsum("ti,itj->tj", self.sizes, split.abs())
        if self.limits.dim() == 1:
            rows = split.square().sum(0).sqrt() + SQUARES_LOST
            found = torch.minimum(found, self.limits[:, None] * rows)
        return found.reshape(-1)

    def sets(self, columns: torch.Tensor, sets: Sets) -> torch.Tensor:
        """A set that is not a token gets what all tokens add."""
        rank, split = columns.dim() - 1, self._split(columns)
        found = self._per_token(split, exact=True)
        if sets == Sets(tuple(range(rank)), split.shape[-1]):
            return found
        return found.sum().expand(math.prod(columns.shape[1:]) // sets.size)

    def ellipsoids(self, columns: torch.Tensor, sets: Sets) -> Ellipsoids:
        """Of sets that are tokens."""
        split = self._split(columns)
        norms = torch.linalg.vector_norm(split, dim=-1).T + SQUARES_LOST  # (tokens, width)
        limits = self.limits
        if limits.dim() == 1:
            norms, limits = torch.linalg.vector_norm(norms, dim=1, keepdim=True), limits[:, None]
        scaled = split.permute(1, 2, 0) * (limits / norms).sqrt()[:, None]  # (tokens, entries, width)
        return Ellipsoids((limits * norms).sum(1), scaled @ scaled.mT, len(columns))

    def _per_token(self, split: torch.Tensor, exact: bool) -> torch.Tensor:
        norms = torch.linalg.vector_norm(split, dim=-1).T + SQUARES_LOST  # (tokens, width)
        if self.limits.dim() == 2:
            return (self.limits * norms).sum(1) * SUMMED
        whole = torch.linalg.vector_norm(norms, dim=1)
        if exact and min(split.shape[0], split.shape[2]) > 1:
            whole = block_norms(split.permute(1, 0, 2), whole)
        return self.limits * whole

    def apart(self, columns: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The columns of some of the symbols, one each."""
        split = self._split(columns)
        symbols = torch.arange(chunk.start, chunk.stop)
        token, entry = symbols // len(split), symbols % len(split)
        made = split.new_zeros(len(symbols), *split.shape[1:])
        made[torch.arange(len(symbols)), token] = split[entry, token]
        return made.reshape(-1, *columns.shape[1:])


def block_norms(blocks: torch.Tensor, frobenius: torch.Tensor) -> torch.Tensor:
    """Bounds on ‖B‖ of each of (blocks, rows, columns): ‖BBᵀ‖_F^½, of large ones the norm itself."""
    small = blocks if blocks.shape[1] <= blocks.shape[2] else blocks.mT
    grams = small @ small.mT
    squares = frobenius.clamp(min=TINY).square()
    found = torch.where(frobenius > TINY, frobenius * (length(grams.flatten(1), 1) / squares).sqrt() * SUMMED, frobenius)
    found = torch.minimum(found, frobenius)
    large = (found > LARGE * found.max()).nonzero().reshape(-1)
    found[large] = torch.minimum(found[large], gram_norms(grams[large], max(blocks.shape[1:])))
    return found
