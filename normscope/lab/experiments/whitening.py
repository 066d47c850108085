"""BN against batch whitening: conditioning of features, and how far SGD gets at its best learning rate."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.models.surgery import exchange
from normscope.lab.models.whitening import BatchWhitening
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace

NEAR_IDENTITY = 10.0  # a condition number up to which a covariance counts as "identity-ish"


@dataclass(frozen=True)
class Whitened(Training):
    """whiten: BN is exchanged for whitening."""

    whiten: bool = False


@dataclass(frozen=True)
class WhiteningSettings(TrainingSettings):
    """rates: of learning, each tried, in place of learning_rate."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 32, "depth": 5}})
    unit_ball: bool = False
    epochs: int = 10
    optimizer: str = "plain-sgd"
    weight_decay: float = 0.0
    rates: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
    seeds: tuple[int, ...] = (0, 1)


def trials(settings: WhiteningSettings, seed: int) -> dict[str, Whitened]:
    found: dict[str, Whitened] = {}
    for rate in settings.rates:
        for normalizer in settings.normalizers:
            usual = Whitened(**vars(settings.training("mlp", normalizer, seed, learning_rate=rate)))
            found[f"{normalizer}, {rate:g}"] = usual
            if normalizer == "batch":
                found[f"whitening, {rate:g}"] = replace(usual, whiten=True)
    return found


def measure(trial: Whitened, workspace: Workspace) -> Numbers:
    model, split = prepare(trial, workspace)
    if trial.whiten:
        exchange(model, lambda module: BatchWhitening(module.num_features) if isinstance(module, nn.BatchNorm1d) else None)
    conditions = feature_conditions(model, split.train[0])
    return {**ends(fit(model, split, trial, workspace)), "log10_conditions": conditions}


def feature_conditions(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """log10 λ_max/λ_min of the covariance of what enters every ReLU, with batch statistics of all inputs, in float64."""
    copied = copy.deepcopy(model).double().train()
    found: list[float] = []

    def look(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        values = torch.linalg.eigvalsh(arguments[0].T.cov())
        found.append(float((values[-1] / values[0].clamp(min=values[-1] * torch.finfo(values.dtype).eps)).log10()))

    for module in copied.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        copied(inputs.double())
    return found


def judge(results: Results) -> list[Comparison]:
    kinds = _kinds(results)
    conditions = _by_kind({kind: 10 ** statistics.fmean(_conditions(group)) for kind, group in kinds.items()})
    best = {kind: group.least("learning_rate", "train_loss") for kind, group in kinds.items()}
    losses = _by_kind({kind: group.mean("train_loss") for kind, group in best.items()})
    accuracies = ", ".join(f"{kind} {group.mean('test_accuracy'):.3f}" for kind, group in best.items())
    improved = less(conditions["whitening"], conditions["BN"])
    faster, fastest = less(losses["BN"], losses["none"]), less(losses["whitening"], losses["BN"])
    shown = {kind: f"{condition:.3g}" for kind, condition in conditions.items()}
    near = less(conditions["BN"], NEAR_IDENTITY)
    return [
        Comparison("none: condition number of features", "", shown["none"]),
        Comparison("BN: condition number of features", "akin to whitening, near 1", shown["BN"], near),
        Comparison("whitening: condition number of features", "below BN's", shown["whitening"], improved),
        Comparison("BN: training loss, against none", "lower", _pair(losses, "BN", "none"), faster),
        Comparison("whitening: training loss, against BN", "lower", _pair(losses, "whitening", "BN"), fastest),
        Comparison("test accuracy", "", accuracies),
    ]


def plots(results: Results) -> dict[str, Plot]:
    kinds = _kinds(results)
    series = {kind: group.least("learning_rate", "train_loss").track("train_loss") for kind, group in kinds.items()}
    conditions = {}
    for kind, group in kinds.items():
        values = [statistics.fmean(layer) for layer in zip(*(trial.numbers["log10_conditions"] for trial in group), strict=True)]
        conditions[kind] = (list(range(1, 1 + len(values))), values)
    return {
        "loss": Plot("Training loss of SGD at its best rate", "epoch", "cross-entropy", series, log_y=True),
        "conditions": Plot("Conditioning of features before training", "ReLU", "log10 λ_max/λ_min", conditions, kind="bars"),
    }


def _kinds(results: Results) -> dict[str, Results]:
    normalized = results.where(normalizer="batch")
    found = {
        "none": results.where(normalizer="none"),
        "BN": normalized.where(whiten=False),
        "whitening": normalized.where(whiten=True),
    }
    return {kind: group for kind, group in found.items() if group}


def _by_kind(values: dict[str, float]) -> dict[str, float]:
    """With NaN for a kind that was left out."""
    return {kind: values.get(kind, math.nan) for kind in ("none", "BN", "whitening")}


def _conditions(group: Results) -> list[float]:
    return [float(value) for trial in group for value in trial.numbers["log10_conditions"]]


def _pair(losses: dict[str, float], first: str, second: str) -> str:
    return f"{losses[first]:.3g} against {losses[second]:.3g}"


EXPERIMENT = Experiment(
    name="whitening",
    source="Akbar, Sections 7.1 and 9.5",
    statement="BN is akin to whitening; full whitening could further improve conditioning by decorrelating features.",
    quick=WhiteningSettings(),
    full=WhiteningSettings(networks={"mlp": {"width": 64, "depth": 10}}, epochs=50, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
