"""Gradient flow θ' = −∇L − λθ, gradient descent beside it, and the quantities that the symmetries conserve along both.

For every scale group (that no bias has to follow) the charge Q = Σ d ‖w‖² (‖w‖² for a scale-free vector) obeys

    flow:     Q(t) = Q(0) exp(−2λt), conserved without decay (Akbar, Lemma 5.1; its −λ lacks a factor 2)
    descent:  Q ← (1 − ηλ)² Q + η² Σ d ‖∇L‖², so ‖w‖² grows by exactly η²‖∇L‖² at a step without decay
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp

from normscope.core.codec import numbers, plain
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.papers import Plot
from normscope.core.rendering import Text
from normscope.core.result import Result
from normscope.core.twins import twin_of
from normscope.core.vector_layout import VectorLayout
from normscope.geometry.groups import SCALES, Symmetries, SymmetryGroup, charges, self_contained

Loss = Callable[[Any, Any], torch.Tensor]  # (outputs, targets) → scalar


@dataclass(frozen=True, repr=False)
class Path(Result):
    """Parameters on their way downhill, in float64.

    times: (points,), steps for descent. losses and gradient_norms: (points,). charges and expected: for every scale group, named by
    its parameters, what was measured and what the law says, (points, count). states: the parameters at every point.
    """

    schema = "normscope.path/1"

    times: torch.Tensor
    losses: torch.Tensor
    gradient_norms: torch.Tensor
    charges: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    states: list[dict[str, torch.Tensor]] = field(repr=False)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Those at the end."""
        if not self.states:
            raise InputError("this path was read from a file, which holds no parameters")
        return self.states[-1]

    @property
    def defect(self) -> float:
        """The largest |Q − expected| relative to the largest of both in its group: what ε, rounding and the integrator do."""
        pairs = [(self.charges[name], law) for name, law in self.expected.items()]
        sizes = [float(torch.maximum(charge.abs(), law.abs()).max()) or 1.0 for charge, law in pairs]
        gaps = [float((charge - law).abs().max()) for charge, law in pairs]
        return max((gap / size for gap, size in zip(gaps, sizes, strict=True)), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the parameters themselves."""
        laws = {name: {"measured": self.charges[name], "expected": law} for name, law in self.expected.items()}
        lines = {"times": self.times, "losses": self.losses, "gradient_norms": self.gradient_norms}
        return {"schema": self.schema, **plain({**lines, "charges": laws})}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Path:
        """The path that `to_dict` described, without the parameters."""
        times, losses, norms = (torch.from_numpy(numbers(content[name])) for name in ("times", "losses", "gradient_norms"))
        measured, expected = (
            {name: torch.from_numpy(numbers(law[kind])) for name, law in content["charges"].items()}
            for kind in ("measured", "expected")
        )
        return cls(times, losses, norms, measured, expected, [])

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """loss: against the time."""
        from normscope.report.plots import plot

        drawn = Plot("Loss on the way downhill", "time", "loss", {"loss": (self.times.tolist(), self.losses.tolist())})
        return {"loss": partial(plot, drawn)}

    def render(self) -> Text:
        ends = f"loss {float(self.losses[0]):.4g} → {float(self.losses[-1]):.4g}"
        kept = f"{len(self.expected)} scale groups obey their law up to {self.defect:.2g}"
        return Text(f"{len(self.times)} points up to {float(self.times[-1]):g}: {ends}; {kept}")


@earlier(positional=5)
def gradient_flow(
    model: torch.nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    duration: float,
    symmetries: Symmetries,
    weight_decay: float = 0.0,
    points: int = 21,
    tolerance: float = 1e-6,
) -> Path:
    """Integrate θ' = −∇L(θ) − λθ on one batch for a time, with an adaptive Runge–Kutta method of order 8.

    The model keeps its mode and is not changed: a copy of it in float64 moves.

    loss: of (outputs, targets).
    batch: (inputs, targets).
    duration: how long to flow.
    symmetries: what `ns.symmetries` returned for the model; the path measures the charges of its scale groups.
    weight_decay: λ.
    points: how many states to keep, at equal times.
    tolerance: relative, of the integrator. Where the flow slides along the kink of a ReLU it takes many small steps, the more the
    smaller the tolerance.
    """
    objective = _Objective(model, loss, batch)
    if not duration > 0 or points < 2:
        raise InputError(f"a flow takes a positive duration and at least 2 points, got {duration} and {points}")
    times = np.linspace(0, duration, points)
    start = objective.start.numpy()

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        return -objective.gradient(flat)[1] - weight_decay * flat

    scale = np.abs(start).max() or 1.0
    solution = solve_ivp(velocity, (0, duration), start, method="DOP853", t_eval=times, rtol=tolerance, atol=tolerance * scale)
    if not solution.success:
        raise InputError(f"the flow stopped at time {solution.t[-1] if len(solution.t) else 0:g}: {solution.message}")
    states = [objective.named(flat) for flat in solution.y.T]
    measured = _measure(symmetries, states)
    decay = torch.from_numpy(np.exp(-2 * weight_decay * times))[:, None]
    expected = {name: values[:1] * decay for name, values in measured.items()}
    losses, norms = _losses_and_norms([objective.gradient(flat) for flat in solution.y.T])
    return Path(torch.from_numpy(times), losses, norms, measured, expected, states)


@earlier(positional=4)
def gradient_descent(
    model: torch.nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    lr: float,
    steps: int,
    symmetries: Symmetries,
    weight_decay: float = 0.0,
) -> Path:
    """θ ← θ − η(∇L + λθ) on one batch, in float64; `expected` is the law of one step applied to the charge before it.

    lr: η.
    steps: how many to take; each is a state of the path.
    loss, batch, symmetries, weight_decay: as in `gradient_flow`.
    """
    objective = _Objective(model, loss, batch)
    flat = objective.start.numpy()
    states, seen = [objective.named(flat)], [objective.gradient(flat)]
    for _ in range(steps):
        flat = flat - lr * (seen[-1][1] + weight_decay * flat)
        states.append(objective.named(flat))
        seen.append(objective.gradient(flat))
    measured = _measure(symmetries, states)
    expected = dict(measured)
    if steps:
        for name, growth in _measure(symmetries, [objective.named(gradient) for _, gradient in seen[:-1]]).items():
            kept = (1 - lr * weight_decay) * (1 - lr * weight_decay) * measured[name][:-1]
            expected[name] = torch.cat([measured[name][:1], kept + lr * lr * growth])  # lr**2 would raise where it overflows
    return Path(torch.arange(steps + 1), *_losses_and_norms(seen), measured, expected, states)


def _losses_and_norms(seen: list[tuple[float, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    losses, gradients = zip(*seen, strict=True)
    norms = [np.linalg.norm(gradient) for gradient in gradients]
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)


class _Objective:
    """The loss of one batch as a function of all parameters in a row, in float64."""

    def __init__(self, model: torch.nn.Module, loss: Loss, batch: tuple[Any, Any]) -> None:
        self._model = twin_of(model).double()
        self._loss = loss
        self._inputs, self._targets = (_double(part) for part in batch)
        self._parameters = dict(self._model.named_parameters())
        if not self._parameters:
            raise InputError("the model has no parameters, so nothing flows")
        self._layout = VectorLayout(self._parameters)
        self.start = self._layout.flatten(self._parameters)
        with torch.random.fork_rng(devices=[]):
            state = torch.random.get_rng_state()
            self.gradient(self.start.numpy())
            if not torch.equal(state, torch.random.get_rng_state()):
                raise InputError("the loss draws random numbers: switch off what is random, such as dropout")

    def named(self, flat: np.ndarray) -> dict[str, torch.Tensor]:
        return self._layout.unflatten(torch.from_numpy(flat.copy()))

    def gradient(self, flat: np.ndarray) -> tuple[float, np.ndarray]:
        """(L, ∇L)."""
        with torch.no_grad():
            for name, value in self.named(flat).items():
                self._parameters[name].copy_(value)
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            value = self._loss(self._model(self._inputs), self._targets)
        found = torch.autograd.grad(value, list(self._parameters.values()), allow_unused=True, materialize_grads=True)
        return float(value.detach()), self._layout.join(found).numpy()


def _double(part: Any) -> Any:
    return part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part


def _measure(symmetries: Symmetries, states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    groups = [group for group in symmetries.groups if group.kind in SCALES]
    if missing := {name for group in groups for name in group.parameters} - set(states[0]):
        raise InputError(f"the model has no parameter {min(missing)!r}, which the report names")
    contained = [group for group in groups if self_contained(group, states[0])]
    return {_label(group): torch.stack([charges(group, state) for state in states]) for group in contained}


def _label(group: SymmetryGroup) -> str:
    return f"{group.kind}: {' + '.join(group.parameters)}"
