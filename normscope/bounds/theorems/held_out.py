"""The baseline to beat: bounds from data that training has not seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scipy.stats import beta

from normscope.bounds.bound import RISK, Bound
from normscope.bounds.losses import zero_one
from normscope.bounds.table import bounds_of

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

INDEPENDENT = "held-out samples are independent draws from P, and neither training nor model selection has used them"


def hoeffding(risk: float, size: int, loss_bound: float, delta: float) -> float:
    """F(P, h) ≤ F(H, h) + C√(ln(1/δ)/2n) with probability at least 1 − δ (Hoeffding 1963)."""
    return risk + loss_bound * math.sqrt(math.log(1 / delta) / (2 * size))


def clopper_pearson(errors: int, size: int, delta: float) -> float:
    """The largest p with P(Binomial(n, p) ≤ k) ≥ δ: exact, for a loss that is 0 or 1 (Clopper & Pearson 1934)."""
    return 1.0 if errors >= size else float(beta.isf(delta, errors + 1, size - errors))


@bounds_of("held-out Hoeffding")
def held_out_hoeffding(setting: Setting) -> Iterator[Bound]:
    """For any bounded loss."""
    sample = setting.require_held_out()
    parts = {"F(H, h)": sample.risk, "n": sample.size, "C": setting.loss.bound, "δ": setting.delta}
    value = hoeffding(sample.risk, sample.size, setting.loss.bound, setting.delta)
    yield setting.bound("held-out Hoeffding", value, RISK, parts=parts, assumptions=[INDEPENDENT])


@bounds_of("held-out binomial")
def held_out_binomial(setting: Setting) -> Iterator[Bound]:
    """For the zero-one loss, whatever loss was asked for; it needs classes."""
    sample = setting.require_held_out()
    loss, errors = zero_one(), int((~(sample.margins > 0)).sum())
    parts = {"errors": errors, "n": sample.size, "δ": setting.delta}
    value = clopper_pearson(errors, sample.size, setting.delta)
    yield setting.bound("held-out binomial", value, RISK, parts=parts, assumptions=[INDEPENDENT], loss=loss)
