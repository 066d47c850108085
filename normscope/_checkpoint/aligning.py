"""The element of a symmetry group that carries the weights of one model to those of another, and which weights it leaves apart.

Let T(θ) be the tangents of all groups at θ. Gauss–Newton walks along the orbit of A: x = argmin ‖D (T(θ) x − (θ_B − θ))‖,
θ ← θ moved by x. D first makes every parameter equally large; then D² = 1/(r² + δ²) of the entries' residuals r with δ → 0, so that
few entries which differ do not bend the fit. Of all elements we look for one that leaves the fewest parameters apart, of these for
one that leaves the fewest entries, and of these for the smallest change: one change can be another one up to a symmetry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import lstsq

from normscope._checkpoint.equality import FINE
from normscope.core.rounding import UNIT_ROUNDOFF
from normscope.symmetry.groups import Group, ScaleGroup
from normscope.symmetry.indices import together

MOST_ENTRIES = 20_000_000  # of the tangents of groups that meet: more are not fitted
LARGEST = 1e100  # entry that is fitted: squares stay finite
APPROACH = 30  # steps, at most
SLOW, FAST = 0.9, 0.6  # what a step leaves at most, from afar and where the end is near if there is one
NEARBY = 0.01  # how far, relative to a parameter's size, tangents may be used
HOLDS = 1e4  # how much more weight entries have that are held
LONGEST = 1.0  # amount of a step
FACTOR = 0.3  # by which δ shrinks
FITTED = 1e-10  # to what a fit in float64 is exact, relative
MARGIN = 3.0  # roundings: of A, of B, and of the fit to both
FINE_SUMS = 2.0**-20  # coarser types can hide a change of 1 % of a sum, which is rounded by more than its own share

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Alignment:
    """values: A's parameters, moved to B's as far as a symmetry can. left: parameters that still differ, in their order.

    hiding: the first parameter that agrees with B's only to a rounding which could hide a change of 1 % as well, if any.
    """

    values: Values
    left: tuple[str, ...]
    hiding: str | None


def aligned(
    groups: Sequence[Group], one: Values, other: Values, roundoff: float = UNIT_ROUNDOFF, alike: Collection[str] | None = None
) -> Alignment:
    """A's parameters moved along its symmetries towards B's, both in float64; roundoff: of the types that they were stored in.

    alike: parameters of which one side is the other, as its type stores it. No other may differ where no symmetry moved anything.
    """
    moved = [
        name for name in other if name not in one or one[name].shape != other[name].shape or not torch.equal(one[name], other[name])
    ]
    values = dict(one)
    mixed: set[str] = set()
    went: set[str] = set()
    for parts in together(groups, lambda group: group.parameters):
        names = list(dict.fromkeys(name for group in parts for name in group.parameters))
        here = all(name in one and name in other and _comparable(one[name], other[name]) for name in names)
        size = sum(one[name].numel() for name in names) * sum(group.count for group in parts) if here else 0
        if here and size <= MOST_ENTRIES and any(name in moved for name in names):
            values.update(_Fit(parts, names, values, other, max(roundoff, UNIT_ROUNDOFF)).found())
            mixed |= {name for group in parts if _adds(group) for name in group.parameters}
            if any(not torch.allclose(values[name], one[name], rtol=MARGIN * roundoff, atol=FITTED) for name in names):
                went |= {*names}
    left, hiding = [], []
    for name in moved:
        if name not in values or values[name].shape != other[name].shape:
            left.append(name)
            continue
        gap = (values[name] - other[name]).abs()
        size_of = torch.maximum(values[name].abs(), other[name].abs())
        scale = size_of + float(size_of.square().mean().sqrt()) if name in mixed else size_of
        same = (values[name] == other[name]) | (values[name].isnan() & other[name].isnan())
        near = gap.isfinite() & (gap <= max(FITTED, MARGIN * roundoff) * scale)
        if not bool((same | near).all()) or (alike is not None and name not in went and name not in alike):
            left.append(name)
        elif roundoff > (FINE_SUMS if name in mixed else FINE) and bool((gap > FITTED * scale).any()):
            hiding.append(name)
    return Alignment(values, tuple(left), hiding[0] if hiding else None)


def shrinking(start: float, end: float) -> list[float]:
    """start · FACTOR, start · FACTOR², … until one is at most `end`; none where start is, or is not finite."""
    if not end < start < math.inf:
        return []
    return [start * FACTOR**turn for turn in range(1, 1 + math.ceil((math.log(end) - math.log(start)) / math.log(FACTOR)))]


def _comparable(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and all(bool((values.abs() < LARGEST).all()) for values in (one, other))


def _adds(group: Group) -> bool:
    """Whether entries are sums of several, so that one is as exact as its summands, not as itself."""
    return not isinstance(group, ScaleGroup) or group.compensation is not None


class _Fit:
    """One walk along the orbit of groups that meet."""

    def __init__(self, groups: Sequence[Group], names: Sequence[str], one: Values, other: Values, roundoff: float) -> None:
        self.groups, self.names, self.values, self.roundoff = groups, names, dict(one), roundoff
        self.tolerance = max(FITTED, MARGIN * roundoff)
        self.target = np.concatenate([other[name].reshape(-1).numpy() for name in names])
        sizes = [max(*(float(values[name].square().mean().sqrt()) for values in (one, other)), 1 / LARGEST) for name in names]
        self.unit = np.repeat(sizes, [other[name].numel() for name in names])
        # the residual where tangents were last taken, these, and their lengths
        self.known = np.full(len(self.target), np.inf), np.empty(0), np.empty(0)
        self.places = dict(zip(names, np.cumsum([0, *(other[name].numel() for name in names)]), strict=False))

    def found(self) -> Values:
        """The best end of walks with all entries and without one parameter: few parameters apart, few entries, by little.

        Where A as it stands differs in one parameter, no other is named: who changed one weight of a model is told which.
        """
        best = (1, 0, 0.0) if self._apart()[0] == 1 else (np.inf, np.inf, np.inf), self.values
        self.values = dict(self.values)
        self._approach(np.ones_like(self.target))
        near = self.values
        for left_out in (None, *self.names):
            self.values = dict(near)
            held = np.zeros(len(self.target), dtype=bool)
            if left_out is not None:
                held = ~held
                held[self.places[left_out] : self.places[left_out] + near[left_out].numel()] = False
                if not self._approach(held.astype(float), FAST) <= self.tolerance:
                    continue  # the others do not agree among themselves
            self._settle(held)
            near = self.values if left_out is None else near
            best = min(best, (self._apart(), self.values), key=lambda one: one[0])
            if best[0][1] <= 1:
                break
        return {name: best[1][name] for name in self.names}

    def _apart(self) -> tuple[int, int, float]:
        """How many parameters and entries differ, and by how much in all."""
        gap = np.abs(self._residual())
        apart = np.add.reduceat(gap > self.tolerance, list(self.places.values()), dtype=int)
        return int((apart > 0).sum()), int(apart.sum()), float(gap.sum())

    def _approach(self, weights: np.ndarray, pace: float = SLOW) -> float:
        """Least squares as long as a step leaves less than a share of the residual; the largest weighted residual."""
        size = float(np.linalg.norm(weights * self._residual()))
        for _ in range(APPROACH):
            kept = dict(self.values)
            new = float(np.linalg.norm(weights * self._step(weights)))
            if not new < size:
                self.values = kept
                break
            settled, size = new > pace * size or new <= self.roundoff, new
            if settled:
                break
        return float(np.abs(weights * self._residual()).max())

    def _settle(self, held: np.ndarray) -> None:
        """As many entries as possible agree, those that are held before all, and others as little as they like."""
        for power in (0.25, 0.5):  # the sum of all gaps, which has no false minima; then their number
            gap = self._residual()
            for delta in shrinking(float(np.abs(gap).max()), 0.1 * self.tolerance):
                weights = np.hypot(gap, delta) ** (-2 * power)
                gap = self._step(np.where(held, HOLDS * weights.max(), weights))

    def _residual(self) -> np.ndarray:
        return (self.target - self._flat(self.values)) / self.unit

    def _step(self, weights: np.ndarray) -> np.ndarray:
        """One step by weighted least squares, no longer than allowed; what is left after it."""
        at = self._residual()
        if np.abs(at - self.known[0]).max() > NEARBY:
            tangents = self._tangents() / self.unit[:, None]
            lengths = np.maximum(np.linalg.norm(tangents, axis=0), 1e-300)
            self.known = at, tangents / lengths, lengths
        _, tangents, lengths = self.known
        amounts = lstsq(weights[:, None] * tangents, weights * at, cond=1e-12, lapack_driver="gelsy")[0] / lengths
        amounts *= min(1.0, LONGEST / max(float(np.abs(amounts[self._multiplying()]).max(initial=0.0)), 1e-300))
        start = 0
        for group in self.groups:
            part = torch.from_numpy(amounts[start : start + group.count])
            self.values.update(group.flowed(self.values, part))
            start += group.count
        return self._residual()

    def _multiplying(self) -> np.ndarray:
        """Which amounts are logarithms of factors; shifts may be as long as they like."""
        return np.concatenate([np.full(group.count, "shift" not in group.kind) for group in self.groups])

    def _tangents(self) -> np.ndarray:
        columns = np.zeros((len(self.target), sum(group.count for group in self.groups)))
        start = 0
        for group in self.groups:
            inner = 0
            rows = group.directions(self.values).numpy()
            for name in dict.fromkeys(group.parameters):
                size = self.values[name].numel()
                columns[self.places[name] : self.places[name] + size, start : start + group.count] = rows[:, inner : inner + size].T
                inner += size
            start += group.count
        return columns

    def _flat(self, values: Mapping[str, torch.Tensor]) -> np.ndarray:
        return np.concatenate([values[name].reshape(-1).numpy() for name in self.names])
