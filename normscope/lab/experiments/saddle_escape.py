"""Akbar, Section 5: whether the noise of BN's mini-batch statistics drives descent off a saddle of symmetry."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normscope.curvature.spectrum import hessian
from normscope.geometry.flow import gradient_descent
from normscope.lab.datasets import Labelled
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings, TrialResult, side_by_side
from normscope.lab.experiments.conditioning import regression
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

LOWER = 0.95  # of the loss at the saddle: descent has left it
BESIDE = 1e-6  # how far from the saddle a start beside it is, in every parameter
SHOWN = 200  # points of a plot


@dataclass(frozen=True)
class SaddleSettings(Settings):
    """rest: steps that bring two equal neurons to the saddle. steps: in which it may be left."""

    data: str = "sigmoids"
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate: float = 0.2
    batch_size: int = 32
    rest: int = 1000
    steps: int = 1500


@dataclass(frozen=True)
class Escape:
    """batch_size: None for all data at once. beside: the start is not exactly the saddle."""

    normalizer: str
    beside: bool
    batch_size: int | None
    data: str
    learning_rate: float
    rest: int
    steps: int


def trials(settings: SaddleSettings, seed: int) -> dict[str, Escape]:
    recipe = (settings.data, settings.learning_rate, settings.rest, settings.steps)
    starts = {
        "mini-batches, exact": (False, settings.batch_size),
        "mini-batches, beside": (True, settings.batch_size),
        "all data, beside": (True, None),
    }
    return {
        f"{kind} {name}": Escape(kind, beside, size, *recipe)
        for kind in ("none", "batch")
        for name, (beside, size) in starts.items()
    }


def equal_neurons(normalizer: str, inputs: int, generator: torch.Generator) -> nn.Sequential:
    """r·tanh(BN(V x)) + c with two hidden neurons that start equal; float64."""
    hidden = nn.utils.skip_init(nn.Linear, inputs, 2, bias=False)
    output = nn.utils.skip_init(nn.Linear, 2, 1)
    with torch.no_grad():
        hidden.weight.copy_(torch.randn(1, inputs, generator=generator).expand(2, -1))
        output.weight.copy_(torch.randn(1, 1, generator=generator).expand(-1, 2))
        output.bias.zero_()
    norm = nn.BatchNorm1d(2, affine=False, track_running_stats=False) if normalizer == "batch" else nn.Identity()
    return nn.Sequential(hidden, norm, nn.Tanh(), output).double()


def measure(trial: Escape, workspace: Workspace) -> Numbers:
    inputs, targets = workspace.data(trial.data).train
    data = inputs.flatten(1).double(), targets.double()
    model = equal_neurons(trial.normalizer, data[0].shape[1], workspace.generator("weights"))
    path = gradient_descent(
        model, regression, data, lr=trial.learning_rate, steps=trial.rest, symmetries=symmetries(model, data[0])
    )
    model.load_state_dict(path.parameters)
    curvature = torch.linalg.eigvalsh(hessian(model, regression, data, batch_size=len(targets)).dense())
    if trial.beside:
        _move(model, BESIDE, workspace.generator("beside"))
    losses = descend(model, data, trial, LOWER * float(path.losses[-1]), workspace.generator("order"))
    shown = range(0, len(losses), max(1, len(losses) // SHOWN))
    return {
        "saddle_loss": float(path.losses[-1]),
        "saddle_gradient": float(path.gradient_norms[-1]),
        "least_curvature": float(curvature[0]),
        "steps": len(losses) - 1 if losses[-1] < LOWER * float(path.losses[-1]) else math.inf,
        "difference": float((model[0].weight[0] - model[0].weight[1]).detach().norm()),
        "at": list(shown),
        "losses": [losses[step] for step in shown],
    }


@torch.no_grad()
def _move(model: nn.Module, size: float, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def descend(model: nn.Module, data: Labelled, trial: Escape, below: float, order: torch.Generator) -> list[float]:
    """Steps until the loss on all data is below a level: that loss before every step and at the end."""
    inputs, targets = data
    optimizer = torch.optim.SGD(model.parameters(), trial.learning_rate)
    losses = []
    for _ in range(trial.steps + 1):
        with torch.no_grad():
            losses.append(float(regression(model(inputs), targets)))
        if losses[-1] < below or len(losses) > trial.steps:
            break
        chosen = torch.randperm(len(inputs), generator=order)[: trial.batch_size] if trial.batch_size else slice(None)
        optimizer.zero_grad()
        regression(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return losses


def judge(results: Results) -> Iterator[Comparison]:
    steps = {
        (kind, beside, noisy): _median([trial for trial in group if (trial.parameters["batch_size"] is not None) == noisy])
        for (kind, beside), group in results.groups("normalizer", "beside").items()
        for noisy in (True, False)
    }
    exact, beside = steps["batch", False, True], steps["batch", True, True]
    quiet, plain = steps["batch", True, False], steps["none", True, True]
    name = "BN: steps of mini-batches to leave the exact saddle, where noise is the same for both neurons"
    yield Comparison(name, "some", f"{exact:.0f}", math.isfinite(exact))
    ours = f"{beside:.0f} mini-batches, {quiet:.0f} all data"
    yield Comparison("BN: steps to leave it from beside it", "fewer with mini-batches", ours, beside < quiet)
    ours = side_by_side(beside, plain, ".0f")
    yield Comparison("Mini-batches: steps to leave it from beside it", "fewer with BN", ours, beside < plain)
    for (kind,), group in results.groups("normalizer").items():
        name = f"{'BN' if kind == 'batch' else 'no BN'}: least curvature at the saddle"
        yield Comparison(name, "", f"{statistics.median(group.values('least_curvature')):.3g}")


def _median(trials: list[TrialResult]) -> float:
    return statistics.median(float(trial.numbers["steps"]) for trial in trials) if trials else math.nan


def plots(results: Results) -> dict[str, Plot]:
    first = {trial.label: trial.numbers for trial in reversed(results)}
    series = {label: (numbers["at"], numbers["losses"]) for label, numbers in reversed(first.items())}
    return {"losses": Plot("Loss on all data after the saddle", "step", "mean squared error", series)}


EXPERIMENT = Experiment(
    name="saddle-escape",
    source="Akbar, Section 5, saddle-point escape",
    statement="The noise of BN's mini-batch statistics pushes parameters off saddles.",
    quick=SaddleSettings(),
    full=SaddleSettings(seeds=tuple(range(10)), rest=10_000, steps=20_000),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
