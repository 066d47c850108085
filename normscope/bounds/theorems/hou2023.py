"""Hou, Kassraie, Kratsios, Rothfuss & Krause 2023, as Than 2025 quotes it (HKK): optimal transport, with a global constant.

F(P, h) ≤ F(D, h) + γ(L) + √(N/m) + const with γ(L) = Σ_{i∈T} (m_i/m) λ_i max{1, L_i} + max_i λ_i L_i √(ln(4/δ)/m), for a loss
that is Lipschitz on all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from normscope.bounds.bound import MEASURE, RISK, Bound
from normscope.bounds.cellwise import Cellwise
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.core.magnitude import ONE, Magnitude

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Hou et al. 2023"


def hou(
    risk: float, weights: torch.Tensor, distances: torch.Tensor, constant: Magnitude, pairs: int, size: int, delta: float
) -> tuple[Magnitude, Magnitude]:
    """F(D, h) + γ(L) + √(N/m) without the constant that is hidden, and γ(L); every L_i is the global constant."""
    transport = max(constant, ONE) * float(weights @ distances)
    deviation = constant * (float(distances.max()) * math.sqrt(math.log(4 / delta) / size))
    total = transport + deviation
    return total + (risk + math.sqrt(pairs / size)), total


@bounds_of(NAME, cellwise=True)
def hou2023(setting: Setting) -> Iterator[Bound]:
    """A measure: a constant is added that the quotation leaves open."""
    if setting.loss.slope is None or setting.loss.slope == math.inf:
        raise NotApplicable("it needs a loss that is Lipschitz in the outputs, with a known slope")
    yield min((_measure(setting, rows) for rows in setting.cells), key=lambda bound: bound.value)


def _measure(setting: Setting, rows: Cellwise) -> Bound:
    assert setting.loss.slope is not None
    constant, size = setting.constant * setting.loss.slope, int(rows.counts.sum())
    distances = torch.where(rows.remainder, 0.0, rows.largest_distance)
    value, spread = hou(setting.train.risk, rows.weights, distances, constant, rows.pairs, size, setting.delta)
    parts = {
        "F(D, h)": setting.train.risk, "γ(L)": spread, "L": constant, "√(N/m)": math.sqrt(rows.pairs / size), "N": rows.pairs,
        "m": size, "partition": rows.cells.name, "λ_i": distances[~rows.remainder],
    }  # fmt: skip
    assumptions = [
        "the additive constant that the quotation leaves open is left out",
        "λ_i is the farthest distance in a cell's ball; samples outside of all balls are left out",
        "L is what was proved with the parameters as they stand: not invariant under symmetries of scale",
    ]
    return setting.bound(NAME, value, RISK, MEASURE, parts, assumptions)
