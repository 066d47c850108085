"""What a GradScaler does to a step. Most optimizers get unscaled gradients, and no step where one of these is not finite; fused
ones unscale in their kernel and skip the step themselves, as the scaler tells them in two attributes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from normscope._watch.transfer import HOST
from normscope._watch.unrecorded import aside

FRAMES = 40  # how far up a GradScaler is looked for


def active_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler whose `step` called the optimizer, if one did: the backward pass ran on a loss of that scale."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(owner, torch.amp.GradScaler):
            return owner
    return None


def scale_left_to(optimizer: torch.optim.Optimizer) -> Any:
    """The scale that the optimizer divides its gradients by in this step; None where they are unscaled."""
    return vars(optimizer).get("grad_scale")


def may_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer skips this step if a gradient is not finite."""
    return vars(optimizer).get("found_inf") is not None


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does skip this step. On an accelerator that is never asked: the answer would have to be waited for."""
    found = vars(optimizer).get("found_inf")
    return isinstance(found, torch.Tensor) and found.device.type in HOST and _read(found)


@aside
def _read(found: torch.Tensor) -> bool:
    return bool(found)
