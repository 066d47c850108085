"""Norms of J over sets of entries of a node, from Gram matrices to which its columns are added as they come."""

from __future__ import annotations

import math

import torch

from normscope.certify.columns import Linearized
from normscope.certify.ellipsoids import SMALL, Ellipsoids
from normscope.core.rounding import SUMMED, length
from normscope.graph.graph import Node
from normscope.operators.dense import gram_norms
from normscope.rules.remainder import Sets

LARGEST = 1100  # entries of a set up to which its norm is found
MOST_ENTRIES = 40_000_000  # of all matrices of one node
LITTLE = 3e9  # products that they may take, or,
SHARE, SINGLE_SHARE = 0.05, 0.4  # if that is more, this part of those of all linear maps; in single precision
BATCH, WAITING = 128, 1_000_000  # columns, or their entries, that are added in one go: a matrix may be larger than the cache
SINGLE_ROUNDOFF = 2.0**-24
SINGLE_LOST = 1e-30  # what products below 2^-126 take from sums of up to 10^7 of them, each factor at most 1


class Grams:
    """Of the sets of one node. single: whether columns are rounded to float32, which is several times as fast."""

    def __init__(self, node: Node, sets: Sets, single: bool) -> None:
        count = math.prod(node.shape) // sets.size
        self.sets, self.dtype, self.columns = sets, torch.float32 if single else torch.float64, 0
        self.grams = torch.zeros(count, sets.size, sets.size, dtype=self.dtype)
        self.waiting: list[torch.Tensor] = []

    @classmethod
    def wanted(cls, linearized: Linearized, node: Node, sets: Sets, columns: int) -> Grams | None:
        """In the precision that is affordable; None where neither is."""
        entries = math.prod(node.shape) * sets.size
        if not 0 < sets.size <= LARGEST or entries > MOST_ENTRIES:
            return None
        at_output = node is linearized.graph.output  # where the norm of J is most of the bound
        if at_output or entries * columns <= LITTLE or entries <= SHARE * linearized.products:
            return cls(node, sets, single=False)
        plain = torch.get_float32_matmul_precision() == "highest"  # else torch may compute in bfloat16
        return cls(node, sets, single=True) if plain and entries <= SINGLE_SHARE * linearized.products else None

    def add(self, columns: torch.Tensor) -> None:
        """columns: (columns, *shape)."""
        self.waiting.append(self.sets.split(columns).to(self.dtype))
        self.columns += len(columns)
        waiting = sum(map(len, self.waiting))
        if waiting >= BATCH or waiting * math.prod(columns.shape[1:]) >= WAITING:
            self._flush()

    def _flush(self) -> None:
        if self.waiting:
            rows = torch.cat(self.waiting).permute(1, 2, 0)
            self.grams.baddbmm_(rows, rows.mT)
            self.waiting = []

    def ellipsoids(self, lengths: torch.Tensor) -> Ellipsoids | None:
        """Around JΔx, ‖Δx‖ ≤ 1, at each set, as in `norms`; only in double precision."""
        self._flush()
        if self.dtype != torch.float64:
            return None
        sizes = length(self.sets.split(lengths), -1)
        return Ellipsoids(sizes, sizes, self.grams / sizes.clamp(min=SMALL)[:, None, None], self.columns)

    def norms(self, lengths: torch.Tensor) -> torch.Tensor:
        """Upper bounds, one per set. lengths: of the rows of J, entry by entry, (*shape)."""
        self._flush()
        split = self.sets.split(lengths)
        together = length(split, -1)
        if self.dtype == torch.float64:
            return torch.minimum(together, gram_norms(self.grams, self.columns))
        terms = (self.columns + 4) * SINGLE_ROUNDOFF  # a sum of products of rounded factors, in any order
        if terms >= 0.5 or not bool((split < 1e15).all()):
            return together
        found = gram_norms(self.grams.double(), 1)
        squares = found.square() + terms / (1 - terms) * together.square() + SINGLE_LOST * self.sets.size * (1 + together).square()
        return torch.minimum(together, (squares * SUMMED).sqrt() * SUMMED)
