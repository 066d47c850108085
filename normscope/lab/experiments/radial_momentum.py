"""Momentum along scale-free weights: no gradient points there, yet momentum does, and norms grow faster for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings, less
from normscope.lab.models import build
from normscope.lab.training import shuffled
from normscope.lab.workspace import Workspace
from normscope.optim.projected import SGDP
from normscope.symmetry.detect import symmetries

SMALL = 1e-3  # relative: a gradient's radial part, or a change of the loss, that does not count
EXACT = 0.01  # relative, of the predicted growth
SHARES = ("norm", "gradient_share", "momentum_share")
COASTING = 100  # steps without gradient
EVERY = 10  # steps between two records


@dataclass(frozen=True)
class Coasting:
    """rate: of learning, divided by 1 − momentum where there is momentum. projected: SGDP takes the steps."""

    momentum: float = 0.0
    projected: bool = False
    data: str = "digits"
    width: int = 64
    depth: int = 4
    steps: int = 400
    rate: float = 0.5
    batch_size: int = 128


@dataclass(frozen=True)
class MomentumSettings(Settings):
    momenta: tuple[float, ...] = (0.0, 0.5, 0.9)
    width: int = 64
    depth: int = 4
    steps: int = 400
    rate: float = 0.5


def trials(settings: MomentumSettings, seed: int) -> dict[str, Coasting]:
    if settings.steps < 1 or not settings.momenta or not all(0 <= momentum < 1 for momentum in settings.momenta):
        raise InputError("steps must be at least 1, and momenta must be from 0 to below 1")
    usual = Coasting(data=settings.data, width=settings.width, depth=settings.depth, steps=settings.steps, rate=settings.rate)
    found = {f"momentum {momentum:g}": replace(usual, momentum=momentum) for momentum in settings.momenta}
    largest = max(settings.momenta)
    return {**found, f"momentum {largest:g}, projected": replace(usual, momentum=largest, projected=True)}


@dataclass
class Growth:
    """How far ‖w‖² grows by steps w ← w − ηm, m ← αm + g with g ⊥ w.

    Then ⟨w, m⟩ = −c with c ← α(c + η‖m‖²), so that a step adds η²‖m‖² + 2ηc; where ‖m‖ is steady, (1 + α)/(1 − α) times the first
    term (Heo et al. 2021).
    """

    momentum: float
    rate: float
    carried: float = 0.0  # c
    steps: float = 0.0  # Σ η²‖m‖²
    predicted: float = 0.0

    def add(self, square: float) -> None:
        """A step, by its ‖m‖²."""
        self.steps += self.rate**2 * square
        self.predicted += self.rate**2 * square + 2 * self.rate * self.carried
        self.carried = self.momentum * (self.carried + self.rate * square)


def measure(trial: Coasting, workspace: Workspace) -> Numbers:
    """Train with BN and watch the rows of the weights before each BN, all of them scale-free; then let them coast."""
    split = workspace.data(trial.data)
    options = {"width": trial.width, "depth": trial.depth}
    model = build("mlp", split, "batch", workspace.generator("weights"), **options)[0].double().train()
    inputs, classes = split.train[0].double(), split.train[1]
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)][:-1]
    rate = trial.rate * (1 - trial.momentum)
    optimizer = _optimizer(trial, model, inputs[:2], rate)
    batches = _endless(classes, trial.batch_size, workspace.generator("order"))
    start, growth = _square(weights), Growth(trial.momentum, rate)
    history = []
    for step in range(1, trial.steps + 1):
        chosen = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(inputs[chosen]), classes[chosen]).backward()
        gradient = radial_share(weights, [_gradient(weight) for weight in weights])
        before, moves = _stepped(optimizer, weights)
        growth.add(_square(moves) / rate**2)
        if step % EVERY == 0 or step == trial.steps:
            shares = {"gradient_share": gradient, "momentum_share": radial_share(before, moves)}
            history.append({"epoch": step, "norm": math.sqrt(_square(weights) / start), **shares})
        workspace.progress(step, trial.steps)
    return {
        "growth": (_square(weights) - start) / growth.steps,
        "predicted": growth.predicted / growth.steps,
        **{name: history[-1][name] for name in SHARES},
        **coasted(model, (inputs, classes), optimizer, weights),
        "history": history,
    }


def coasted(model: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> Numbers:
    """What momentum alone still does: radial speed left at the end, and the change of the loss by the radial part of the way."""
    state = copy.deepcopy(model.state_dict())
    before = [weight.detach().clone() for weight in weights]
    loss = _loss(model, data)
    speeds = []
    for _ in range(COASTING):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        speeds.append(math.sqrt(_square(_radial(*_stepped(optimizer, weights)))))
    way = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    model.load_state_dict(state)
    with torch.no_grad():
        for weight, old, moved in zip(weights, before, _radial(before, way), strict=True):
            weight.copy_(old + moved)
    changed = abs(_loss(model, data) - loss) / loss
    return {"speed_left": speeds[-1] / speeds[0] if speeds[0] else 0.0, "loss_change": changed}


def radial_share(points: list[Tensor], directions: list[Tensor]) -> float:
    """‖radial part‖ / ‖direction‖, rows being the vectors; 0 for no direction."""
    whole = _square(directions)
    return math.sqrt(_square(_radial(points, directions)) / whole) if whole else 0.0


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        momentum, projected = (group[0].parameters[name] for name in ("momentum", "projected"))
        norm = Comparison(f"{label}: ‖w‖ at the end over the start", "", f"×{group.mean('norm'):.3f}")
        if projected:
            yield norm
            continue
        gradient, share = group.mean("gradient_share"), group.mean("momentum_share")
        yield Comparison(f"{label}: radial part of the gradient", "none", f"{gradient:.1e}", less(gradient, SMALL))
        growth, predicted = group.mean("growth"), group.mean("predicted")
        expected = f"×{predicted:.3f}, ×{(1 + momentum) / (1 - momentum):.3g} when steady (Heo et al. 2021)"
        near = less(abs(growth / predicted - 1), EXACT)
        yield Comparison(f"{label}: growth of ‖w‖² over the steps' squares", expected, f"×{growth:.3f}", near)
        yield norm
        if momentum:
            yield Comparison(f"{label}: radial part of the momentum", "still carries", f"{share:.1e}", less(gradient, share))
            left, changed = group.mean("speed_left"), group.mean("loss_change")
            quantity = f"{label}: radial speed left after {COASTING} steps of coasting"
            yield Comparison(quantity, "dissipates", f"{left:.1e}", less(left, SMALL))
            quantity = f"{label}: change of the loss by coasting radially"
            yield Comparison(quantity, "curbed by BN", f"{changed:.1e}", less(changed, SMALL))


def plots(results: Results) -> dict[str, Plot]:
    norms = {label: group.track("norm") for label, group in results.by_label().items()}
    shares = {label: group.track("momentum_share") for label, group in results.by_label().items()}
    return {
        "norms": Plot("Norm of scale-free weights", "step", "‖w‖ over its start", norms),
        "shares": Plot("Radial part of the step", "step", "share of the step's norm", shares),
    }


def _optimizer(trial: Coasting, model: nn.Module, example: Tensor, rate: float) -> torch.optim.Optimizer:
    if trial.projected:
        return SGDP(model.named_parameters(), rate, trial.momentum, symmetries=symmetries(model, example))
    return torch.optim.SGD(model.parameters(), rate, momentum=trial.momentum)


def _endless(classes: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from shuffled(classes, size, order)


def _stepped(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Where the weights were before a step, and what it took from them."""
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    return before, [old - weight.detach() for old, weight in zip(before, weights, strict=True)]


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _radial(points: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """The part of each row of the directions along the same row of the points."""
    pairs = [(point.detach(), direction.detach()) for point, direction in zip(points, directions, strict=True)]
    return [(w * d).sum(1, keepdim=True) / w.square().sum(1, keepdim=True) * w for w, d in pairs]


def _square(vectors: list[Tensor]) -> float:
    return float(sum(vector.detach().square().sum() for vector in vectors))


def _loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """With batch statistics, for in eval mode a weight's scale counts."""
    with torch.no_grad():
        return float(cross_entropy(model(data[0]), data[1]))


EXPERIMENT = Experiment(
    name="radial-momentum",
    source="Akbar, Section 9.5; Heo et al. 2021",
    statement="Radial components have no gradient, yet momentum could carry them; BN curbs the effect, which dissipates.",
    quick=MomentumSettings(),
    full=MomentumSettings(momenta=(0.0, 0.5, 0.9, 0.99), width=256, depth=10, steps=4000, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
