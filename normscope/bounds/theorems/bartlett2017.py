"""Bartlett, Foster & Telgarsky 2017: spectral norms and (2, 1)-norms over the margin, with every constant.

Theorem 3.3: for chains of maps ρ_k-Lipschitz with φ_k(0) = 0 and matrices with ‖A_k‖₂ ≤ s_k and ‖A_kᵀ‖_{2,1} ≤ b_k,

    ln N(ε) ≤ c ‖X‖_F² ln(2W²)/ε² · ∏ s_k²ρ_k² · (Σ (b_k/s_k)^{2/3})³,

W the largest width. The theorem has c = 1; the lemma behind it rounds up to whole numbers, which c = 2 pays for: where the number
is below 1 the cover is a single point, and ⌈x⌉ ≤ 2x elsewhere. The ramp loss at margin γ is 2/γ-Lipschitz, so Dudley's integral
from 1/m gives R̂ ≤ 4/m^{3/2} + 18 ln(m) √R/m with R = 4 ε² ln N(ε)/γ², and

    P[wrong] ≤ ramp_γ(D) + 2R̂ + 3√(ln(2/δ)/2m).

A union bound over the grids of all s_k, b_k and of γ makes it hold for all networks and margins at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from normscope.bounds.bound import CERTIFIED, MEASURE, RISK, Bound
from normscope.bounds.grids import rounded_up
from normscope.bounds.losses import zero_one
from normscope.bounds.network import Network
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.bounds.theorems.margin_choice import Candidate, at_best_margin, ramp_risk
from normscope.core.magnitude import Magnitude, product, total
from normscope.operators.dense import frobenius_norm

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Bartlett et al. 2017"
CEILING = 2.0  # c


def spectral_complexity(spectral: list[Magnitude], rows: list[Magnitude]) -> Magnitude:
    """∏ s_k (Σ (b_k/s_k)^{2/3})^{3/2}."""
    if not all(spectral):
        return Magnitude(0)
    ratios = total((row / norm) ** (2 / 3) for norm, row in zip(spectral, rows, strict=True))
    return product(spectral) * ratios**1.5


def rademacher_complexity(complexity: Magnitude, width: int, norms: torch.Tensor, margin: float) -> Magnitude:
    """4/m^{3/2} + 18 ln(m) √R/m with √R = 2√c ‖X‖_F √ln(2W²) · complexity/γ."""
    size = len(norms)
    root = complexity * frobenius_norm(norms) * (2 * math.sqrt(CEILING * math.log(2 * width**2))) / margin
    return root * (18 * math.log(size) / size) + 4 / size**1.5


def bartlett(network: Network, margins: torch.Tensor, norms: torch.Tensor, delta: float) -> Candidate:
    """The bound on the risk at the best of the sample's margins, and its parts."""
    size = len(margins)
    chain = network.without_biases
    lengths = norms.double().hypot(torch.ones(())) if network.biased else norms
    if not chain.slope.finite:
        raise NotApplicable("a map between the layers has no finite Lipschitz constant")
    spectral, weight = rounded_up(layer.spectral for layer in chain.layers)
    rows, further = rounded_up(layer.rows for layer in chain.layers)
    complexity = chain.slope * spectral_complexity(spectral, rows)

    def bound_at(margin: float) -> Candidate:
        (inverse,), own = rounded_up([1 / Magnitude(margin)])
        rademacher = rademacher_complexity(complexity, chain.width, lengths, float(1 / inverse))
        confidence = 3 * math.sqrt((math.log(2 / delta) + weight + further + own) / (2 * size))
        risk = ramp_risk(margins, float(1 / inverse))
        parts = {
            "risk at margin": risk, "margin": float(1 / inverse), "∏‖A‖₂": chain.product("spectral"),
            "spectral complexity": complexity, "width": chain.width, "Rademacher complexity": rademacher,
            "confidence term": confidence,
        }  # fmt: skip
        return rademacher * 2 + (risk + confidence), parts

    return at_best_margin(margins, bound_at)


@bounds_of(NAME)
def bartlett2017(setting: Setting) -> Iterator[Bound]:
    """For the zero-one loss; certified for chains of layers and Lipschitz maps with φ(0) = 0."""
    network = setting.network
    value, parts = bartlett(network, setting.train.margins, setting.train.norms, setting.delta)
    status = MEASURE if network.obstacles else CERTIFIED
    assumptions = ["training samples are independent draws from P", "the architecture was fixed before the data", *network.notes]
    yield setting.bound(NAME, value, RISK, status, parts, assumptions, zero_one())
