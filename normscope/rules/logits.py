"""How far the probabilities of attention, and averages with them, can be from linear: one query of one head at a time.

Sums over keys are sums with the weights p, so sizes along the keys are known one by one, |a_j|, and together, √Σp a². Cauchy and
Schwarz turn either into bounds on Σp|a b|; docs/laws.md has the proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope.core.rounding import FEW, UNIT_ROUNDOFF, gamma, length

LEAST = 1e-304  # probabilities below it, and those of masked keys, count as so large


def weights(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, none of which is 0, and their roots."""
    p = p.clamp(min=LEAST)
    return p, p.sqrt()


@dataclass(frozen=True)
class TokenSizes:
    """Sizes of the vectors of a head, each, and of all of them together in ℓ2."""

    each: torch.Tensor  # (heads, tokens)
    whole: torch.Tensor  # (heads,)

    def summed(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ weights·size over keys, per query: weights (heads, queries, keys)."""
        return torch.minimum((weights * self.each[..., None, :]).sum(-1), length(weights, -1) * self.whole[..., None])

    def weighed(self, roots: torch.Tensor) -> torch.Tensor:
        """√Σp size², per query; roots: √p."""
        return torch.minimum(length(roots * self.each[..., None, :], -1), roots.amax(-1) * self.whole[..., None])


@dataclass(frozen=True)
class Weighed:
    """Something about every query and key, with the weights p. each: (heads, queries, keys). whole: √Σp each² at most."""

    roots: torch.Tensor
    each: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, roots: torch.Tensor, each: torch.Tensor, whole: torch.Tensor | None = None) -> Weighed:
        together = length(roots * each, -1)
        return cls(roots, each, together if whole is None else least(together, whole))

    def times(self, *others: Weighed) -> torch.Tensor:
        """Σp ∏ each: entry by entry, or √Σp a² √Σp b² with all other factors in b, or the largest of them before it."""
        entries, wholes = [self.each, *(one.each for one in others)], [self.whole, *(one.whole for one in others)]
        found = [math.prod(entries, start=self.roots.square()).sum(-1)]
        for first, whole in enumerate(wholes):
            rest = entries[:first] + entries[first + 1 :]
            found.append(whole * length(math.prod(rest, start=self.roots), -1))
            for second in range(first):
                largest = math.prod(entry for place, entry in enumerate(entries) if place not in (first, second))
                found.append(whole * wholes[second] * (largest.amax(-1) if len(entries) > 2 else 1.0))
        return least(*found)


def least(*sizes: torch.Tensor) -> torch.Tensor:
    """The least of some bounds; what is 0·∞ is none."""
    return torch.stack(torch.broadcast_tensors(*sizes)).nan_to_num(math.inf, math.inf).amin(0)


def lost(keys: int) -> float:
    """What computed probabilities, and logarithms of sums of them, may be off by: e^z is, and so are sums of them in any order."""
    return 1e-12 + gamma(8 * (keys + FEW))


def rounding(keys: int, width: int) -> float:
    """Of sums over keys and over the entries of a head, relatively."""
    return 1e-13 + 4 * UNIT_ROUNDOFF * (keys + width)


@dataclass(frozen=True)
class Change:
    """How far probabilities q can be from p: |q/p − 1| ≤ relative, q ≤ most and q/p ≤ factor.

    on_the_way: `relative` in the mean over all logits from those of p to those of q.
    """

    relative: Weighed
    on_the_way: Weighed
    most: torch.Tensor
    factor: torch.Tensor


def change(p: torch.Tensor, away: Weighed, tiny: torch.Tensor) -> Change:
    """For q = softmax(ẑ + δ), p = softmax(ẑ), where δ − Σpδ is at most `away`, and its mean at most `tiny`: (heads, queries).

    With c = δ − Σpδ, q_j/p_j = e^c_j/Σp e^c, and 0 ≤ ln Σp e^c ≤ ln(1 + Σp(e^c − 1 − c)) ≤ Σp c²e^|c|/2. All bounds are convex
    along the way, but for q − p where it is cut at 1, so half of them is their mean.
    """
    roots, largest, slack = away.roots, away.each.amax(-1), lost(p.shape[-1])
    second = least((p * away.each.square() * away.each.exp()).sum(-1), away.whole.square() * largest.exp()) / 2 + tiny
    log = least(second.log1p(), torch.logsumexp(away.each + p.log(), -1).clamp(min=0) + tiny)
    relative = torch.expm1((away.each + log[..., None]) * (1 + slack) + slack).nan_to_num(math.inf, math.inf)
    factor = (largest * (1 + slack) + slack).exp() * (1 + second)
    whole, cut = factor * (away.whole + second + slack) * (1 + slack), p * relative >= 1
    full, half = (Weighed.of(roots, torch.where(cut, 1 / p, relative * share), whole * share) for share in (1.0, 0.5))
    return Change(full, half, (p * (1 + full.each)).clamp(max=1), factor)
