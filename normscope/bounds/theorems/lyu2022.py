"""Lyu, Li & Arora 2022, as Than 2025 quotes it (LLA): spherical sharpness bounds the risk of a smoothed predictor.

E_u F(P, h_{W+u}) ≤ F(D, h) + τμ²/2 + O(ln m)/(μ√m) + const with u normal of variance μ²/n: τ is the largest eigenvalue of the
loss's Hessian at unit-norm weights. Here it is that of the quotient by all of the model's symmetries
(`ns.hessian(quotient=True)`), which depends on the function alone; 1 stands for the hidden constant, and μ = (ln m/(τ√m))^{1/3}
is where the sum is least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.nn.functional import cross_entropy

from normscope.bounds.bound import MEASURE, RANDOMIZED, Bound
from normscope.bounds.folding import LARGEST_BALANCED
from normscope.bounds.sample import leading
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.core.errors import NormscopeError
from normscope.core.magnitude import Magnitude
from normscope.curvature.spectrum import hessian

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Lyu et al. 2022"
MOST_SAMPLES = 2048  # of the Hessian
TOLERANCE = 1e-2  # relative, of τ


def lyu(risk: float, sharpness: float, size: int) -> tuple[Magnitude, float]:
    """min_μ F + τμ²/2 + ln m/(μ√m), and the minimizer; with τ ≤ 0 or one sample the infimum F, at infinity or 0."""
    scale = math.log(size) / math.sqrt(size)
    if sharpness <= 0 or not scale:
        return Magnitude(risk), math.inf if scale else 0.0
    noise = (scale / sharpness) ** (1 / 3)
    return Magnitude(sharpness) ** (1 / 3) * (1.5 * scale ** (2 / 3)) + risk, noise


@bounds_of(NAME)
def lyu2022(setting: Setting) -> Iterator[Bound]:
    """A measure, on the cross-entropy loss of batch statistics, which is scale-invariant."""
    if sum(value.numel() for value in setting.model.parameters()) > LARGEST_BALANCED:
        raise NotApplicable(f"the quotient of more than {LARGEST_BALANCED:,} parameters takes too long: see ns.hessian")
    own = setting.train.error
    batches = [(batch.call.kwargs or batch.call.args, batch.target) for batch in leading(setting.train.batches, MOST_SAMPLES)]
    names = [name for name, value in setting.model.named_parameters() if value.is_floating_point()]
    try:
        curvature = hessian(setting.model, cross_entropy, batches, mode="train", quotient=True, parameters=names)
        sharpness = curvature.top(1, tolerance=TOLERANCE)[0].value
    except NormscopeError as error:
        raise NotApplicable(f"no spherical sharpness: {error}") from error
    value, noise = lyu(curvature.loss, sharpness, setting.train.size)
    parts = {
        "F(D, h)": curvature.loss,
        "τ": sharpness,
        "μ": noise,
        "samples of τ": sum(len(target) for _, target in batches),
        "error on D": own,
        "m": setting.train.size,
    }
    assumptions = (
        "1 stands for the constant that the paper hides in O(·), and its additive constant is left out",
        "τ is that of the training loss with batch statistics, in the quotient by all symmetries",
    )
    yield Bound(NAME, value, RANDOMIZED, "cross-entropy", math.inf, MEASURE, parts, assumptions)
