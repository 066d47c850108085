"""Cues that are in the scale of x alone: classes that differ in ‖x‖ only, and digits whose brightness gives the class away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from normscope.lab.datasets import Labelled, Split
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, evaluated, fit, prepare
from normscope.lab.workspace import Workspace

NORM, BRIGHTNESS = "norm", "brightness"
NOTICEABLE = 0.02  # of accuracy
RANGE = 4.0  # brightness of the last class over that of the first


@dataclass(frozen=True)
class Cued(Training):
    """cue: "norm", classes that differ in ‖x‖ alone; "brightness", images scaled by class in training."""

    cue: str = NORM


USUAL = TrainingSettings(
    networks={"mlp": {"width": 64, "depth": 4}}, normalizers=("none", "batch", "layer", "rms"), epochs=15, seeds=(0, 1, 2)
)


def trials(settings: TrainingSettings, seed: int) -> dict[str, Cued]:
    found = {}
    for normalizer in settings.normalizers:
        usual = Cued(**vars(settings.training("mlp", normalizer, seed)))
        found[f"{NORM}, {normalizer}"] = replace(usual, data="rings", images=None)
        found[f"{BRIGHTNESS}, {normalizer}"] = replace(usual, cue=BRIGHTNESS)
    return found


def measure(trial: Cued, workspace: Workspace) -> Numbers:
    """Accuracy on test data with the cue, and for brightness with every cue exchanged for that of the opposite class."""
    model, split = prepare(trial, workspace)
    if trial.cue == NORM:
        return ends(fit(model, split, trial, workspace))
    cued = Split(lit(split.train, split.classes), lit(split.test, split.classes))
    trained = fit(model, cued, trial, workspace)
    images, classes = split.test
    misled = lit((images, split.classes - 1 - classes), split.classes)[0]
    exchanged = evaluated(trained.model, (misled, classes), "misled")
    numbers = {**ends(trained), **exchanged}
    return {**numbers, "reliance": numbers["test_accuracy"] - numbers["misled_accuracy"]}


def lit(data: Labelled, classes: int) -> Labelled:
    """Images scaled by class: from 1/RANGE for the first to 1 for the last, by equal factors."""
    images, labels = data
    factors: Tensor = RANGE ** (labels.double() / (classes - 1) - 1)
    return images * factors.to(images.dtype).reshape(-1, *[1] * (images.dim() - 1)), labels


def judge(results: Results) -> Iterator[Comparison]:
    by_norm, by_reliance = _means(results, NORM, "test_accuracy"), _means(results, BRIGHTNESS, "reliance")
    for normalizer in by_norm:
        accuracy, reliance = by_norm[normalizer], by_reliance[normalizer]
        plain = normalizer == "none"
        lost = None if plain else less(accuracy, by_norm.get("none", float("nan")), by=NOTICEABLE)
        weaker = None if plain else less(reliance, by_reliance.get("none", float("nan")), by=NOTICEABLE)
        shown = f"{normalizer}: accuracy where ‖x‖ alone tells"
        yield Comparison(shown, "" if plain else "less than without", f"{accuracy:.3f}", lost)
        shown = f"{normalizer}: accuracy that brightness decides"
        yield Comparison(shown, "" if plain else "less than without", f"{reliance:.3f}", weaker)


def plots(results: Results) -> dict[str, Plot]:
    shown = {"where ‖x‖ alone tells": _means(results, NORM, "test_accuracy")}
    shown |= {
        "digits, brightness tells too": _means(results, BRIGHTNESS, "test_accuracy"),
        "digits, brightness misleads": _means(results, BRIGHTNESS, "misled_accuracy"),
    }
    series = {name: (list(means), list(means.values())) for name, means in shown.items()}
    return {"accuracy": Plot("Accuracy with cues in the scale of x", "normalizer", "test accuracy", series, kind="bars")}


def _means(results: Results, cue: str, *path: str) -> dict[str, float]:
    groups = results.where(cue=cue).groups("normalizer")
    return {normalizer: group.mean(*path) for (normalizer,), group in groups.items()}


EXPERIMENT = Experiment(
    name="scale-cues",
    source="Akbar, Section 7.2",
    statement="Normalization forces the model to focus on relative patterns rather than the absolute scale of features.",
    quick=USUAL,
    full=replace(USUAL, networks={"mlp": {"width": 512, "depth": 10}}, epochs=50, seeds=(0, 1, 2, 3, 4)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
