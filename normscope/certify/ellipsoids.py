"""Ellipsoids around sums of columns: what arrives at a set of entries from all symbols, as one vector of known shape.

With ζ = Σ_j B_j η_j, ‖η_j‖ ≤ A_j, and any p_j > 0, every v has

    (vᵀζ)² ≤ (Σ_j A_j ‖B_jᵀv‖)² ≤ (Σ_j p_j) (Σ_j A_j² vᵀB_jB_jᵀv / p_j),

so ζ = Pη with ‖η‖ ≤ 1 for every P with PPᵀ ⪰ S·Q, S = Σp_j, Q = Σ(A_j²/p_j) B_jB_jᵀ. With p_j = A_j ‖B_j‖_F no direction is longer
than S, and those in which the columns are short stay short: a ball would forget where they point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope.core.rounding import SQUARES_LOST, SUMMED, gamma
from normscope.graph.graph import Shape
from normscope.operators.dense import gram_norms
from normscope.rules.remainder import Sets

SMALL = 1e-130  # sizes below which products of columns underflow: then a ball is taken
MOST_WIDTH = 512  # of a set: its ellipsoid costs as much as a dense layer of that width
MOST_ROOM = 40_000_000  # entries of all shapes of one node
SLACK = 8  # times the rounding of what was added and of Cholesky


@dataclass
class Ellipsoids:
    """One for each of some sets of entries. sizes: S, (sets,). shapes: Q, (sets, size, size), of trace S. terms: that Q adds."""

    sizes: torch.Tensor
    shapes: torch.Tensor
    terms: int = 0
    longest: torch.Tensor | None = None  # of each, once it was asked for

    @classmethod
    def none(cls, shape: Shape, sets: Sets) -> Ellipsoids:
        """Around nothing, for the sets of a tensor."""
        count, width = math.prod(shape) // sets.size, sets.size
        return cls(torch.zeros(count, dtype=torch.float64), torch.zeros(count, width, width, dtype=torch.float64))

    @staticmethod
    def affordable(shape: Shape, sets: Sets) -> bool:
        return 1 < sets.size <= MOST_WIDTH and math.prod(shape) * sets.size <= MOST_ROOM

    def add(self, other: Ellipsoids) -> None:
        """p_j is the same whatever else is added, so that sums of S and of Q are those of all columns."""
        self.sizes, self.shapes = self.sizes + other.sizes, self.shapes + other.shapes
        self.terms, self.longest = self.terms + other.terms + 1, None

    def add_scaled(self, scale: torch.Tensor, limits: torch.Tensor) -> None:
        """scale ⊙ ε, (sets, size), with |ε_u| ≤ limits, (sets, size), or ‖ε over a set‖ ≤ limits, (sets, 1)."""
        single = limits.shape == scale.shape
        norms = (scale if single else torch.linalg.vector_norm(scale, dim=1, keepdim=True)) + SQUARES_LOST
        self.sizes = self.sizes + (limits * norms).sum(1)
        self.shapes = self.shapes + torch.diag_embed(limits / norms * scale.square())
        self.terms, self.longest = self.terms + 2, None

    def norms(self) -> torch.Tensor:
        """√(S‖Q‖), the longest of each: not above S."""
        if self.longest is None:
            found = self.sizes.mul(SUMMED).sqrt() * gram_norms(self.shapes, 2 * self.terms + 16) * SUMMED
            self.longest = torch.where(self.sizes < SMALL, self.sizes, found).nan_to_num(math.inf, math.inf) * SUMMED
        return self.longest

    def frames(self) -> torch.Tensor | None:
        """P of each set, with PPᵀ ⪰ S·Q; None where something is not finite.

        Q/S has trace 1 at most, up to rounding. What is added to its diagonal is more than what the sums of Q, the division,
        Cholesky and the product S·L may lose.
        """
        count, width = self.shapes.shape[:2]
        sizes = self.sizes * SUMMED
        lost = SLACK * gamma(2 * (self.terms + width) + 32)
        if not (bool(sizes.isfinite().all() and self.shapes.isfinite().all()) and lost < 1):
            return None
        shapes = self.shapes / sizes.clamp(min=SMALL)[:, None, None]
        shapes.diagonal(dim1=-2, dim2=-1).add_(lost)
        found, failed = torch.linalg.cholesky_ex(shapes)
        round_ones = torch.eye(width, dtype=torch.float64).expand(count, -1, -1)
        as_balls = (failed != 0) | (sizes < SMALL)
        return torch.where(as_balls[:, None, None], round_ones, found) * sizes[:, None, None] * SUMMED
