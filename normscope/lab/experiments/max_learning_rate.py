"""Bjorck et al. 2018: the largest learning rate that trains with and without BN, and what a small one reaches without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Plot, Results, TrialResult, less, side_by_side
from normscope.lab.training import Training, TrainingSettings, accuracy_numbers

MUCH = 5.0  # a rate this many times another is much larger; rates are about three-fold steps
SIMILAR = 0.02  # accuracies
NAMES = {"none": "no BN", "batch": "BN"}


@dataclass(frozen=True)
class RateSettings(TrainingSettings):
    """learning_rates: in place of learning_rate. patience: how many times as long networks without normalizers are trained too."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 10}})
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    unit_ball: bool = False
    optimizer: str = "plain-sgd"
    weight_decay: float = 0.0
    epochs: int = 20
    patience: int = 5


def trials(settings: RateSettings, seed: int) -> dict[str, Training]:
    if settings.patience < 2:
        raise InputError("patience must be at least 2: networks without BN are trained that many times as long")
    found = {}
    for network in settings.networks:
        for rate in settings.learning_rates:
            for kind in settings.normalizers:
                found[f"{network} {kind} rate {rate:g}"] = settings.training(network, kind, seed, learning_rate=rate)
            plain = settings.training(network, "none", seed, learning_rate=rate)
            found[f"{network} none rate {rate:g} longer"] = replace(plain, epochs=settings.patience * plain.epochs)
    return found


def trains(trial: TrialResult) -> bool:
    """The loss stays finite and ends below half of what it was before the first step, which is that of guessing."""
    before = float(trial.numbers["history"][0]["test_loss"])
    return not trial.numbers["diverged"] and float(trial.numbers["train_loss"]) < before / 2


def judge(results: Results) -> Iterator[Comparison]:
    for (network,), own in results.groups("network").items():
        usual, longer = short_and_long(own)
        plain, normalized = (usual.where(normalizer=kind) for kind in ("none", "batch"))
        with_bn, without = largest_rate(normalized), largest_rate(plain)
        ours, agrees = side_by_side(with_bn, without, "g"), with_bn > MUCH * without
        yield Comparison(f"{network}: largest rate that trains", "0.1 BN, 0.0001 no BN (ResNet-110)", ours, agrees)
        (rate, with_bn), (plain_rate, without), (long_rate, patient) = best(normalized), best(plain), best(longer)
        ours = f"{with_bn:.3f} BN at {rate:g}, {without:.3f} no BN at {plain_rate:g}"
        yield Comparison(f"{network}: best test accuracy over all rates", "higher with BN", ours, with_bn > without)
        ours = f"{patient:.3f} at {long_rate:g}, {longer[0].parameters['epochs']} epochs"
        similar = patient >= with_bn - SIMILAR
        yield Comparison(f"{network}: best test accuracy without BN, trained longer", "similar, slowly", ours, similar)
        small = min(_stable(plain), default=math.nan)
        with_bn, without = (group.where(learning_rate=small).mean("test_accuracy") for group in (normalized, plain))
        ours = side_by_side(with_bn, without, ".3f")
        name = f"{network}: test accuracy at {small:g}, the least rate that trains without BN"
        yield Comparison(name, "BN no better at the same small rate", ours, less(with_bn, without, by=-SIMILAR))


def short_and_long(own: Results) -> tuple[Results, Results]:
    """The trials of the usual length, and the longer ones."""
    least = min(trial.parameters["epochs"] for trial in own)
    return own.where(epochs=least), Results([trial for trial in own if trial.parameters["epochs"] > least])


def _stable(group: Results) -> list[float]:
    """The rates at which every seed trains."""
    return [rate for (rate,), own in group.groups("learning_rate").items() if all(map(trains, own))]


def largest_rate(group: Results) -> float:
    return max(_stable(group), default=0.0)


def best(group: Results) -> tuple[float, float]:
    """The rate with the highest mean test accuracy, and that accuracy."""
    means = {rate: own.mean("test_accuracy") for (rate,), own in group.groups("learning_rate").items()}
    rate = max(means, key=lambda rate: means[rate])
    return rate, means[rate]


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for quantity, title in (("train_accuracy", "Training accuracy"), ("test_accuracy", "Test accuracy")):
        series = {}
        for (network, normalizer, epochs), group in results.groups("network", "normalizer", "epochs").items():
            means = {rate: own.mean(quantity) for (rate,), own in group.groups("learning_rate").items()}
            series[f"{network}, {NAMES.get(normalizer, normalizer)}, {epochs} epochs"] = (list(means), list(means.values()))
        title = f"{title} at the end, by learning rate"
        drawn[quantity.replace("_", "-")] = Plot(title, "learning rate", "accuracy", series, "lines+points", log_x=True)
    return drawn


EXPERIMENT = Experiment(
    name="max-learning-rate",
    source="Bjorck et al. 2018, Section 3; Akbar, Section 1.1",
    statement="BN allows much larger learning rates; without it a small rate reaches a similar accuracy, slowly.",
    quick=RateSettings(),
    full=RateSettings(seeds=(0, 1, 2), networks={"mlp": {"width": 512, "depth": 10}, "resnet18": {"stem": "small"}}, epochs=100),
    trials=trials,
    measure=accuracy_numbers,
    judge=judge,
    plots=plots,
)
