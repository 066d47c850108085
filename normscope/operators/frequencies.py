"""The norm of a circular convolution: the largest of its blocks K(ω), one for every frequency ω.

The Gram matrix K(ω)ᴴK(ω) is a trigonometric polynomial of twice the kernel's reach, so that a few of them give all others by
interpolation (docs/laws.md, *Convolution*), each with one Cholesky factorization as its proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from normscope.core.magnitude import INFINITY, ZERO, Magnitude
from normscope.core.rounding import UNIT_ROUNDOFF
from normscope.operators.dense import frobenius_norm, largest_eigenvalue, product_error, spectral_norm

FREQUENCY_SLACK = 1e-4  # of the squared norm; the grid itself is looser than this
CHUNK_ENTRIES = 4_000_000  # complex entries of one batch of frequencies: 64 MB
INTERPOLATED_ENTRIES = 500_000  # the same, of Gram matrices that fit into a cache
NODE_ENTRIES = 8_000_000  # complex entries of all Gram matrices that others are interpolated from: 128 MB


@dataclass(frozen=True)
class Polyphase:
    """A kernel (groups, out, in, taps) whose tap t reads its phase of the input, `shifts[t]` (axes) steps of the stride away."""

    kernel: torch.Tensor
    shifts: torch.Tensor
    phase_of_tap: torch.Tensor

    @staticmethod
    def of(kernel: torch.Tensor, taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Polyphase:
        """Of a strided, dilated kernel with `taps` along each axis."""
        positions = torch.tensor(list(itertools.product(*(range(k) for k in taps))))  # (taps, axes)
        offsets, steps = positions * torch.tensor(dilation), torch.tensor(stride)
        _, phase_of_tap = torch.unique(offsets % steps, dim=0, return_inverse=True)
        return Polyphase(kernel, offsets // steps, phase_of_tap)

    @property
    def phases(self) -> int:
        return int(self.phase_of_tap.max()) + 1

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of a block: phases act as inputs."""
        _, out, inner, _ = self.kernel.shape
        return out, inner * self.phases

    @property
    def error(self) -> float:
        """‖computed − exact‖_F of one block: each entry sums `taps` terms with waves good to a few roundoffs.

        An entry errs by at most c Σ_t |K_t|, and ‖Σ_t |K_t|‖_F ≤ √taps ‖K‖_F.
        """
        taps = self.kernel.shape[-1]
        return 16 * (taps + 8) * UNIT_ROUNDOFF * math.sqrt(taps) * float(frobenius_norm(self.kernel))

    def blocks(self, frequencies: torch.Tensor, waves: Sequence[int]) -> torch.Tensor:
        """K(ω) for the given frequencies (some, axes) of a grid: (some · groups, rows, columns)."""
        groups, out, inner, taps = self.kernel.shape
        turns = (frequencies[:, None, :] * self.shifts[None]) % torch.tensor(waves)  # exact integers before any rounding
        angle = 2 * math.pi * (turns / torch.tensor(waves, dtype=torch.float64)).sum(-1)  # (frequencies, taps)
        by_tap = self.kernel.permute(3, 0, 1, 2).reshape(taps, -1)
        parts = []
        for phase in range(self.phases):
            here = self.phase_of_tap == phase
            parts.append(torch.complex(*(wave[:, here] @ by_tap[here] for wave in (angle.cos(), angle.sin()))))
        joined = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        matrices = joined.reshape(len(frequencies), len(parts), groups, out, inner).permute(0, 2, 3, 1, 4)
        return matrices.reshape(len(frequencies) * groups, *self.sides)

    def norm(self, waves: Sequence[int]) -> Magnitude:
        """An upper bound on ‖K(ω)‖ over the frequencies of a grid with so many waves along each axis."""
        frequencies = half_of_all(waves)
        nodes = [min(wave, 2 * int(reach) + 1) for wave, reach in zip(waves, self.shifts.amax(0), strict=True)]
        if self._interpolation_pays(len(half_of_all(nodes)), math.prod(nodes), len(frequencies)):
            return self._interpolated_norm(waves, nodes)
        bound = ZERO
        for some in frequencies.split(max(1, CHUNK_ENTRIES // (self.kernel.shape[0] * math.prod(self.sides)))):
            bound = spectral_norm(self.blocks(some, waves), self.error, bound, FREQUENCY_SLACK)
        return bound

    def _interpolation_pays(self, half: int, nodes: int, frequencies: int) -> bool:
        """Whether `half` Gram matrices and sums of `nodes` matrices cost less than a Gram matrix for every frequency."""
        side, inner = sorted(self.sides)
        fits = half * self.kernel.shape[0] * side**2 <= NODE_ENTRIES and 1e-100 < float(frobenius_norm(self.kernel)) < 1e100
        return side > 1 and fits and half * inner + frequencies * nodes / 2 < frequencies * inner

    def _interpolated_norm(self, waves: Sequence[int], nodes: Sequence[int]) -> Magnitude:
        """The same, with Gram matrices from those at the frequencies of the coarser grid `nodes`.

        With |w| the sum of the weights' absolute values, at most Λ, an error E of the Gram matrices at nodes becomes Λ E; weights
        that err by δ and sums of J terms add (J δ + 2 (J + 8) u Λ) times the largest ‖K‖_F² at a node.
        """
        (rows, columns), error = self.sides, self.error
        blocks = self.blocks(half_of_all(nodes), nodes)
        squares = float(torch.linalg.vector_norm(torch.view_as_real(blocks).flatten(1), dim=1).max()) ** 2
        squares *= 1 + (2 * rows * columns + 16) * UNIT_ROUNDOFF
        if not math.isfinite(squares):
            return INFINITY
        grams = blocks.mH @ blocks if columns <= rows else blocks @ blocks.mH
        grams = grams.unflatten(0, (-1, self.kernel.shape[0]))  # (nodes, groups, side, side)
        even, odd, total, off = interpolation(waves, nodes)
        count = math.prod(nodes)
        at_node = product_error(max(rows, columns), squares, True) + 2 * error * math.sqrt(squares) + error**2
        between = total * at_node + (count * off + 2 * (count + 8) * UNIT_ROUNDOFF * total) * squares
        traces = even @ grams.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        most = float(traces.max()) + math.sqrt(min(rows, columns)) * 2 * between
        real, imaginary = grams.real.flatten(1).contiguous(), grams.imag.flatten(1).contiguous()
        shape = grams.shape[2:]
        del blocks, grams

        def others() -> Iterator[torch.Tensor]:
            size = max(1, INTERPOLATED_ENTRIES // real.shape[1])
            for some, turned in zip(even.split(size), odd.split(size), strict=True):
                yield torch.complex(some @ real, turned @ imaginary).reshape(-1, *shape)

        squared = largest_eigenvalue(others(), most, 2 * between, 0.0, FREQUENCY_SLACK)
        return Magnitude.from_log(math.log(squared) / 2).widened(8 * UNIT_ROUNDOFF)


def half_of_all(waves: Sequence[int]) -> torch.Tensor:
    """One of every pair (ω, −ω), whose blocks are conjugate for a real kernel: (frequencies, axes)."""
    every, own, opposite = _pairs(waves)
    return every[own <= opposite]


def _pairs(waves: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All frequencies (all, axes), the place of each, and that of its opposite."""
    every = torch.tensor(list(itertools.product(*map(range, waves))))
    place = torch.tensor([math.prod(waves[axis + 1 :]) for axis in range(len(waves))])
    return every, (every * place).sum(1), ((-every) % torch.tensor(waves) * place).sum(1)


def interpolation(waves: Sequence[int], nodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Weights (frequencies, nodes) that give a real kernel's Gram matrices on a grid from those on a coarser one, halves of both.

    `even` for real parts, `odd` for imaginary parts. Also the largest sum of absolute weights of one frequency over all nodes, and
    how far a weight may be off. Along each axis: 1/N Σ_{|m| ≤ (N−1)/2} cos(mθ), θ being the angle from a node, for the N nodes of
    a polynomial of degree (N−1)/2; the identity where the grids are the same.
    """
    asked, (every, own, opposite) = half_of_all(waves), _pairs(nodes)
    weights = torch.ones(len(asked), len(every), dtype=torch.float64)
    for axis, (wave, node) in enumerate(zip(waves, nodes, strict=True)):
        along = torch.eye(wave, dtype=torch.float64)
        if node < wave:
            apart = torch.arange(wave)[:, None] * node - torch.arange(node) * wave  # in turns of 1/(wave · node), exact
            turns = [(m * apart) % (wave * node) for m in range(1, (node + 1) // 2)]
            cosines = [(2 * math.pi * (turn.double() / (wave * node))).cos() for turn in turns]
            along = (1 + 2 * sum(cosines, torch.zeros(wave, node, dtype=torch.float64))) / node
        weights *= along[asked[:, axis]][:, every[:, axis]]
    first = own <= opposite
    here, there = weights[:, first], weights[:, opposite[first]]
    off = (
        len(waves) * (max(nodes) + 64) * UNIT_ROUNDOFF
    )  # a cosine errs by less than 32 roundoffs, and a mean adds those of its sum
    total = float(weights.abs().sum(1).max()) * (1 + 1e-9) + len(every) * off
    return here + torch.where((own < opposite)[first], there, 0.0), here - there, total, off
