"""A penalty on the logarithm of the constants while training: does a smaller bound on the slopes mean a smaller test error?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less, power
from normscope.lab.measurements import audited
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace
from normscope.optim.capacity import LogCapacity

NOTICEABLE = 0.005  # of accuracy
MEASURED = {
    "log10 of the certified constant": ("audit", "bracket", "upper_log10"),
    "test accuracy": ("test_accuracy",),
    "gap of the loss": ("gap_loss",),
}


@dataclass(frozen=True)
class Penalized(Training):
    """penalty: the factor of `ns.optim.LogCapacity` in the loss."""

    penalty: float = 0.0


@dataclass(frozen=True)
class PenaltySettings(TrainingSettings):
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 5}})
    images: int | None = 300
    epochs: int = 60
    weight_decay: float = 0.0
    penalties: tuple[float, ...] = (0.0, 0.003, 0.03, 0.3)
    seeds: tuple[int, ...] = (0, 1, 2)


def trials(settings: PenaltySettings, seed: int) -> dict[str, Penalized]:
    if 0.0 not in settings.penalties or len(settings.penalties) < 2:
        raise InputError("penalties must hold 0 and at least one other: they are compared")
    return {
        f"{network} {normalizer}, penalty {penalty:g}": Penalized(
            **vars(settings.training(network, normalizer, seed)), penalty=penalty
        )
        for network in settings.networks
        for normalizer in settings.normalizers
        for penalty in settings.penalties
    }


def measure(trial: Penalized, workspace: Workspace) -> Numbers:
    model, split = prepare(trial, workspace)
    penalty = partial(_weighted, trial.penalty) if trial.penalty else None
    trained = fit(model, split, trial, workspace, penalty=penalty)
    return {**ends(trained), "audit": audited(trained.model, split.train[0][: trial.batch_size], workspace.generator("audit"))}


def _weighted(factor: float, model: nn.Module) -> Callable[[], Tensor]:
    """factor · LogCapacity(model), a function of the model's present weights."""
    capacity = LogCapacity(model)
    return lambda: factor * capacity()


def judge(results: Results) -> Iterator[Comparison]:
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        found = {name: _by_penalty(group, *path) for name, path in MEASURED.items()}
        accuracy, constant, gap = found["test accuracy"], found["log10 of the certified constant"], found["gap of the loss"]
        best = max((penalty for penalty in accuracy if penalty > 0), key=accuracy.__getitem__)
        what = f"{network} {normalizer}"
        better = less(accuracy[0.0], accuracy[best], by=NOTICEABLE)
        yield Comparison(
            f"{what}: test accuracy, none → penalty {best:g}", "better", f"{accuracy[0.0]:.3f} → {accuracy[best]:.3f}", better
        )
        yield Comparison(
            f"{what}: gap of the loss, none → penalty {best:g}",
            "smaller",
            f"{gap[0.0]:.3f} → {gap[best]:.3f}",
            less(gap[best], gap[0.0]),
        )
        yield Comparison(
            f"{what}: certified constant, none → penalty {best:g}",
            "smaller",
            f"{power(constant[0.0])} → {power(constant[best])}",
            less(constant[best], constant[0.0]),
        )
        for name, values in found.items():
            yield Comparison(f"{what}: {name} by penalty", "", ", ".join(f"{p:g}: {value:.3f}" for p, value in values.items()))


def _by_penalty(group: Results, *path: str) -> dict[float, float]:
    return {float(penalty): part.mean(*path) for (penalty,), part in group.groups("penalty").items()}


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for name, path in MEASURED.items():
        series = {}
        for (network, normalizer), group in results.groups("network", "normalizer").items():
            values = _by_penalty(group, *path)
            series[f"{network} {normalizer}"] = ([f"{penalty:g}" for penalty in values], list(values.values()))
        drawn[path[-1].replace("_", "-")] = Plot(f"{name} by penalty".capitalize(), "penalty", name, series, kind="lines+points")
    return drawn


EXPERIMENT = Experiment(
    name="capacity-penalty",
    source="Than 2025, Section 5.2.1, first paragraph after Theorem 20",
    statement="The bound is a guide to training: a model that fits its sample with small local constants generalizes well.",
    quick=PenaltySettings(),
    full=PenaltySettings(
        networks={"mlp": {"width": 256, "depth": 8}}, images=None, penalties=(0.0, 1e-3, 1e-2, 0.1, 1.0), seeds=tuple(range(5))
    ),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
