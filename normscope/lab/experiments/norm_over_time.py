"""Akbar's plot of weight norms over time: constant in gradient flow with BN, growing with the step in descent, decaying twice as
fast under weight decay as the paper says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from normscope.geometry.flow import gradient_descent, gradient_flow
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings
from normscope.lab.models import build
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

KEPT = 0.01  # the part by which a norm may change and still be called constant
FLOW = 0.0  # the learning rate of gradient flow
SHOWN = 100  # points of a plot


@dataclass(frozen=True)
class NormSettings(Settings):
    """learning_rates: 0 for gradient flow. duration: learning rate times steps. weight_decay: λ of θ' = −∇L − λθ."""

    learning_rates: tuple[float, ...] = (FLOW, 0.01, 0.1)
    weight_decay: float = 0.1
    duration: float = 4.0
    samples: int = 256
    width: int = 16
    depth: int = 3


@dataclass(frozen=True)
class Walk:
    normalizer: str
    learning_rate: float
    weight_decay: float
    data: str
    duration: float
    samples: int
    width: int
    depth: int


def trials(settings: NormSettings, seed: int) -> dict[str, Walk]:
    walks = [(kind, rate, 0.0) for kind in ("none", "batch") for rate in settings.learning_rates]
    walks += [("batch", FLOW, settings.weight_decay)]
    recipe = (settings.data, settings.duration, settings.samples, settings.width, settings.depth)
    return {f"{kind} {_way(rate)} decay {decay:g}": Walk(kind, rate, decay, *recipe) for kind, rate, decay in walks}


def measure(trial: Walk, workspace: Workspace) -> Numbers:
    split = workspace.data(trial.data).subset(trial.samples, workspace.generator("subset"))
    options = {"width": trial.width, "depth": trial.depth}
    model, split = build("mlp", split, trial.normalizer, workspace.generator("weights"), **options)
    report = symmetries(model.train(), split.train[0][:8])
    if trial.learning_rate == FLOW:
        path = gradient_flow(
            model,
            cross_entropy,
            split.train,
            duration=trial.duration,
            symmetries=report,
            weight_decay=trial.weight_decay,
            points=SHOWN,
        )
    else:
        steps = round(trial.duration / trial.learning_rate)
        path = gradient_descent(
            model,
            cross_entropy,
            split.train,
            lr=trial.learning_rate,
            steps=steps,
            symmetries=report,
            weight_decay=trial.weight_decay,
        )
    hidden = [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][:-1]
    norms = {name: torch.stack([state[name].norm() for state in path.states]) for name in hidden}
    relative = {name: values / values[0] for name, values in norms.items()}
    shown = range(0, len(path.times), max(1, len(path.times) // SHOWN))
    return {
        "norm_change": max(float((values - 1).abs().max()) for values in relative.values()),
        "exponent": _exponent(relative, trial) if trial.weight_decay else None,
        "law_defect": path.defect,
        "start_loss": float(path.losses[0]),
        "end_loss": float(path.losses[-1]),
        "times": [trial.duration * index / (len(path.times) - 1) for index in shown],
        "norms": {name: [float(values[index]) for index in shown] for name, values in relative.items()},
    }


def _exponent(relative: dict[str, torch.Tensor], trial: Walk) -> float:
    """The mean over layers of −log(‖w(T)‖²/‖w(0)‖²)/(λT)."""
    rates = [-2 * math.log(float(values[-1])) / (trial.weight_decay * trial.duration) for values in relative.values()]
    return sum(rates) / len(rates)


def judge(results: Results) -> Iterator[Comparison]:
    for (normalizer, rate, decay), group in results.groups("normalizer", "learning_rate", "weight_decay").items():
        what = f"{'BN' if normalizer == 'batch' else 'no BN'}, {_way(rate)}"
        change = max(group.values("norm_change"))
        if decay:
            exponent = group.mean("exponent")
            name = f"{what} with decay λ: k in ‖w‖² ∝ exp(−kλt)"
            yield Comparison(name, "1", f"{exponent:.3f}", abs(exponent - 1) < 0.05)
        elif normalizer == "none":
            yield Comparison(f"{what}: largest change of a layer's ‖W‖", "moves", f"{change:.2%}", change > KEPT)
        else:
            paper = "constant" if rate == FLOW else "nearly constant"
            yield Comparison(f"{what}: largest change of a layer's ‖W‖", paper, f"{change:.2%}", change < KEPT)
            law = "Q(t) = Q(0)" if rate == FLOW else "‖w‖² grows by η²‖∇L‖² a step"
            yield Comparison(f"{what}: largest departure from {law}", "", f"{max(group.values('law_defect')):.1e}")


def _way(rate: float) -> str:
    return "gradient flow" if rate == FLOW else f"descent of {rate:g}"


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for (normalizer,), group in results.where(weight_decay=0.0).groups("normalizer").items():
        series = {
            f"{_way(rate)}, layer {name.removesuffix('.weight')}": (own[0].numbers["times"], values)
            for (rate,), own in group.groups("learning_rate").items()
            for name, values in own[0].numbers["norms"].items()
        }
        title = f"Norms of hidden weights {'with' if normalizer == 'batch' else 'without'} BN"
        drawn[f"norms-{normalizer}"] = Plot(title, "time, learning rate × steps", "‖W‖ over that at the start", series)
    return drawn


EXPERIMENT = Experiment(
    name="norm-over-time",
    source="Akbar, Section 1.4 and Lemma 5.1",
    statement="Gradient flow of a network with BN conserves the norms of its weights; with decay λ, ‖w‖² falls as exp(−λt).",
    quick=NormSettings(),
    full=NormSettings(seeds=(0, 1, 2), learning_rates=(FLOW, 0.001, 0.01, 0.1, 1.0), duration=20.0, samples=1000, depth=5),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
