"""Ellipsoids around sums of columns: what arrives at a set of entries from all symbols, as one vector of known shape.

With ζ = Σ_j B_j η_j, ‖η_j‖ ≤ A_j, and any p_j > 0, every v has

    (vᵀζ)² ≤ (Σ_j A_j ‖B_jᵀv‖)² ≤ (Σ_j p_j) (Σ_j A_j² vᵀB_jB_jᵀv / p_j),

so ζ = Pη with ‖η‖ ≤ 1 for every P with PPᵀ ⪰ S·Q, S = Σp_j, Q = Σ(A_j²/p_j) B_jB_jᵀ. Directions in which the columns are short stay
short: a ball would forget where they point. p_j is between A_j ‖B_j‖_F, with which all directions together are shortest, and about
A_j ‖B_j‖, with which the longest one is.
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
POWERS = 3  # steps of the power method, which guesses ‖B_j‖ for p_j
SLACK = 8  # times the rounding of what was added and of Cholesky


@dataclass
class Ellipsoids:
    """One for each of some sets of entries. sizes: S, (sets,). shapes: Q, (sets, size, size). terms: that Q adds.

    radii: Σ A_j ‖B_j‖_F, (sets,), beyond which nothing lies either.
    """

    sizes: torch.Tensor
    radii: torch.Tensor
    shapes: torch.Tensor
    terms: int = 0
    longest: torch.Tensor | None = None  # of each, once it was asked for

    @classmethod
    def none(cls, shape: Shape, sets: Sets) -> Ellipsoids:
        """Around nothing, for the sets of a tensor."""
        count, width = math.prod(shape) // sets.size, sets.size
        nothing = torch.zeros(count, dtype=torch.float64)
        return cls(nothing, nothing, torch.zeros(count, width, width, dtype=torch.float64))

    @staticmethod
    def affordable(shape: Shape, sets: Sets) -> bool:
        return 1 < sets.size <= MOST_WIDTH and math.prod(shape) * sets.size <= MOST_ROOM

    def add(self, other: Ellipsoids) -> None:
        """p_j is the same whatever else is added, so that sums of S and of Q are those of all columns."""
        self.sizes, self.radii, self.shapes = self.sizes + other.sizes, self.radii + other.radii, self.shapes + other.shapes
        self.terms, self.longest = self.terms + other.terms + 1, None

    def add_scaled(self, scale: torch.Tensor, limits: torch.Tensor) -> None:
        """scale ⊙ ε, (sets, size), with |ε_u| ≤ limits, (sets, size), or ‖ε over a set‖ ≤ limits, (sets, 1)."""
        lengths = norms = scale + SQUARES_LOST
        if limits.shape != scale.shape:
            lengths = torch.linalg.vector_norm(scale, dim=1, keepdim=True) + SQUARES_LOST
            norms = between(lengths, scale.amax(1, keepdim=True), scale.shape[1])
        self.sizes, self.radii = self.sizes + (limits * norms).sum(1), self.radii + (limits * lengths).sum(1)
        self.shapes = self.shapes + torch.diag_embed(limits / norms * scale.square())
        self.terms, self.longest = self.terms + 2, None

    def norms(self) -> torch.Tensor:
        """√(S‖Q‖), the longest of each: not above Σ A_j ‖B_j‖_F."""
        if self.longest is None:
            found = self.sizes.mul(SUMMED).sqrt() * gram_norms(self.shapes, 2 * self.terms + 16) * SUMMED
            found = torch.where(self.radii < SMALL, self.radii, torch.minimum(found, self.radii))
            self.longest = found.nan_to_num(math.inf, math.inf) * SUMMED
        return self.longest

    def norms_behind(self, matrix: torch.Tensor) -> torch.Tensor:
        """‖MP‖ of each set: how long its vectors are at most, once they are multiplied by a matrix (outputs, size)."""
        frames = self.frames()
        if frames is None:
            return torch.full_like(self.sizes, math.inf)
        moved = matrix @ frames
        lost = gamma(matrix.shape[1] + 8) * torch.linalg.vector_norm(frames, dim=(1, 2)) * torch.linalg.vector_norm(matrix)
        return (gram_norms(moved.mT @ moved, len(matrix)) + lost).nan_to_num(math.inf, math.inf) * SUMMED + SQUARES_LOST

    def close(self) -> None:
        """Nothing more will be added: of each only its longest axis is kept."""
        self.norms()
        self.shapes = self.shapes[:, :0, :0].clone()

    def frames(self) -> torch.Tensor | None:
        """P of each set, with PPᵀ ⪰ S·Q; None where something is not finite.

        What is added to the diagonal of Q/S, in proportion to its trace, is more than what the sums of Q, the division, Cholesky
        and the product S·L may lose.
        """
        count, width = self.shapes.shape[:2]
        sizes, radii = self.sizes * SUMMED, self.radii[:, None, None] * SUMMED
        lost = SLACK * gamma(2 * (self.terms + width) + 32)
        if not (bool((sizes + self.radii).isfinite().all() and self.shapes.isfinite().all()) and lost < 1):
            return None
        shapes = self.shapes / sizes.clamp(min=SMALL)[:, None, None]
        diagonal = shapes.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(lost * diagonal.sum(1, keepdim=True).clamp(min=1.0))
        found, failed = torch.linalg.cholesky_ex(shapes)
        round_ones = torch.eye(width, dtype=torch.float64).expand(count, -1, -1)
        as_balls = (failed != 0) | (torch.minimum(self.sizes, self.radii) < SMALL)
        return torch.where(as_balls[:, None, None], round_ones * radii, found * sizes[:, None, None]) * SUMMED


def stretch(blocks: torch.Tensor) -> torch.Tensor:
    """p_j/A_j for each block, (…, size, columns): by the power method, which need not have come to an end."""
    start = torch.randn(blocks.shape[-1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors = start.expand(*blocks.shape[:-2], -1, -1)
    for _ in range(POWERS):
        vectors = blocks.mT @ (blocks @ (vectors / (torch.linalg.vector_norm(vectors, dim=-2, keepdim=True) + SQUARES_LOST)))
    longest = torch.linalg.vector_norm(vectors, dim=(-2, -1)).sqrt()
    return between(torch.linalg.vector_norm(blocks, dim=(-2, -1)) + SQUARES_LOST, longest, min(blocks.shape[-2:]))


def between(frobenius: torch.Tensor, longest: torch.Tensor, rank: int) -> torch.Tensor:
    """‖B‖_F^(3/4) ‖B‖^(1/4), given about ‖B‖, which is at least ‖B‖_F/√rank."""
    longest = torch.minimum(torch.maximum(longest.nan_to_num(0.0), frobenius / math.sqrt(rank)), frobenius)
    return (frobenius * (frobenius * longest).sqrt()).sqrt()
