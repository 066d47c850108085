"""Than 2025, *The Hidden Power of Normalization Layers*: Theorem 20, Corollaries 21 and 22.

    F(P, h) ≤ F(D, h) + Σ_{i∈T} (m_i/m) λ_i L_i + g(D, δ)

for cells of pairs (x, y) that were fixed before D was looked at. The bound holds for all models at once (docs/laws.md), so h may
have been trained on D. λ_i L_i stands for how much the loss can rise in a cell, so it is cut at C − F(D_i, h); the remainder, which
no ball holds, is given all of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from normscope.bounds.bound import CERTIFIED, ESTIMATE, GAP, MEASURE, RISK, Bound, Part
from normscope.bounds.cellwise import Cellwise
from normscope.bounds.constants import global_constants, local_constants
from normscope.bounds.table import NotApplicable, bounds_of
from normscope.bounds.uncertainty import sharper_uncertainty, stated_uncertainty
from normscope.core.magnitude import Magnitude, product

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

INDEPENDENT = "training samples are independent draws from P; held-out points, which shape the cells, are independent of them"
AS_THEY_STAND = "constants are proved with the parameters as they stand: not invariant under symmetries of scale"
EVALUATED = "losses of samples, evaluated in the model's own arithmetic, are those of the function that was certified"
ASSUMED = (INDEPENDENT, AS_THEY_STAND, EVALUATED)
MEASURED_DISTANCE = "λ_i is the mean distance to held-out points"
FARTHEST = "λ_i is the farthest distance in a cell's ball"
ROUNDING = 1e-9  # relative: float64 sums over cells

Constants = Callable[["Setting", Cellwise], torch.Tensor]  # ln L_i
Uncertainty = Callable[["Setting", Cellwise], float]


def stated(setting: Setting, rows: Cellwise) -> float:
    """g(D, δ) with this partition's share of δ."""
    return stated_uncertainty(
        len(rows.counts), rows.pairs, int(rows.counts.sum()), setting.loss.bound, setting.delta / rows.chances
    )


def sharper(setting: Setting, rows: Cellwise) -> float:
    """The sharper g(D, δ), likewise."""
    return sharper_uncertainty(rows.counts, rows.pairs, setting.loss.bound, setting.delta / rows.chances)


def largest_gradients(setting: Setting, rows: Cellwise) -> torch.Tensor:
    """ln of the largest ‖∇_x f‖ of each row's samples."""
    if setting.loss.slope == math.inf:
        raise NotApplicable("the gradient of a loss that jumps is 0 wherever it exists, and says nothing about its jumps")
    return rows.slopes.log()


def largest_ratios(setting: Setting, rows: Cellwise) -> torch.Tensor:
    """ln of the largest difference quotient of the loss between a row's samples and the centre of their cell."""
    return rows.ratios.log()


@dataclass(frozen=True)
class Version:
    """One way to fill in the theorem: where L_i and λ_i come from, and which g."""

    title: str
    constants: Constants
    measured: bool = False  # L_i were found on samples, not proved
    uncertainties: Mapping[str, Uncertainty] = field(default_factory=lambda: {"": stated})  # by what they add to the title

    def bounds(self, setting: Setting) -> Iterator[Bound]:
        """For each g the least over the partitions tried, among which δ is split."""
        place = "Corollary 21" if setting.loss.slope == math.inf else "Theorem 20"
        known = [(rows, self.constants(setting, rows)) for rows in setting.cells]
        for addition, uncertainty in self.uncertainties.items():
            name = f"Than 2025, {place}, {self.title}{addition}"
            found = [self._bound(setting, name, rows, constants, uncertainty(setting, rows)) for rows, constants in known]
            yield min(found, key=lambda bound: bound.value)

    def _bound(self, setting: Setting, name: str, rows: Cellwise, constants: torch.Tensor, uncertain: float) -> Bound:
        by_held_out = self.measured and bool(rows.locator.held_out.any())
        distances = rows.estimated_distance if by_held_out else rows.largest_distance
        caps = setting.loss.bound - rows.losses
        rises = torch.where(rows.remainder, caps, torch.minimum((constants + distances.log()).exp().nan_to_num(0, torch.inf), caps))
        spread, inside = float(rows.weights @ rises), ~rows.remainder
        parts: dict[str, Part] = {
            "F(D, h)": setting.train.risk,
            "Σ (m_i/m) λ_i L_i": spread,
            "g(D, δ)": uncertain,
            **_shape(setting, rows),
            "m_i": rows.counts[inside].long(),
            "λ_i": distances[inside],
            **_shown_constants(constants[inside]),
            "λ_i L_i, cut": rises[inside],
            "rows at the cut": int((rises >= caps).sum()),
        }
        value = (setting.train.risk + spread + uncertain) * (1 + ROUNDING)
        if not self.measured:
            return setting.bound(name, value, RISK, CERTIFIED, parts, ASSUMED)
        origin = [f"L_i is the {self.title} on samples", MEASURED_DISTANCE if by_held_out else FARTHEST]
        return setting.bound(name, value, RISK, ESTIMATE, parts, [INDEPENDENT, EVALUATED, *origin])


def _shown_constants(logarithms: torch.Tensor) -> dict[str, Part]:
    """L_i, by their logarithms where floats do not reach."""
    beyond = logarithms.isfinite() & logarithms.exp().isinf()
    return {"log10 L_i": logarithms / math.log(10)} if bool(beyond.any()) else {"L_i": logarithms.exp()}


def _shape(setting: Setting, rows: Cellwise) -> dict[str, Part]:
    """The ingredients that every bound over cells has."""
    return {
        "C": setting.loss.bound,
        "m": int(rows.counts.sum()),
        "N": rows.pairs,
        "|T|": len(rows.counts),
        "δ": setting.delta,
        "partition": f"{rows.cells.name}, one of {rows.chances} tried" if rows.chances > 1 else rows.cells.name,
        "samples in the remainder": int(rows.counts[rows.remainder].sum()),
    }


VERSIONS = {
    "Than 2025, local constants": Version("local constants", local_constants, False, {"": stated, ", sharper g": sharper}),
    "Than 2025, global constant": Version("global constant", global_constants),
    "Than 2025, largest gradient": Version("largest gradient", largest_gradients, True),
    "Than 2025, largest ratio": Version("largest ratio", largest_ratios, True),
}

for _name, _version in VERSIONS.items():
    bounds_of(_name, cellwise=True)(_version.bounds)


@bounds_of("Than 2025, Corollary 22", cellwise=True)
def corollary_22(setting: Setting) -> Iterator[Bound]:
    """F(P, h) − F(D, h) ≤ g(D, δ) + L_f P_w Σ (m_i/m) λ_i, times σ^-K with BN and ∏1/σ_k with LN, nothing cut.

    P_w = ∏‖W_k‖. BN: σ = min_k ‖1/σ_k‖⁻¹ over the K normalizers; LN: σ_k the least over the training sample. γ is left out, as in
    the paper. Certified where the product is at least the constant that was proved for the model, else the number as printed.
    """
    if setting.loss.slope is None or setting.loss.slope == math.inf:
        raise NotApplicable("it needs a loss that is Lipschitz in the outputs, with a known slope")
    weights = product(row.spectral_norm for row in setting.layers if row.spectral_norm is not None)
    normalizers = [row for row in setting.layers if row.gain_paper is not None]
    gains = [row.gain_paper for row in normalizers if row.gain_paper is not None]
    forms = {"(14), without normalizers": Magnitude(1)}
    if gains and all(row.kind == "batch_norm" for row in normalizers):
        forms["(BN)"] = max(gains) ** len(gains)
    elif gains:
        forms["(LN)"] = product(gains)
    for form, factor in forms.items():
        found = [_corollary_22(setting, rows, form, weights, factor) for rows in setting.cells]
        yield min(found, key=lambda bound: bound.value)


def _corollary_22(setting: Setting, rows: Cellwise, form: str, weights: Magnitude, factor: Magnitude) -> Bound:
    assert setting.loss.slope is not None
    distance = float(rows.weights @ torch.where(rows.remainder, 0.0, rows.largest_distance))
    outside = float(rows.weights @ torch.where(rows.remainder, setting.loss.bound - rows.losses, 0.0))
    rise = weights * factor * setting.loss.slope * distance
    parts: dict[str, Part] = {
        "g(D, δ)": stated(setting, rows),
        "ω · factor": rise,
        "L_f": setting.loss.slope,
        "P_w = ∏‖W_k‖": weights,
        "factor of the normalizers": factor,
        "Σ (m_i/m) λ_i": distance,
        "(m_0/m)(C − F(D_0, h)) of the remainder": outside,
        **_shape(setting, rows),
    }
    proved = setting.constant <= weights * factor
    assumptions = [
        *ASSUMED,
        *([] if proved else ["the product bounds the network's constant, which was not proved"]),
    ]
    value = (rise + stated(setting, rows) + outside).widened(ROUNDING)
    return setting.bound(f"Than 2025, Corollary 22 {form}", value, GAP, CERTIFIED if proved else MEASURE, parts, assumptions)
