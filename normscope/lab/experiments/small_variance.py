"""What normalizers do where σ < 1: their gain is above 1, and the product over the depth amplifies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normscope.lab.experiment import Comparison, Experiment, Plot, Results, power
from normscope.lab.training import Training, TrainingSettings, trained_numbers, with_and_without

PRODUCT = ("products", "normalizers_layer")


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """scales: of the initial weights; the smaller, the smaller every σ at the start."""

    scales: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)
    normalizers: tuple[str, ...] = ("batch", "layer")


def trials(settings: Settings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f", weights ×{scale:g}": {"initial_scale": scale} for scale in settings.scales})


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        track = group.track(*PRODUCT)[1]
        small, layers = _small(group)
        ours = f"{power(track[0])} → {power(track[-1])}; σ < 1 in {small} of {layers} layers at the end"
        yield Comparison(f"{label}: ∏1/σ", "small once trained", ours, track[-1] < 0)
        upper, accuracy, gap = group.mean("audit", "bracket", "upper_log10"), group.mean("test_accuracy"), group.mean("gap_loss")
        ends = f"{power(upper)}; test accuracy {accuracy:.3f}, gap of the loss {gap:.3f}"
        yield Comparison(f"{label}: certified constant", "", ends)


def plots(results: Results) -> dict[str, Plot]:
    series = {label: group.track(*PRODUCT) for label, group in results.by_label().items()}
    title = "Product of 1/σ from small and large initial variances"
    return {"products": Plot(title, "epoch", "log10 ∏1/σ", series, levels={"no effect": 0.0})}


def _small(group: Results) -> tuple[int, int]:
    """How many normalizers end with σ < 1, and how many there are, over all seeds."""
    rows = [row for trial in group for row in trial.numbers["history"][-1]["normalizers"].values()]
    return sum(float(row["input_variance"]) < 1 for row in rows), len(rows)


EXPERIMENT = Experiment(
    name="small-variance",
    source="Than 2025, Section 4.2, and the third open question of its summary",
    statement="Variances before normalizers are large in trained networks, so ∏1/σ is small; what happens where they are not?",
    quick=Settings(networks={"mlp": {"width": 64, "depth": 10}}, epochs=60),
    full=Settings(networks={"mlp": {"width": 512, "depth": 10}, "resnet18": {"stem": "imagenet"}}),
    trials=trials,
    measure=trained_numbers,
    judge=judge,
    plots=plots,
)
