"""Gradients of deep networks before training: how they grow from layer to layer with BN, and what skip connections change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings, less
from normscope.lab.models import build
from normscope.lab.workspace import Workspace

EXPLODES = 1.1  # a factor per layer of the squared gradient beyond which fifty layers make more than two decades
NEAR = 0.05  # relative, of a predicted factor
MEAN_FIELD = math.pi / (math.pi - 1)  # of ReLU and BN in wide networks and large batches (Yang et al. 2019)


@dataclass(frozen=True)
class Signal:
    """A network that is not trained, and the batch that it sees."""

    activation: str = "relu"
    normalizer: str = "batch"
    skip: bool = False
    data: str = "digits"
    width: int = 256
    depth: int = 50
    batch_size: int = 128


@dataclass(frozen=True)
class SignalSettings(Settings):
    seeds: tuple[int, ...] = (0, 1, 2)
    width: int = 256
    depth: int = 50
    batch_size: int = 128
    small_batch: int = 8


def trials(settings: SignalSettings, seed: int) -> dict[str, Signal]:
    if settings.depth < 6 or min(settings.batch_size, settings.small_batch) < 4:
        raise InputError("growth by layer needs a depth of at least 6, and its prediction batches of at least 4")
    usual = Signal(data=settings.data, width=settings.width, depth=settings.depth, batch_size=settings.batch_size)
    linear = replace(usual, activation="linear")
    return {
        "relu, none": replace(usual, normalizer="none"),
        "relu, BN": usual,
        "relu, BN, skip": replace(usual, skip=True),
        "tanh, BN": replace(usual, activation="tanh"),
        "linear, BN": linear,
        "linear, BN, small batch": replace(linear, batch_size=settings.small_batch),
        "linear, BN, skip": replace(linear, skip=True),
    }


def measure(trial: Signal, workspace: Workspace) -> Numbers:
    """log10 of ‖∂L/∂W‖² of every layer between the first and the last, and its growth per layer towards the input."""
    split = workspace.data(trial.data)
    chosen = workspace.generator("batch")
    inputs, classes = split.subset(trial.batch_size, chosen).train
    options = {"width": trial.width, "depth": trial.depth, "activation": trial.activation, "skip": trial.skip}
    model, _ = build("mlp", split, trial.normalizer, workspace.generator("weights"), **options)
    cross_entropy(model.train()(inputs), classes).backward()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][1:-1]
    squares = [2 * math.log10(float(layer.weight.grad.norm())) for layer in layers if layer.weight.grad is not None]
    return {"log10_squares": squares, "factor": growth(squares)}


def growth(squares: list[float]) -> float:
    """The factor per layer, by least squares over the middle half, where neither end is felt."""
    middle = np.arange(len(squares) // 4, len(squares) - len(squares) // 4)
    return float(10 ** -np.polyfit(middle, np.array(squares)[middle], 1)[0])


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        factor, batch = group.mean("factor"), group[0].parameters["batch_size"]
        quantity, ours = f"{label}: growth of ‖∂L/∂W‖² per layer", f"×{factor:.3f}"
        if label == "relu, BN":
            near = less(abs(factor / MEAN_FIELD - 1), NEAR)
            yield Comparison(quantity, f"×{MEAN_FIELD:.3f} (Yang et al. 2019)", ours, near)
        elif label.startswith("linear, BN") and not group[0].parameters["skip"]:
            yield Comparison(quantity, "explodes (Akbar)", ours, less(EXPLODES, factor))
            predicted = (batch - 2) / (batch - 3)
            near = less(abs(factor / predicted - 1), NEAR)
            yield Comparison(quantity, f"×{predicted:.3f} in batches of {batch} (Yang et al. 2019)", ours, near)
        elif group[0].parameters["skip"]:
            yield Comparison(quantity, "does not explode", ours, less(factor, EXPLODES))
        else:
            yield Comparison(quantity, "", ours)


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for label, group in results.by_label().items():
        means = np.mean([trial.numbers["log10_squares"] for trial in group], axis=0)
        series[label] = (list(range(2, 2 + len(means))), list(means - means[-1]))
    return {"gradients": Plot("Gradients before training, against the last hidden layer", "layer", "log10 of ‖∂L/∂W‖²", series)}


EXPERIMENT = Experiment(
    name="gradient-explosion",
    source="Akbar, Section 2.3; Yang et al. 2019",
    statement="In very deep networks BN can cause gradients to explode unless combined with skip connections.",
    quick=SignalSettings(),
    full=SignalSettings(width=1024, depth=100, batch_size=512, seeds=(0, 1, 2, 3, 4)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
