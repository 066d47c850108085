"""Certified norms of convolutions: exact where the matrix is small, per frequency elsewhere.

A zero-padded convolution is a compression of the circular one on any grid that is large enough for nothing to wrap
around onto the data (docs/laws.md, *Convolution*), and a circular convolution is block diagonal over frequencies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from normscope.core.magnitude import Magnitude
from normscope.core.rounding import exponent_of, times_power_of_two
from normscope.operators.dense import spectral_norm
from normscope.operators.frequencies import Polyphase

EXACT_SIZE = 2000  # the smaller side of a matrix that is made dense
EXACT_WORK = EXACT_SIZE**3  # multiplications of the Gram matrices of all groups
COARSE_GRID = 16  # frequencies a kernel step: at most 0.49 % an axis above the full grid


@dataclass(frozen=True)
class Convolution:
    """A strided, padded, dilated, grouped convolution on inputs of spatial `size`, without its bias.

    kernel: (out, in/groups, *taps); padding: one (before, after) pair an axis; padding_mode as in torch.
    """

    kernel: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: str = "zeros"

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape[2:])

    @property
    def extent(self) -> tuple[int, ...]:
        """How far the dilated kernel reaches along each axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.taps, self.dilation, strict=True))

    @property
    def output_size(self) -> tuple[int, ...]:
        return tuple(
            (n + before + after - reach) // s + 1
            for n, (before, after), reach, s in zip(self.size, self.padding, self.extent, self.stride, strict=True)
        )

    @property
    def grouped_kernel(self) -> torch.Tensor:
        """(groups, out/groups, in/groups, all taps) in float64."""
        out, inner = self.kernel.shape[:2]
        return self.kernel.detach().to(torch.float64).reshape(self.groups, out // self.groups, inner, -1)

    def norm(self) -> tuple[Magnitude, str]:
        """An upper bound on the operator norm, and the method that gave it."""
        exponent = exponent_of(self.kernel)
        if abs(exponent) > 300:  # sums of squares or of products would overflow or vanish: scale by a power of two, exactly
            bound, method = replace(self, kernel=times_power_of_two(self.kernel.detach().double(), -exponent)).norm()
            return bound * Magnitude.from_log(exponent * math.log(2)), method
        _, out, inner, _ = self.grouped_kernel.shape
        rows, columns = out * math.prod(self.output_size), inner * math.prod(self.size)
        if min(rows, columns) <= EXACT_SIZE and rows * columns * min(rows, columns) * self.groups <= EXACT_WORK:
            return spectral_norm(self.dense()), "exact"
        if self.padding_mode == "zeros":
            return self._circular_norm(self._zero_padding_grid()), "frequencies"
        sides = zip(self.size, self.stride, self.output_size, strict=True)
        if self.padding_mode == "circular" and all(n % s == 0 and m * s <= n for n, s, m in sides):  # no output is repeated
            return self._circular_norm(self.size), "frequencies"
        padded = tuple(n + before + after for n, (before, after) in zip(self.size, self.padding, strict=True))
        inside = replace(self, size=padded, padding=((0, 0),) * len(padded), padding_mode="zeros")
        return inside.norm()[0] * self._padding_gain(), "padding × frequencies"

    def dense(self) -> torch.Tensor:
        """The matrix itself, (groups, out · positions, in · positions)."""
        groups, out, inner, _ = self.grouped_kernel.shape
        outputs, inputs = math.prod(self.output_size), math.prod(self.size)
        matrix = torch.zeros(groups, out, outputs, inner, inputs, dtype=torch.float64)
        for tap, (to, source) in enumerate(self._reads()):
            matrix[:, :, to, :, source] += self.grouped_kernel[..., tap].expand(len(to), -1, -1, -1)
        return matrix.reshape(groups, out * outputs, inner * inputs)

    def _reads(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For every tap, the flat output positions and the flat input positions that they read through it."""
        axes = []  # per axis and tap: (outputs, inputs)
        for n, m, s, (before, _), d, k in zip(
            self.size, self.output_size, self.stride, self.padding, self.dilation, self.taps, strict=True
        ):
            to = torch.arange(m)
            axes.append([_padded_index(to, to * s - before + d * tap, n, self.padding_mode) for tap in range(k)])
        for combination in itertools.product(*axes):
            to = _flat([pair[0] for pair in combination], self.output_size)
            source = _flat([pair[1] for pair in combination], self.size)
            yield to, source

    def _zero_padding_grid(self) -> tuple[int, ...]:
        """The smallest multiple of the stride on which nothing wraps around onto the data."""
        return tuple(
            s * math.ceil(max(n + max(pads), reach, s * m) / s)
            for n, pads, reach, s, m in zip(self.size, self.padding, self.extent, self.stride, self.output_size, strict=True)
        )

    def _circular_norm(self, grid: Sequence[int]) -> Magnitude:
        """max over frequencies of the norm of the polyphase kernel's transform, on a grid that the stride divides."""
        waves, inflation = self._coarse([n // s for n, s in zip(grid, self.stride, strict=True)])
        return Polyphase.of(self.grouped_kernel, self.taps, self.stride, self.dilation).norm(waves).widened(inflation)

    def _coarse(self, waves: Sequence[int]) -> tuple[list[int], float]:
        """A coarser grid where the full one is finer than needed, and the relative amount that pays for it.

        Between N grid points a trigonometric polynomial with k coefficients exceeds its largest value on them by a factor
        of at most 1/cos(π(k−1)/2N), an axis at a time.
        """
        chosen, factor = [], 1.0
        for wave, reach, s in zip(waves, self.extent, self.stride, strict=True):
            steps = math.ceil((reach - 1) / s)  # k − 1 of the polyphase kernel
            enough = COARSE_GRID * steps or 1
            chosen.append(min(wave, enough))
            if wave > enough and steps > 0:
                factor /= math.cos(math.pi * steps / (2 * enough))
        return chosen, factor * (1 + 2.0**-45) - 1

    def _padding_gain(self) -> float:
        """√ of how often padding repeats an entry, the axes multiplied."""
        gain = 1.0
        for n, (before, after) in zip(self.size, self.padding, strict=True):
            where = torch.arange(-before, n + after)
            _, source = _padded_index(where, where, n, self.padding_mode)
            gain *= math.sqrt(int(torch.bincount(source).max()))
        return gain


def _padded_index(to: torch.Tensor, at: torch.Tensor, size: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which outputs read something along one axis, and the index in [0, size) that each reads."""
    if mode == "zeros":
        inside = (at >= 0) & (at < size)
        return to[inside], at[inside]
    if mode == "circular":
        return to, at % size
    if mode == "replicate":
        return to, at.clamp(0, size - 1)
    if mode == "reflect":
        period = max(2 * size - 2, 1)
        folded = at % period
        return to, torch.where(folded < size, folded, period - folded)
    raise ValueError(f"unknown padding mode {mode!r}")


def _flat(indices: Sequence[torch.Tensor], size: Sequence[int]) -> torch.Tensor:
    flat = torch.zeros(1, dtype=torch.long)
    for index, n in zip(indices, size, strict=True):
        flat = (flat[:, None] * n + index[None, :]).reshape(-1)
    return flat
