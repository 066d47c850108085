"""Dropout before BN: variances that differ between training and test (Li et al. 2019), and what becomes of accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.recalibration import recalibrated
from normscope.lab.training import Training, TrainingSettings, ends, evaluated, train, with_and_without
from normscope.lab.workspace import Workspace

TINY = torch.finfo(torch.float32).tiny
NOTICEABLE = 0.02  # of accuracy
SHIFTED = 1.1  # a ratio of variances beyond which they are not the same


@dataclass(frozen=True)
class DropoutSettings(TrainingSettings):
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 128, "depth": 5}})
    epochs: int = 15
    rates: tuple[float, ...] = (0.0, 0.2, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)


def trials(settings: DropoutSettings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f", dropout {rate:g}": {"dropout": rate} for rate in settings.rates})


def measure(trial: Training, workspace: Workspace) -> Numbers:
    trained = train(trial, workspace)
    corrected = recalibrated(trained.model, trained.split.train[0])
    return {
        **ends(trained),
        **evaluated(corrected, trained.split.test, "corrected_test"),
        "ratios": variance_ratios(trained.model, corrected),
    }


def variance_ratios(model: nn.Module, corrected: nn.Module) -> list[float]:
    """Of every BN layer, running variance over the variance that its input has without dropout: the geometric mean of channels."""
    trained, true = (_running_variances(network) for network in (model, corrected))
    return [float((before / after).log().mean().exp()) for before, after in zip(trained, true, strict=True)]


def _running_variances(model: nn.Module) -> list[torch.Tensor]:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
    return [layer.running_var.clamp(min=TINY) for layer in layers if layer.running_var is not None]


def judge(results: Results) -> Iterator[Comparison]:
    for (rate,), group in results.where(normalizer="batch").groups("dropout").items():
        ratios = _ratios(group)
        largest = max(ratios, default=math.nan)
        shifted = less(SHIFTED, largest) if rate else less(largest, SHIFTED)
        paper = "shifts (Li et al. 2019)" if rate else "as at test"
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        yield Comparison(f"dropout {rate:g}: variance in training over test, by layer", paper, shown, shifted)
        moved = [group.mean(f"{name}accuracy") for name in ("test_", "corrected_test_")]
        shown = " → ".join(f"{value:.3f}" for value in moved)
        yield Comparison(f"dropout {rate:g}: test accuracy, running → corrected statistics", "", shown)
    alone, both = _gains(results, "none"), _gains(results, "batch")
    shown = f"{alone:+.3f} alone, {both:+.3f} with BN"
    smaller = less(both, alone, by=NOTICEABLE)
    yield Comparison("what dropout adds to test accuracy, at its best rate", "less with BN", shown, smaller)


def plots(results: Results) -> dict[str, Plot]:
    groups = results.where(normalizer="batch").groups("dropout")
    ratios = {rate: _ratios(group) for (rate,), group in groups.items()}
    series = {f"dropout {rate:g}": (list(range(1, 1 + len(values))), values) for rate, values in ratios.items()}
    title = "Variance that BN saw in training over the variance at test"
    shown = {"variances": Plot(title, "BN layer", "ratio", series, "lines+points")}
    accuracy = {}
    for (normalizer,), group in results.groups("normalizer").items():
        rates = group.groups("dropout")
        accuracy[normalizer] = ([rate for (rate,) in rates], [same.mean("test_accuracy") for same in rates.values()])
    return {**shown, "accuracy": Plot("Test accuracy by dropout", "dropout rate", "test accuracy", accuracy, "lines+points")}


def _ratios(group: Results) -> list[float]:
    """By layer, the geometric mean over seeds."""
    layers = zip(*(trial.numbers["ratios"] for trial in group), strict=True)
    return [math.exp(sum(math.log(ratio) for ratio in layer) / len(layer)) for layer in layers]


def _gains(results: Results, normalizer: str) -> float:
    """The best accuracy with dropout less that without."""
    accuracies = {
        rate: group.mean("test_accuracy") for (rate,), group in results.where(normalizer=normalizer).groups("dropout").items()
    }
    with_dropout = [accuracy for rate, accuracy in accuracies.items() if rate]
    return max(with_dropout, default=math.nan) - accuracies.get(0.0, math.nan)


EXPERIMENT = Experiment(
    name="dropout-batchnorm",
    source="Akbar, Section 9.5; Li et al. 2019",
    statement="Dropout and BN somewhat reduce each other's effect: dropout shifts the variances that BN has seen in training.",
    quick=DropoutSettings(),
    full=DropoutSettings(networks={"mlp": {"width": 512, "depth": 10}}, rates=(0.0, 0.1, 0.2, 0.5), epochs=50),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
