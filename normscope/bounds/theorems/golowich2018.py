"""Golowich, Rakhlin & Shamir 2018, Theorem 1: Rademacher complexity by the product of Frobenius norms, with a root of the depth.

R̂_D(H) ≤ ∏‖A_k‖_F (√(2 ln 2 · L) + 1) √(Σ‖x_i‖²) / m for real-valued networks of L layers without biases, activations entrywise,
1-Lipschitz and positively homogeneous. With k classes and any margin γ (Mohri, Rostamizadeh & Talwalkar 2018, Theorem 9.2, in its
form for the empirical complexity), with probability 1 − δ

    P[wrong] ≤ ramp_γ(D) + (4k/γ) R̂_D(H) + 3√(ln(2/δ)/2m).

Only ∏‖A_k‖_F/γ matters, since layers can be rescaled: a union bound over its grid makes it hold for all networks and margins.
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
from normscope.core.magnitude import Magnitude
from normscope.operators.dense import frobenius_norm

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Golowich et al. 2018"


def rademacher_complexity(product: Magnitude, depth: int, norms: torch.Tensor) -> Magnitude:
    """∏‖A_k‖_F (√(2 ln 2 · L) + 1) √(Σ‖x_i‖²) / m."""
    return product * frobenius_norm(norms) * ((math.sqrt(2 * math.log(2) * depth) + 1) / len(norms))


def golowich(network: Network, margins: torch.Tensor, norms: torch.Tensor, classes: int, delta: float) -> Candidate:
    """The bound on the risk at the best of the sample's margins, and its parts."""
    size = len(margins)
    chain = network.without_biases
    lengths = norms.double().hypot(torch.ones(())) if network.biased else norms
    product = chain.product("frobenius")
    if not product.finite:
        raise NotApplicable("a map between the layers has no finite Lipschitz constant")

    def bound_at(margin: float) -> Candidate:
        (ratio,), weight = rounded_up([product / margin])
        complexity = rademacher_complexity(ratio, chain.depth, lengths)
        confidence = 3 * math.sqrt((math.log(2 / delta) + weight) / (2 * size))
        risk = ramp_risk(margins, margin)
        parts = {
            "risk at margin": risk, "margin": margin, "∏‖A‖_F": product, "∏‖A‖_F/margin on the grid": ratio, "layers": chain.depth,
            "classes": classes, "Rademacher complexity": complexity, "confidence term": confidence,
        }  # fmt: skip
        return complexity * (4 * classes) + (risk + confidence), parts

    return at_best_margin(margins, bound_at)


@bounds_of(NAME)
def golowich2018(setting: Setting) -> Iterator[Bound]:
    """For the zero-one loss; certified for chains with ReLU-like activations."""
    network = setting.network
    value, parts = golowich(network, setting.train.margins, setting.train.norms, setting.classes, setting.delta)
    bent = [f"not covered by the theorem: {label} is not entrywise and homogeneous" for label in network.not_homogeneous]
    status = MEASURE if network.obstacles or bent else CERTIFIED
    assumptions = [
        "training samples are independent draws from P",
        "the architecture was fixed before the data",
        *network.notes,
        *bent,
    ]
    yield setting.bound(NAME, value, RISK, status, parts, assumptions, zero_one())
