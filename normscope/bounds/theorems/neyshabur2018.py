"""Neyshabur, Bhojanapalli & Srebro 2018, Theorem 1: PAC-Bayes with spectral norms over the margin; its constant is hidden in O(·).

P[wrong] ≤ P_D[margin ≤ γ] + O(√((B² L² h ln(Lh) ∏‖A_k‖₂² Σ ‖A_k‖_F²/‖A_k‖₂² + ln(Lm/δ)) / (γ² m))), B ≥ ‖x‖, h the width, L
layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from normscope.bounds.bound import MEASURE, RISK, Bound
from normscope.bounds.losses import zero_one
from normscope.bounds.network import Network
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.bounds.theorems.margin_choice import Candidate, usual_margin
from normscope.core.magnitude import Magnitude, total

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Neyshabur et al. 2018"


def neyshabur(network: Network, margins: torch.Tensor, norms: torch.Tensor, delta: float) -> Candidate:
    """The right-hand side with 1 for the hidden constant, at the margin that a tenth of the sample stays below."""
    chain, size = network.without_biases, len(margins)
    reach = Magnitude(math.hypot(float(norms.max()), network.biased))
    if not chain.slope.finite:
        raise NotApplicable("a map between the layers has no finite Lipschitz constant")
    margin = usual_margin(margins)
    ranks = total((layer.frobenius / layer.spectral) ** 2 for layer in chain.layers if layer.spectral)
    capacity = chain.product("spectral") ** 2 * ranks
    factor = reach**2 * (chain.depth**2 * chain.width * math.log(chain.depth * chain.width))
    excess = ((capacity * factor + math.log(chain.depth * size / delta)) / size).sqrt() / margin
    below = float((margins <= margin).double().mean())
    parts = {
        "share of margins below": below, "margin": margin, "∏‖A‖₂": chain.product("spectral"), "Σ‖A‖_F²/‖A‖₂²": ranks,
        "largest ‖x‖": reach, "layers": chain.depth, "width": chain.width, "excess": excess,
    }  # fmt: skip
    return excess + Magnitude(below), parts


@bounds_of(NAME)
def neyshabur2018(setting: Setting) -> Iterator[Bound]:
    """A measure: the paper states no constant."""
    network = setting.network
    value, parts = neyshabur(network, setting.train.margins, setting.train.norms, setting.delta)
    assumptions = ["1 stands for the constant that the paper hides in O(·)", *network.notes]
    yield setting.bound(NAME, value, RISK, MEASURE, parts, assumptions, zero_one())
