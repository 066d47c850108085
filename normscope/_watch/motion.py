"""How a weight moves: what follows from norms and dot products, of whole weights or of merged shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from normscope.core.errors import InputError
from normscope.geometry.dynamics import UpdateRule

ADAPTIVE = (
    "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Lion", "AdamP", "AdamG",
)  # fmt: skip
COVERED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
DESCENT = ("SGD", "ASGD", "SGDP", "SGDG")


def derived(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """update_ratio = ‖Δ‖/‖w‖, angle = ∠(w, w+Δ), radial_gradient = ⟨g, w⟩/(‖g‖‖w‖).

    The angle is atan2(‖Δ − ⟨Δ,ŵ⟩ŵ‖, ‖w‖ + ⟨Δ,ŵ⟩), which keeps its digits where an arc cosine loses them.
    """
    weight, gradient, update = (sums[name].astype(np.float64) for name in ("frobenius_norm", "gradient_norm", "update_norm"))
    with np.errstate(all="ignore"):
        radial = sums["update_dot_weight"].astype(np.float64) / weight
        across = np.sqrt(np.maximum(update**2 - radial**2, 0))
        return {
            "update_ratio": update / weight,
            "angle": np.arctan2(across, weight + radial),
            "radial_gradient": sums["gradient_dot_weight"].astype(np.float64) / (gradient * weight),
        }


def effective_power(optimizer: torch.optim.Optimizer) -> int | None:
    """p of the effective learning rate lr/‖w‖^p: 2 where the update is proportional to the gradient, 1 where it is normalized.

    None for an optimizer of unknown kind.
    """
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & set(DESCENT):
        return 2
    return 1 if names & set(ADAPTIVE) else None


def group_rate(group: Mapping[str, Any]) -> Any:
    """lr, with momentum α and dampening d lr(1−d)/(1−α): what a constant gradient moves a weight by in the long run."""
    momentum = group.get("momentum", 0) or 0
    return group["lr"] * (1 - (group.get("dampening", 0) or 0 if momentum else 0)) / (1 - momentum)


def equilibrium_factor(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """c of the angle c√lr by which a scale-free weight turns per step once decay and growth of its norm balance.

    NaN without weight decay, and for optimizers other than torch's SGD and AdamW.
    """
    if type(optimizer) not in COVERED or not isinstance(group["weight_decay"], (int, float)):
        return math.nan
    try:
        return UpdateRule.with_settings(optimizer, {**group, "lr": 1.0}).equilibrium_rotation() or math.nan
    except InputError:
        return math.nan


def effective_learning_rate(rate: np.ndarray, norm: np.ndarray, power: int) -> np.ndarray:
    """How fast the direction of a scale-free weight can turn: lr/‖w‖² for gradient descent, lr/‖w‖ for Adam and its like."""
    with np.errstate(all="ignore"):
        return rate / norm.astype(np.float64) ** power
