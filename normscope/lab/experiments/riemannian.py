"""Cho & Lee 2017 in small: descent on spheres (SGD-G, Adam-G) against SGD and Adam on a network with BN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, TrialResult, less
from normscope.lab.measurements import weight_norms
from normscope.lab.training import Training, TrainingSettings, ends, train, with_and_without
from normscope.lab.workspace import Workspace

PAIRS = {  # on a sphere ← in the flat space, and errors in the paper (VGG-13 on CIFAR-10)
    "sgdg": ("sgd", "5.87 % against 5.88 %"),
    "adamg": ("sgd", "6.05 % against 5.88 %, better on other networks"),
}
KEPT = 1e-3  # the part by which a norm may change on a sphere, by rounding
AS_WELL = 0.005  # of test error; the paper's own figures differ by less, and one digit of the test part is 0.003


@dataclass(frozen=True)
class RiemannianSettings(TrainingSettings):
    """optimizers: name → learning rate, in place of optimizer and learning_rate; the paper's, and Adam's usual one."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 6}})
    normalizers: tuple[str, ...] = ("batch",)
    optimizers: Mapping[str, float] = field(default_factory=lambda: {"sgd": 0.1, "sgdg": 0.01, "adam": 1e-3, "adamg": 1e-3})
    seeds: tuple[int, ...] = (0, 1, 2)
    unit_ball: bool = False
    weight_decay: float = 5e-4
    epochs: int = 15


def trials(settings: RiemannianSettings, seed: int) -> dict[str, Training]:
    rates = settings.optimizers.items()
    return with_and_without(settings, seed, {f" {name}": {"optimizer": name, "learning_rate": rate} for name, rate in rates})


def measure(training: Training, workspace: Workspace) -> Numbers:
    return ends(train(training, workspace, lambda model, batch: lambda model: {"weights": weight_norms(model)}))


def judge(results: Results) -> Iterator[Comparison]:
    for (network, normalizer), own in results.groups("network", "normalizer").items():
        groups = {name: group for (name,), group in own.groups("optimizer").items()}
        errors = {name: 1 - group.mean("test_accuracy") for name, group in groups.items()}
        what = f"{network}, {normalizer}"
        for spherical, (flat, paper) in PAIRS.items():
            if {spherical, flat} <= set(groups):
                ours = f"{errors[spherical]:.2%} against {errors[flat]:.2%}"
                agrees = less(errors[spherical], errors[flat], by=-AS_WELL)
                yield Comparison(f"{what}: test error, {spherical} against {flat}", paper, ours, agrees)
        for name, group in groups.items():
            change = max(map(norm_change, group))
            paper, kept = ("constant", change < KEPT) if name in PAIRS else ("", None)
            yield Comparison(f"{what}, {name}: largest change of a hidden ‖W‖", paper, f"{change:.2%}", kept)
            ours = f"{errors[name]:.2%} test error, {group.mean('train_loss'):.4f} training loss"
            yield Comparison(f"{what}, {name}: at the end", "", ours)


def norm_change(trial: TrialResult) -> float:
    """The largest relative change of the Frobenius norm of a weight other than the last, which is not scale-free."""
    first, last = (trial.numbers["history"][index]["weights"] for index in (0, -1))
    return max(abs(float(last[name]["frobenius_norm"]) / float(first[name]["frobenius_norm"]) - 1) for name in list(first)[:-1])


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for quantity, title, log in (("train_loss", "Training loss", True), ("test_accuracy", "Test accuracy", False)):
        series = {}
        for (network, normalizer, name), group in results.groups("network", "normalizer", "optimizer").items():
            epochs, values = group.track(quantity)
            series[f"{network}, {normalizer}, {name}"] = (epochs[1:], values[1:])
        drawn[quantity.replace("_", "-")] = Plot(title, "epoch", title.lower(), series, log_y=log)
    return drawn


EXPERIMENT = Experiment(
    name="riemannian",
    source="Cho & Lee 2017, Table 2",
    statement="Moving scale-free weights on their spheres (SGD-G, Adam-G) does at least as well as SGD.",
    quick=RiemannianSettings(),
    full=RiemannianSettings(networks={"mlp": {"width": 512, "depth": 10}, "vgg": {}}, epochs=200),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
