"""Does input variance grow across architectures, batch sizes, learning rates and initial weights?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, TrialResult, power
from normscope.lab.training import Training, TrainingSettings, trained_numbers, with_and_without

GREW = math.log10(2)  # from here on a variance counts as grown


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """One thing at a time is changed from the recipe, for every network."""

    batch_sizes: tuple[int, ...] = (32, 512)
    learning_rates: tuple[float, ...] = (1e-4, 1e-2)
    initial_scales: tuple[float, ...] = (0.3, 3.0)

    def variations(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {", recipe": {}}
        found |= {f", batch {size}": {"batch_size": size} for size in self.batch_sizes}
        found |= {f", rate {rate:g}": {"learning_rate": rate} for rate in self.learning_rates}
        return found | {f", weights ×{scale:g}": {"initial_scale": scale} for scale in self.initial_scales}


def trials(settings: Settings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, settings.variations())


def growth(trial: TrialResult) -> float:
    """log10 of the median factor by which the variance before a normalizer, else an activation, has grown."""
    first, last = (trial.numbers["history"][index] for index in (0, -1))
    part = "normalizers" if first["normalizers"] else "activations"
    before, after = ([float(row["input_variance"]) for row in record[part].values()] for record in (first, last))
    return median(math.log10(b / a) if a > 0 and b > 0 else math.nan for a, b in zip(before, after, strict=True))


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        mean = fmean(growth(trial) for trial in group)
        product = group.track("products", "normalizers_layer" if _normalized(group) else "activations_layer")[1][-1]
        ours = f"×10^{mean:+.2f}; ∏1/σ = {power(product)} at the end, accuracy {group.mean('train_accuracy'):.2f}"
        yield Comparison(f"{label}: median variance", "grows", ours, mean >= GREW)


def plots(results: Results) -> dict[str, Plot]:
    series: dict[str, tuple[list[str], list[float]]] = {}
    for label, group in results.by_label().items():
        network, variation = label.split(", ")
        names, means = series.setdefault(network, ([], []))
        names.append(variation)
        means.append(fmean(growth(trial) for trial in group))
    title, y = "How much the median input variance grew", "log10 of the factor"
    return {"growth": Plot(title, "what is changed", y, series, kind="bars")}


def _normalized(group: Results) -> bool:
    return bool(group[0].numbers["history"][0]["normalizers"])


EXPERIMENT = Experiment(
    name="variance-grid",
    source="Than 2025, Section 4.2 and the check that its summary asks for",
    statement="Input variances grow in training for every architecture, batch size, learning rate and initialisation.",
    quick=Settings(
        networks={"mlp": {"width": 64, "depth": 10, "epochs": 30}, "vgg": {"widths": [[16], [32], [64]], "epochs": 8}},
    ),
    full=Settings(
        networks={"mlp": {"width": 512, "depth": 10}, "vgg": {}, "resnet18": {"stem": "imagenet"}, "vit": {}},
    ),
    trials=trials,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
