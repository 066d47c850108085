"""Sharpness both ways: the largest eigenvalue where the weights stand, and with the symmetries divided out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from normscope.core.data import Data
from normscope.curvature.objective import Loss
from normscope.curvature.spectrum import Condition, Curvature, Eigenpair, hessian


@dataclass(frozen=True)
class Sharpness:
    """λ_max and κ of one matrix. The plain λ_max of a scale-free weight falls as 1/‖w‖²; in the quotient it does not."""

    largest: Eigenpair
    condition: Condition
    quotient: bool

    @staticmethod
    def of(curvature: Curvature, tolerance: float = 1e-3) -> Sharpness:
        return Sharpness(curvature.top(1, tolerance=tolerance)[0], curvature.condition(), curvature.symmetries is not None)

    def __str__(self) -> str:
        where = "in the quotient" if self.quotient else "where the weights stand"
        return f"λ_max = {self.largest.value:.4g} ± {self.largest.error:.1g}, {self.condition}, {where}"


def sharpness(model: nn.Module, loss: Loss, batches: Data, mode: str = "train", **options: Any) -> tuple[Sharpness, Sharpness]:
    """Plain and quotient; options are those of `ns.hessian`."""
    plain, divided = (
        Sharpness.of(hessian(model, loss, batches, mode=mode, quotient=quotient, **options)) for quotient in (False, True)
    )
    return plain, divided
