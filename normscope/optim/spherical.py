"""SGDG and AdamG (Cho & Lee 2017): scale-free vectors move on the spheres of their own norms, along geodesics.

With y = w/‖w‖ and the gradient on the sphere h = ‖w‖ ∇L − ⟨y, ‖w‖ ∇L⟩ y, clipped to ‖h‖ ≤ ν,

    SGDG:  m ← μ τ + h                 rate η
    AdamG: m ← β₁ τ + (1 − β₁) h       rate η/((1 − β₁ᵗ)(√(v/(1 − β₂ᵗ)) + ε)),  v ← β₂ v + (1 − β₂) ‖h‖², one number per vector

and then y ← exp_y(−rate · m), with τ the parallel transport of m to the new point. As ‖w‖ ∇L does not depend on ‖w‖, neither does
training; ‖w‖ stays what it was at the first step. η is `lr` · `sphere_ratio`: the angle turned by a gradient of norm 1. A zero
vector has no direction to keep: its first step is flat and gives it the norm that it then keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

import torch

from normscope.geometry.families import Family
from normscope.geometry.sphere import inner, norm
from normscope.optim.base import Detection, Matrices, Parameters, ScaleFreeOptimizer, Settings
from normscope.optim.family_rows import Rows
from normscope.optim.plain import step_adamw, step_sgd


class SphericalOptimizer(ScaleFreeOptimizer):
    """What SGDG and AdamG share: states, and the orthogonality penalty, which needs all vectors of a family at once."""

    def _rows(self, group: Settings, family: Family) -> Rows:
        rows = super()._rows(group, family)
        if group["orthogonality"]:
            point, gradient = rows.matrices[:2]
            rows.matrices[1] = gradient + _orthogonality_gradient(point, group["orthogonality"])
        return rows

    def _add_states(self, group: Settings, family: Family, rows: Rows) -> None:
        rows.add_entries(self._entry_state(family, "sphere_momentum"))
        rows.add_values(self._vector_state(family, "radius", lambda: norm(rows.matrices[0])))

    def _vector_state(self, family: Family, name: str, first: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A state with one value for each vector, (count, 1), kept with the family's first parameter."""
        parameter = family.parameters[0]
        if name not in self.state[parameter]:
            self.state[parameter][name] = first().to(parameter.dtype)
        return self.state[parameter][name]


class SGDG(SphericalOptimizer):
    """SGD with momentum on spheres for scale-free vectors; torch.optim.SGD on the rest, bit for bit.

    sphere_ratio: the learning rate on spheres over `lr`; the paper's are 0.2 and 0.01. clip: the largest norm ν of a gradient on
    its sphere. orthogonality: the weight α of the penalty α/2 ‖YYᵀ − I‖² on the unit vectors Y of each family. weight_decay
    and nesterov act on the rest only, as there is no decay on a sphere. The remaining arguments are those of torch.optim.SGD and
    ScaleFreeOptimizer.
    """

    _step_plain = staticmethod(step_sgd)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        sphere_ratio: float = 20.0,
        clip: float | None = 0.1,
        orthogonality: float = 0.0,
        *,
        foreach: bool | None = None,
        **detection: Unpack[Detection],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "foreach": foreach,
                    "sphere_ratio": sphere_ratio, "clip": clip, "orthogonality": orthogonality}  # fmt: skip
        super().__init__(params, defaults, **detection)

    def _move(self, group: Settings, number: float, points: Matrices, gradients: Matrices, *states: Matrices) -> None:
        rate = float(group["lr"]) * group["sphere_ratio"]
        for point, gradient, momentum, radius in zip(points, gradients, *states, strict=True):
            unit, tangent = _unit_and_tangent(point, gradient, group["clip"])
            momentum.mul_(group["momentum"]).add_(tangent)
            _turn(point, unit, momentum, radius, torch.full_like(radius, rate))


class AdamG(SphericalOptimizer):
    """Adam on spheres for scale-free vectors, with one second moment per vector; torch.optim.AdamW on the rest, bit for bit.

    sphere_ratio: the learning rate on spheres over `lr`; η = 0.05 in the paper. clip, orthogonality and weight_decay as in SGDG.
    The remaining arguments are those of torch.optim.Adam and ScaleFreeOptimizer.
    """

    _step_plain = staticmethod(step_adamw)

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        sphere_ratio: float = 50.0,
        clip: float | None = 0.1,
        orthogonality: float = 0.0,
        *,
        foreach: bool | None = None,
        **detection: Unpack[Detection],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach,
                    "sphere_ratio": sphere_ratio, "clip": clip, "orthogonality": orthogonality}  # fmt: skip
        super().__init__(params, defaults, **detection)

    def _add_states(self, group: Settings, family: Family, rows: Rows) -> None:
        super()._add_states(group, family, rows)
        rows.add_values(self._vector_state(family, "sphere_avg_sq", lambda: torch.zeros_like(rows.matrices[-1])))

    def _move(self, group: Settings, number: float, points: Matrices, gradients: Matrices, *states: Matrices) -> None:
        beta1, beta2 = group["betas"]
        step = float(group["lr"]) * group["sphere_ratio"] / (1 - beta1**number)
        for point, gradient, momentum, radius, square in zip(points, gradients, *states, strict=True):
            unit, tangent = _unit_and_tangent(point, gradient, group["clip"])
            momentum.mul_(beta1).add_(tangent, alpha=1 - beta1)
            square.mul_(beta2).add_(inner(tangent, tangent), alpha=1 - beta2)
            _turn(point, unit, momentum, radius, step / ((square / (1 - beta2**number)).sqrt() + group["eps"]))


def _unit_and_length(point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as y = w/‖w‖ and ‖w‖; a zero row as itself and 1."""
    length = norm(point)
    length = torch.where(length > 0, length, 1)
    return point / length, length


def _unit_and_tangent(point: torch.Tensor, gradient: torch.Tensor, clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit rows y, and the gradient of the loss as a function of them: tangent, of norm at most `clip`."""
    unit, length = _unit_and_length(point)
    tangent = gradient * length
    tangent.addcmul_(unit, inner(unit, tangent), value=-1)
    if clip is not None:
        tangent.mul_((clip / torch.linalg.vector_norm(tangent, dim=1, keepdim=True)).clamp_(max=1))
    return unit, tangent


def _turn(point: torch.Tensor, unit: torch.Tensor, momentum: torch.Tensor, radius: torch.Tensor, rate: torch.Tensor) -> None:
    """y ← exp_y(−rate · m), and m transported with it, for rows in place; θ = rate ‖m‖.

    y' = cos θ y − rate (sin θ/θ) m and m' = cos θ m + sin θ ‖m‖ y: a rotation in the plane of y and m.
    """
    length = torch.linalg.vector_norm(momentum, dim=1, keepdim=True)
    angle = rate * length
    turned = unit * angle.cos() - momentum * (rate * torch.sinc(angle / math.pi))
    on_sphere = radius > 0
    momentum.mul_(angle.cos() * on_sphere).addcmul_(unit, angle.sin() * length)
    size = torch.linalg.vector_norm(turned, dim=1, keepdim=True)
    radius.copy_(torch.where(on_sphere, radius, size))
    torch.mul(turned, radius / torch.where(size > 0, size, 1), out=point)


def _orthogonality_gradient(point: torch.Tensor, weight: float) -> torch.Tensor:
    """∇ of α/2 ‖YYᵀ − I‖² with respect to w = ‖w‖ y, up to its radial part: 2α (YYᵀ − I) Y/‖w‖."""
    unit, length = _unit_and_length(point)
    overlap = unit @ unit.T
    overlap.diagonal().sub_(1)
    return 2 * weight * (overlap @ unit) / length
