"""Shift at test time: BN with the statistics of training against statistics of the shifted data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.recalibration import recalibrated
from normscope.lab.training import Training, TrainingSettings, ends, evaluated, train, with_and_without
from normscope.lab.workspace import Workspace

NOTICEABLE = 0.02  # of accuracy
SHIFTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "contrast": lambda images, noise: 0.3 * images,
    "brightness": lambda images, noise: images + 0.5 * images.max(),
    "negative": lambda images, noise: images.max() - images,
    "noise": lambda images, noise: images + 0.5 * images.std() * torch.randn(images.shape, generator=noise),
}
USUAL = TrainingSettings(
    networks={"mlp": {"width": 64, "depth": 5}}, normalizers=("none", "batch", "layer"), epochs=20, seeds=(0, 1, 2)
)


def measure(trial: Training, workspace: Workspace) -> Numbers:
    """Accuracy on the test part as it is and shifted, with the statistics of training and with those of what is tested."""
    trained = train(trial, workspace)
    images, classes = trained.split.test
    shifted = {name: shift(images, workspace.generator(name)) for name, shift in SHIFTS.items()}
    accuracies = {
        name: {
            **evaluated(trained.model, (inputs, classes), "trained"),
            **evaluated(recalibrated(trained.model, inputs), (inputs, classes), "adapted"),
        }
        for name, inputs in {"none": images, **shifted}.items()
    }
    return {**ends(trained), "shifts": accuracies}


def judge(results: Results) -> Iterator[Comparison]:
    groups = {normalizer: group for (normalizer,), group in results.groups("normalizer").items()}
    nothing = Results([])
    plain, normalized, layer = (groups.get(name, nothing) for name in ("none", "batch", "layer"))
    for name in SHIFTS:
        accuracies = ", ".join(f"{_accuracy(group, name):.3f}" for group in (plain, normalized, layer))
        yield Comparison(f"{name}: accuracy of none, BN, LN", "", accuracies)
    lost = {normalizer: _lost(group) for normalizer, group in groups.items()}
    worse = less(_lost(plain), _lost(normalized), by=NOTICEABLE)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in lost.items())
    yield Comparison("accuracy lost by shifts, on average", "more with BN", shown, worse)
    before, after = (_mean_shifted(normalized, how) for how in ("trained", "adapted"))
    better = less(before, after, by=NOTICEABLE)
    yield Comparison("BN, statistics of training → of the shifted data", "helps", f"{before:.3f} → {after:.3f}", better)


def plots(results: Results) -> dict[str, Plot]:
    shifts = ["none", *SHIFTS]
    series = {}
    for (normalizer,), group in results.groups("normalizer").items():
        series[normalizer] = (shifts, [_accuracy(group, name) for name in shifts])
        if normalizer == "batch":
            series["batch, adapted"] = (shifts, [_accuracy(group, name, "adapted") for name in shifts])
    return {"accuracy": Plot("Accuracy on shifted test data", "shift", "test accuracy", series, kind="bars")}


def _accuracy(group: Results, shift: str, how: str = "trained") -> float:
    return group.mean("shifts", shift, f"{how}_accuracy")


def _mean_shifted(group: Results, how: str = "trained") -> float:
    return statistics.fmean(_accuracy(group, name, how) for name in SHIFTS)


def _lost(group: Results) -> float:
    return _accuracy(group, "none") - _mean_shifted(group)


EXPERIMENT = Experiment(
    name="test-shift",
    source="Akbar, Section 9.4",
    statement="If training and test data differ, BN's training statistics introduce error, less so when updated on new data.",
    quick=USUAL,
    full=replace(USUAL, networks={"mlp": {"width": 512, "depth": 10}}, epochs=50, seeds=(0, 1, 2, 3, 4)),
    trials=with_and_without,
    measure=measure,
    judge=judge,
    plots=plots,
)
