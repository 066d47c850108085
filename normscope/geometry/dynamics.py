"""How fast scale-free vectors turn: angles per step, effective learning rates, and the rotation at equilibrium.

For a scale-free w only its direction matters, so a step counts by the angle that it turns. SGD turns it by η‖∇L‖/‖w‖ with ‖∇L‖
proportional to 1/‖w‖, Adam-like rules by η/‖w‖ up to a constant. Weight decay shrinks ‖w‖ and steps grow it, until both balance
and the angle per step settles at a value that depends on the settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.geometry.families import scale_free_families
from normscope.geometry.groups import Symmetries
from normscope.geometry.sphere import distance, norm

KINDS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class UpdateRule:
    """How an optimizer moves a parameter: its kind, and the settings on which rotation depends.

    kind: "sgd", "adam" (weight decay in the gradient) or "adamw" (decoupled). momentum: μ of SGD, β₁ of Adam.
    """

    kind: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"an update rule must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not (self.lr >= 0 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise InputError(f"learning rate and weight decay must be at least 0 and momentum in [0, 1), got {self}")

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: int = 0) -> UpdateRule:
        """The rule of torch's SGD, Adam or AdamW for one of its parameter groups."""
        return cls.with_settings(optimizer, optimizer.param_groups[group])

    @classmethod
    def with_settings(cls, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> UpdateRule:
        """The rule of such an optimizer for a parameter group with these settings."""
        common = {"lr": float(settings["lr"]), "weight_decay": float(settings["weight_decay"])}
        if isinstance(optimizer, torch.optim.SGD):
            if settings["dampening"]:
                raise InputError("no theory here covers SGD with dampening")
            return cls("sgd", momentum=settings["momentum"], **common)
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one too
            decoupled = isinstance(optimizer, torch.optim.AdamW) or settings.get("decoupled_weight_decay", False)
            return cls("adamw" if decoupled else "adam", momentum=float(settings["betas"][0]), **common)
        raise InputError(f"the theory covers torch's SGD, Adam and AdamW, not {type(optimizer).__name__}")

    def effective_learning_rate(self, norms: torch.Tensor) -> torch.Tensor:
        """The learning rate of the direction w/‖w‖: η/((1 − μ)‖w‖²) for SGD with momentum μ, η/‖w‖ for Adam-like rules."""
        return effective_learning_rate(norms, self.lr, kind=self.kind, momentum=self.momentum)

    def equilibrium_rotation(self) -> float:
        """The angle per step at which decay and growth of ‖w‖ balance, for small angles and gradients like noise.

        √(2ηλ/(1 + μ)) for SGD, √(2ηλ(1 − β₁)/(1 + β₁)) for AdamW.
        """
        if self.kind == "adam":
            raise InputError("Adam with decay in the gradient has no closed form here: its decay is divided by √v; use AdamW")
        product = 2 * self.lr * self.weight_decay / (1 + self.momentum)
        return math.sqrt(product if self.kind == "sgd" else product * (1 - self.momentum))


@earlier(positional=2)
def effective_learning_rate(norms: torch.Tensor, lr: float, *, kind: str = "sgd", momentum: float = 0.0) -> torch.Tensor:
    """The learning rate of the direction of scale-free vectors with these norms; infinite for a zero vector.

    η/((1 − μ)‖w‖²) for SGD with momentum μ, η/‖w‖ for "adam" and "adamw".

    >>> effective_learning_rate(torch.tensor([1.0, 2.0]), lr=0.1, momentum=0.9)
    tensor([1.0000, 0.2500])

    norms: ‖w‖ of each vector.
    lr: η.
    kind: "sgd", "adam" or "adamw".
    momentum: μ, of SGD.
    """
    if kind not in KINDS:
        raise InputError(f"an update rule must be one of {', '.join(KINDS)}, got {kind!r}")
    return lr / (1 - momentum) / norms / norms if kind == "sgd" else lr / norms  # the square of a norm may not be in its type


class Rotation:
    """Measures how far each scale-free vector of a model turns between calls.

    rotation = Rotation(model, report); … optimizer.step(); angles = rotation.step()
    """

    def __init__(self, model: torch.nn.Module, symmetries: Symmetries) -> None:
        self.families, self.left_out = scale_free_families(symmetries, dict(model.named_parameters()))
        self._before = [self._rows(family) for family in self.families]

    @staticmethod
    def _rows(family: Any) -> torch.Tensor:
        return family.vectors.gather([parameter.detach() for parameter in family.parameters]).clone()

    def step(self) -> dict[str, torch.Tensor]:
        """The angle in radians that each vector turned since the last call, (count,), by the names of its parameters."""
        after = [self._rows(family) for family in self.families]
        pairs = zip(self.families, self._before, after, strict=True)
        angles = {" + ".join(family.names): distance(*rows).squeeze(1) for family, *rows in pairs}
        self._before = after
        return angles

    def norms(self) -> dict[str, torch.Tensor]:
        """‖w‖ of each vector at the last call, (count,)."""
        pairs = zip(self.families, self._before, strict=True)
        return {" + ".join(family.names): norm(rows).squeeze(1) for family, rows in pairs}
