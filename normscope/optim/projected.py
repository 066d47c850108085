"""SGDP and AdamP (Heo et al. 2021): steps without their radial part, so that norms of scale-free vectors grow only slowly.

For a scale-free vector y and the direction u of SGD or Adam,

    y ← (1 − κ) y − η (u − ⟨y, u⟩ y/‖y‖²),

with κ the decay: ηλρ for AdamP and ηλρ/(1 − μ) for SGDP, λ the weight decay, ρ `decay_ratio`, μ the momentum. A zero vector has no
radial part and makes the plain step.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch

from normscope.geometry.families import Family
from normscope.geometry.sphere import inner, norm
from normscope.optim.base import Detection, Matrices, Parameters, ScaleFreeOptimizer, Settings
from normscope.optim.family_rows import Rows
from normscope.optim.plain import step_adamw, step_sgd


class SGDP(ScaleFreeOptimizer):
    """SGD with momentum whose steps on scale-free vectors have no radial part; torch.optim.SGD on the rest, bit for bit.

    decay_ratio: what share of the weight decay scale-free vectors get. The remaining arguments are those of torch.optim.SGD and of
    ScaleFreeOptimizer.
    """

    _step_plain = staticmethod(step_sgd)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decay_ratio: float = 0.1,
        *,
        foreach: bool | None = None,
        **detection: Unpack[Detection],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov,
                    "decay_ratio": decay_ratio, "foreach": foreach}  # fmt: skip
        super().__init__(params, defaults, **detection)

    def _add_states(self, group: Settings, family: Family, rows: Rows) -> None:
        if group["momentum"]:
            rows.add_entries(self._entry_state(family, "momentum_buffer"))

    def _move(self, group: Settings, number: float, points: Matrices, gradients: Matrices, *states: Matrices) -> None:
        momentum, directions = group["momentum"], gradients
        if momentum:
            (momenta,) = states
            for buffer, gradient in zip(momenta, gradients, strict=True):
                torch.add(gradient, buffer, alpha=momentum, out=buffer)
            directions = torch._foreach_add(gradients, momenta, alpha=momentum) if group["nesterov"] else momenta
        lr = float(group["lr"])
        _projected_step(points, directions, lr, lr * group["weight_decay"] * group["decay_ratio"] / (1 - momentum))


class AdamP(ScaleFreeOptimizer):
    """Adam whose steps on scale-free vectors have no radial part; on the rest torch.optim.AdamW, bit for bit.

    decay_ratio: what share of the weight decay scale-free vectors get. The remaining arguments are those of torch.optim.Adam and of
    ScaleFreeOptimizer. Decay is decoupled, as in the paper, so that without it the rest is torch.optim.Adam.
    """

    _step_plain = staticmethod(step_adamw)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decay_ratio: float = 0.1,
        *,
        foreach: bool | None = None,
        **detection: Unpack[Detection],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decay_ratio": decay_ratio,
                    "foreach": foreach}  # fmt: skip
        super().__init__(params, defaults, **detection)

    def _add_states(self, group: Settings, family: Family, rows: Rows) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            rows.add_entries(self._entry_state(family, name))

    def _move(self, group: Settings, number: float, points: Matrices, gradients: Matrices, *states: Matrices) -> None:
        averages, squares = states
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # m̂/(√v̂ + ε) = m/(√v + ε √c₂) · √c₂/c₁ with cᵢ = 1 − βᵢᵗ: the correction costs no pass over the entries
        correction = math.sqrt(1 - beta2**number)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, group["eps"] * correction)
        directions = torch._foreach_div(averages, denominators)
        lr = float(group["lr"])
        decay = lr * group["weight_decay"] * group["decay_ratio"]
        _projected_step(points, directions, lr * correction / (1 - beta1**number), decay)


def _projected_step(points: Matrices, directions: Matrices, rate: float, decay: float) -> None:
    """y ← (1 − decay + rate ⟨y, u⟩/‖y‖²) y − rate u, for rows, in place."""
    factors = [_radial_factor(*pair, rate, decay) for pair in zip(points, directions, strict=True)]
    torch._foreach_mul_(points, factors)
    torch._foreach_add_(points, directions, alpha=-rate)


def _radial_factor(point: torch.Tensor, direction: torch.Tensor, rate: float, decay: float) -> torch.Tensor:
    """1 − decay + rate ⟨y, u⟩/‖y‖² of every row; where y = 0 the inner product is 0, and so is its share."""
    length = norm(point)
    length = torch.where(length > 0, length, 1)
    return torch.addcdiv(point.new_tensor(1 - decay), inner(point / length, direction), length, value=rate)
