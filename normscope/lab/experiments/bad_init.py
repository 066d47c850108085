"""Experiment 4 of Akbar: a five-layer network trained from weights that are far too large or far too small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.lab.experiment import Comparison, Experiment, Plot, Results
from normscope.lab.training import Training, TrainingSettings, accuracy_numbers, with_and_without

TRAINED = 0.8  # accuracy on the training part


@dataclass(frozen=True)
class ScaleSettings(TrainingSettings):
    """scales: factors on all weights of a good start."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 32, "depth": 5}})
    scales: tuple[float, ...] = (1e-3, 0.1, 1.0, 10.0, 100.0)
    unit_ball: bool = False
    optimizer: str = "plain-sgd"
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    epochs: int = 40


def trials(settings: ScaleSettings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f" × {scale:g}": {"initial_scale": scale} for scale in settings.scales})


def judge(results: Results) -> Iterator[Comparison]:
    for (network, normalizer, scale), group in results.groups("network", "normalizer", "initial_scale").items():
        accuracy = group.mean("train_accuracy")
        diverged = " (loss not finite)" if any(group.values("diverged")) else ""
        trains = accuracy >= TRAINED
        extreme = scale in (min(_scales(results)), max(_scales(results)))
        paper = "trains" if normalizer != "none" or scale == 1 else "fails or starts late" if extreme else ""
        agrees = None if not paper else trains == (paper == "trains")
        name = f"{network}, {normalizer}, weights × {scale:g}: training accuracy"
        yield Comparison(name, paper, f"{accuracy:.3f}{diverged}", agrees)


def _scales(results: Results) -> list[float]:
    return [trial.parameters["initial_scale"] for trial in results]


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for (network, normalizer), group in results.groups("network", "normalizer").items():
        points = {scale: own.mean("train_accuracy") for (scale,), own in group.groups("initial_scale").items()}
        series[f"{network}, {normalizer}"] = (list(points), list(points.values()))
    drawn = {
        "scales": Plot("Training accuracy at the end", "factor on the initial weights", "accuracy", series, "lines+points", True)
    }
    for (normalizer,), group in results.groups("normalizer").items():
        tracks = {f"× {scale:g}": own.track("train_accuracy") for (scale,), own in group.groups("initial_scale").items()}
        title = f"Training accuracy, normalizer {normalizer}, by factor on the initial weights"
        drawn[f"accuracy-{normalizer}"] = Plot(title, "epoch", "accuracy", tracks)
    return drawn


EXPERIMENT = Experiment(
    name="bad-init",
    source="Akbar, Experiment 4",
    statement="With BN a deep network trains smoothly from weights far too large or too small; without, it fails or starts late.",
    quick=ScaleSettings(),
    full=ScaleSettings(seeds=(0, 1, 2), scales=(1e-6, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4), epochs=100),
    trials=trials,
    measure=accuracy_numbers,
    judge=judge,
    plots=plots,
)
