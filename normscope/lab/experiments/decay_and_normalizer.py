"""Weight decay with BN and without: whether they complement each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, train, with_and_without
from normscope.lab.workspace import Workspace

NOTICEABLE = 0.005  # of accuracy


@dataclass(frozen=True)
class DecaySettings(TrainingSettings):
    """decays: λ of the penalty (λ/2)‖w‖², 0 among them."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 5}})
    images: int | None = 300
    epochs: int = 60
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    decays: tuple[float, ...] = (0.0, 1e-4, 1e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)


def trials(settings: DecaySettings, seed: int) -> dict[str, Training]:
    if 0.0 not in settings.decays or len(settings.decays) < 2 or not {"none", "batch"} <= set(settings.normalizers):
        raise InputError("decays must hold 0 and at least one other, and normalizers must hold none and batch: they are compared")
    return with_and_without(settings, seed, {f", λ = {decay:g}": {"weight_decay": decay} for decay in settings.decays})


def measure(training: Training, workspace: Workspace) -> Numbers:
    """Losses, accuracies, and the norm of all hidden weights at the end."""
    trained = train(training, workspace)
    weights = [layer.weight for layer in trained.model.modules() if isinstance(layer, nn.Linear)][:-1]
    return {**ends(trained), "norm": sum(float(weight.detach().square().sum()) for weight in weights) ** 0.5}


def judge(results: Results) -> Iterator[Comparison]:
    for (network,), group in results.groups("network").items():
        plain, normalized = (_by_decay(group.where(normalizer=name), "test_accuracy") for name in ("none", "batch"))
        best = {name: max(found.values()) for name, found in (("none", plain), ("batch", normalized))}
        decayed = max(value for decay, value in normalized.items() if decay > 0)
        others = max(best["none"], normalized[0.0])
        yield Comparison(
            f"{network}: test accuracy of BN with decay, and of everything else",
            "BN with decay is best",
            f"{decayed:.3f} and {others:.3f}",
            less(others, decayed, by=NOTICEABLE),
        )
        yield Comparison(
            f"{network}: test accuracy of BN without decay, and of the best decay",
            "decay helps",
            f"{normalized[0.0]:.3f} and {decayed:.3f}",
            less(normalized[0.0], decayed, by=NOTICEABLE),
        )
        yield Comparison(
            f"{network}: best λ with BN, and without",
            "smaller with BN",
            f"{_best(normalized):g} and {_best(plain):g}",
            _best(normalized) < _best(plain),
        )
        for (normalizer,), part in group.groups("normalizer").items():
            shown = (f"{decay:g}: {value:.3g}" for decay, value in _by_decay(part, "norm").items())
            yield Comparison(f"{network} {normalizer}: norm of the hidden weights by λ", "", ", ".join(shown))
            shown = (f"{decay:g}: {value:.3f}" for decay, value in _by_decay(part, "test_accuracy").items())
            yield Comparison(f"{network} {normalizer}: test accuracy by λ", "", ", ".join(shown))


def _by_decay(group: Results, *path: str) -> dict[float, float]:
    return {float(decay): part.mean(*path) for (decay,), part in group.groups("weight_decay").items()}


def _best(found: dict[float, float]) -> float:
    """The λ of the highest accuracy, the smallest where several have it."""
    return max(found, key=lambda decay: (found[decay], -decay))


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        found = _by_decay(group, "test_accuracy")
        series[f"{network} {normalizer}"] = ([f"{decay:g}" for decay in found], list(found.values()))
    return {"accuracy": Plot("Test accuracy by weight decay", "λ", "accuracy", series, kind="lines+points")}


EXPERIMENT = Experiment(
    name="decay-and-normalizer",
    source="Akbar, Sections 7.3 and 9.1",
    statement="Weight decay and BN complement each other: together they do best, and with BN a smaller decay is enough.",
    quick=DecaySettings(),
    full=DecaySettings(
        networks={"mlp": {"width": 256, "depth": 8}}, images=None, decays=(0.0, 1e-5, 1e-4, 1e-3, 1e-2), seeds=tuple(range(5))
    ),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
