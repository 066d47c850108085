"""SGD against Adam, each at its best learning rate, with and without BN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, accuracy_numbers

NOTICEABLE = 0.02  # of accuracy
NORMALIZERS = {"none": "without BN", "batch": "with BN"}


@dataclass(frozen=True)
class OptimizerSettings(TrainingSettings):
    """sgd_rates, adam_rates: of learning, each tried, in place of optimizer and learning_rate."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 10}})
    unit_ball: bool = False
    epochs: int = 10
    weight_decay: float = 0.0
    sgd_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    seeds: tuple[int, ...] = (0, 1)
    adam_rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01, 0.03)


def trials(settings: OptimizerSettings, seed: int) -> dict[str, Training]:
    rates = {"sgd": settings.sgd_rates, "adam": settings.adam_rates}
    return {
        f"{normalizer} {optimizer} {rate:g}": settings.training("mlp", normalizer, seed, optimizer=optimizer, learning_rate=rate)
        for normalizer in settings.normalizers
        for optimizer, optimizer_rates in rates.items()
        for rate in optimizer_rates
    }


def judge(results: Results) -> Iterator[Comparison]:
    behind = {}
    for normalizer, name in NORMALIZERS.items():
        best = {optimizer: _best(results, normalizer, optimizer) for optimizer in ("sgd", "adam")}
        accuracies = {optimizer: group.mean("test_accuracy") for optimizer, group in best.items()}
        behind[normalizer] = accuracies["adam"] - accuracies["sgd"]
        losses = " and ".join(f"{group.mean('train_loss'):.2g}" for group in best.values())
        yield Comparison(f"{name}: training loss of SGD and Adam", "", losses)
        needed, suffices = less(NOTICEABLE, behind[normalizer]), less(behind[normalizer], NOTICEABLE)
        paper, agrees = ("SGD suffices", suffices) if normalizer == "batch" else ("Adam needed", needed)
        shown = " and ".join(f"{accuracy:.3f}" for accuracy in accuracies.values())
        yield Comparison(f"{name}: test accuracy of SGD and Adam", paper, shown, agrees)
    smaller = less(behind["batch"], behind["none"], by=NOTICEABLE)
    shown = " → ".join(f"{value:+.3f}" for value in behind.values())
    yield Comparison("Adam's lead without → with BN", "shrinks", shown, smaller)


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for normalizer, name in NORMALIZERS.items():
        for optimizer in ("sgd", "adam"):
            groups = results.where(normalizer=normalizer, optimizer=optimizer).groups("learning_rate")
            rates = [rate for (rate,) in groups]
            series[f"{optimizer} {name}"] = (rates, [group.mean("test_accuracy") for group in groups.values()])
    return {
        "accuracy": Plot("Test accuracy by learning rate", "learning rate", "test accuracy", series, "lines+points", log_x=True)
    }


def _best(results: Results, normalizer: str, optimizer: str) -> Results:
    """The trials at the rate with the least training loss."""
    found = results.where(normalizer=normalizer, optimizer=optimizer)
    return found.least("learning_rate", "train_loss") if found else found


EXPERIMENT = Experiment(
    name="sgd-adam",
    source="Akbar, Section 9.1",
    statement="SGD works extremely well with BN, whereas without BN adaptive methods are more necessary.",
    quick=OptimizerSettings(),
    full=OptimizerSettings(networks={"mlp": {"width": 512, "depth": 10}}, epochs=50, seeds=(0, 1, 2)),
    trials=trials,
    measure=accuracy_numbers,
    judge=judge,
    plots=plots,
)
