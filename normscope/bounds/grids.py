"""Union bounds over a geometric grid: what lets a theorem for fixed norms be used with norms that the data chose.

A theorem that holds with probability 1 − δ for one class of networks holds for all classes of a countable family at once, each at
confidence δ w_k with Σ w_k ≤ 1. The family is the powers of `RATIO`, the weights w_k = 2/3 / ((|k| + 1)(|k| + 2)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from normscope.core.magnitude import Magnitude

RATIO = 2**0.25
LEAST_POWER = -4096  # what is smaller is counted as this large


def power_above(value: Magnitude) -> int:
    """The least k with value ≤ RATIO^k."""
    if value.log > 2.0**50:  # infinity, and where k + 1 is no longer another number than k
        raise OverflowError("no power is above infinity")
    if value.log <= LEAST_POWER * math.log(RATIO):
        return LEAST_POWER
    k = math.ceil(value.log / math.log(RATIO))
    return next(power for power in range(max(k, LEAST_POWER), k + 3) if value <= on_grid(power))  # the quotient is rounded


def on_grid(k: int) -> Magnitude:
    """RATIO^k."""
    return Magnitude.from_log(k * math.log(RATIO))


def log_inverse_weight(k: int) -> float:
    """ln 1/w_k, with Σ_k w_k = 1 over all integers."""
    return math.log(1.5) + math.log(abs(k) + 1) + math.log(abs(k) + 2)


def rounded_up(values: Iterable[Magnitude]) -> tuple[list[Magnitude], float]:
    """Each value at the next grid point, and Σ ln 1/w: by how much ln 1/δ grows for a union bound over all of them."""
    powers = [power_above(value) for value in values]
    return [on_grid(k) for k in powers], sum(map(log_inverse_weight, powers))
