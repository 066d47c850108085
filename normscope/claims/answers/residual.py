"""Pre-norm residual networks: Theorem 4 of docs/laws.md and its corollary for depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from normscope.claims.calculus import layer_deviation, normal, scalar, spectral_norm, standardize, steepness
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, upper_bound

WIDTH = 8


@dataclass(frozen=True)
class Blocks:
    """x ↦ x + W_2 φ(W_1 LN(x)) again and again; φ is tanh, or nothing where `bent` is false."""

    weights: list[tuple[Tensor, Tensor]]
    bent: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        for first, second in self.weights:
            inner = standardize(x, -1) @ first.T
            x = x + (inner.tanh() if self.bent else inner) @ second.T
        return x

    def ratios(self, x: Tensor) -> list[Tensor]:
        """ℓ_l/σ_l(x) of each block."""
        found = []
        for block in self.weights:
            found.append(spectral_norm(block[0]) * spectral_norm(block[1]) / layer_deviation(x))
            x = Blocks([block], self.bent)(x)
        return found


def networks(generator: torch.Generator) -> list[tuple[str, Blocks]]:
    """W_1 = I, W_2 = ℓI without a bend, which reaches the bound; random branches of gain about 1; large ones."""
    eye = torch.eye(WIDTH, dtype=torch.float64)
    straight = [(f"{depth} straight blocks", Blocks([(eye, 0.7 * eye)] * depth, False)) for depth in (1, 4, 12)]
    random = [
        (f"{depth} random blocks × {size:g}", Blocks(random_blocks(depth, size, generator)))
        for depth in (2, 8) for size in (0.3, 1.0, 5.0)
    ]  # fmt: skip
    return [*straight, *random]


def random_blocks(depth: int, size: float, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    scale = WIDTH**-0.5
    return [(scale * normal(generator, WIDTH, WIDTH), size * scale * normal(generator, WIDTH, WIDTH)) for _ in range(depth)]


def product_of_blocks(ratios: Sequence[Tensor]) -> Tensor:
    """∏(1 + ℓ_l/σ_l)."""
    return torch.stack([1 + ratio for ratio in ratios]).prod()


@claim("O-residual")
def residual_constant(generator: torch.Generator, stated: Callable[[Sequence[Tensor]], Tensor] = product_of_blocks) -> Ruling:
    """∂/∂x (x + F(LN x)) = I + F'·∂LN/∂x, of norm at most 1 + ℓ/σ. Jacobians at random points of several scales.

    Straight blocks keep x in the span of 1 and x, so a direction orthogonal to both is multiplied by 1 + ℓ/σ in each: reached.
    """
    cases = []
    for name, network in networks(generator):
        for scale in (0.1, 1.0, 10.0):
            x = scale * normal(generator, WIDTH)
            cases.append(Case(f"{name}, scale {scale:g}", stated(network.ratios(x)), steepness(network, x)))
    return upper_bound(cases)


def square_root_of_depth(branch: float, growth: float, depth: int) -> float:
    """2(ℓ/c)√depth."""
    return 2 * branch / growth * depth**0.5


@claim("O-depth")
def depth_of_residual_network(
    generator: torch.Generator, stated: Callable[[float, float, int], float] = square_root_of_depth
) -> Ruling:
    """Σ_{l ≤ L} 1/√l ≤ 2√L. Random blocks: ℓ the largest, c the least σ_l/√l, log of the Jacobian against 2(ℓ/c)√depth.

    The first block has l = 1. Evidence: log L at depths 8 and 128; were it linear in the depth, it would be 16 times as large.
    """
    cases, logs = [], dict[str, float]()
    for depth in (8, 32, 128):
        network, x = Blocks(random_blocks(depth, 1.0, generator)), normal(generator, WIDTH)
        branch = max(float(spectral_norm(first) * spectral_norm(second)) for first, second in network.weights)
        sigmas = [branch_norm / float(ratio) for branch_norm, ratio in zip(_norms(network), network.ratios(x), strict=True)]
        growth = min(sigma / (index + 1) ** 0.5 for index, sigma in enumerate(sigmas))
        true = log(float(steepness(network, x)))
        logs[f"log L at depth {depth}"] = true
        logs[f"Σℓ/σ at depth {depth}"] = float(sum(network.ratios(x)))
        cases.append(Case(f"{depth} random blocks (log L)", scalar(stated(branch, growth, depth)), scalar(true)))
    harmonic = sum((index + 1) ** -0.5 for index in range(10_000))
    cases.append(Case("σ_l = √l, ℓ = 1, depth 10000 (Σℓ/σ)", scalar(stated(1.0, 1.0, 10_000)), scalar(harmonic)))
    return upper_bound(cases, **logs)


def _norms(network: Blocks) -> list[float]:
    return [float(spectral_norm(first) * spectral_norm(second)) for first, second in network.weights]
