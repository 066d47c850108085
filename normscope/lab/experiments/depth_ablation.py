"""How many normalization layers against the generalization gap, at a fixed architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scipy.stats import spearmanr

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, power
from normscope.lab.training import Training, TrainingSettings, trained_numbers, with_and_without

STRONG = -0.5  # a rank correlation that counts as falling


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """counts: how many hidden layers, from the first, are normalized."""

    counts: tuple[int, ...] = (0, 1, 3, 5, 7, 9)
    normalizers: tuple[str, ...] = ("batch",)


def trials(settings: Settings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f", {count} normalized": {"normalized": count} for count in settings.counts})


def judge(results: Results) -> Iterator[Comparison]:
    for network, group in _networks(results).items():
        for number, name in (("gap_loss", "gap of the loss"), ("gap_accuracy", "gap of the accuracy")):
            correlation = float(spearmanr(group.values_of("normalized"), group.values(number)).statistic)
            ours = f"rank correlation {correlation:+.2f}; " + ", ".join(
                f"{count}: {part.mean(number):.3f}" for (count,), part in group.groups("normalized").items()
            )
            yield Comparison(f"{network}: {name} by normalizers", "falls", ours, correlation <= STRONG)
        for (count,), part in group.groups("normalized").items():
            upper, accuracy = part.mean("audit", "bracket", "upper_log10"), part.mean("test_accuracy")
            what = f"{network}, {count} normalized: certified constant, test accuracy"
            yield Comparison(what, "", f"{power(upper)}, {accuracy:.3f}")


def plots(results: Results) -> dict[str, Plot]:
    title = "Generalization gap against normalization layers"
    return {
        number: Plot(title, "normalized hidden layers", label, _series(results, number), kind="points")
        for number, label in (("gap_loss", "test loss − training loss"), ("gap_accuracy", "training accuracy − test accuracy"))
    }


def _series(results: Results, number: str) -> dict[str, tuple[list[float], list[float]]]:
    return {network: (group.values_of("normalized"), group.values(number)) for network, group in _networks(results).items()}


def _networks(results: Results) -> dict[str, Results]:
    return {", ".join(names): group for names, group in results.groups("network", "normalizer").items()}


EXPERIMENT = Experiment(
    name="depth-ablation",
    source="Than 2025, Section 6 and the check that its summary asks for",
    statement="The more layers are normalized, the smaller the generalization gap.",
    quick=Settings(networks={"mlp": {"width": 64, "depth": 10}}, images=400, epochs=60, seeds=(0, 1)),
    full=Settings(seeds=(0, 1, 2)),
    trials=trials,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
