"""Does the value of Than 2025's Theorem 20 track the gap between test and training loss, over a family of networks?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.stats import kendalltau

from normscope.bounds.bound import Bound
from normscope.bounds.generalization import generalization
from normscope.bounds.losses import loss_of
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less, power
from normscope.lab.training import Training, TrainingSettings, ends, train, with_and_without
from normscope.lab.workspace import Workspace

TRACKS = 0.5  # Kendall's τ from which a value tracks the gap
LOSS = "l1"
VERSIONS = {"local": "local constants", "global": "global constant", "gradient": "largest gradient"}
BASELINE = "training"
PREDICTORS = {
    BASELINE: "training loss alone, the lower the larger the gap",
    "bound": "value of Theorem 20, certified, less the training loss",
    "local": "Σ (m_i/m) λ_i L_i, certified on cells",
    "global": "Σ (m_i/m) λ_i L, certified everywhere",
    "gradient": "Σ (m_i/m) λ_i L_i by largest gradients",
}


@dataclass(frozen=True)
class FamilySettings(TrainingSettings):
    """depths, widths: every pair is trained with every normalizer, on the same data."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {}})
    normalizers: tuple[str, ...] = ("none", "batch", "layer")
    images: int | None = 400
    epochs: int = 60
    depths: tuple[int, ...] = (2, 4, 6)
    widths: tuple[int, ...] = (16, 64)


def trials(settings: FamilySettings, seed: int) -> dict[str, Training]:
    sizes = itertools.product(settings.depths, settings.widths)
    return with_and_without(settings, seed, {f", {depth} × {width}": {"depth": depth, "width": width} for depth, width in sizes})


def measure(trial: Training, workspace: Workspace) -> Numbers:
    """The theorem's value for a trained network, and the gap of the same loss on test data that shaped no cell."""
    trained = train(trial, workspace)
    inputs, classes = trained.split.test
    half = len(inputs) // 2
    found = generalization(
        trained.model, LOSS, trained.split.train, held_out=(inputs[:half], classes[:half]),
        select=[f"Than 2025, {title}" for title in VERSIONS.values()], generator=workspace.generator("cells"),
    )  # fmt: skip
    bounds = {name: found[f"Than 2025, Theorem 20, {title}"] for name, title in VERSIONS.items()}
    with torch.no_grad():
        unseen = float(loss_of(LOSS).function(trained.model(inputs[half:]), classes[half:]).mean())
    return {
        **ends(trained),
        "gap": unseen - found.empirical,
        "predicted": {
            "bound": math.exp(bounds["local"].value.log) - found.empirical,
            "training": -found.empirical,
            **{name: rise(bound) for name, bound in bounds.items()},
        },
        "vacuous": bounds["local"].vacuous,
    }


def rise(bound: Bound) -> float:
    """log10 of Σ (m_i/m) λ_i L_i over the cells as the theorem has it; the bound cuts each term at the largest loss."""
    counts, distances, constants = (torch.as_tensor(bound.parts[name]).double() for name in ("m_i", "λ_i", "L_i"))
    logs = counts.log() + distances.log() + constants.log()
    return float(torch.logsumexp(logs, 0) - torch.as_tensor(bound.parts["m"]).double().log()) / math.log(10)


def judge(results: Results) -> Iterator[Comparison]:
    for name, what in PREDICTORS.items():
        correlation = tau(results.values("predicted", name), results.values("gap"))
        tracks = None if name == BASELINE else less(TRACKS, correlation)
        paper = "" if name == BASELINE else "tracks"
        yield Comparison(f"{what}: Kendall's τ with the gap", paper, f"{correlation:+.2f}", tracks)
    vacuous = sum(bool(trial.numbers["vacuous"]) for trial in results)
    yield Comparison("networks for which the certified value is vacuous", "", f"{vacuous} of {len(results)}")
    means = {normalizer: group.mean("predicted", "local") for (normalizer,), group in results.groups("normalizer").items()}
    gaps = {normalizer: group.mean("gap") for (normalizer,), group in results.groups("normalizer").items()}
    plain = means.pop("none", math.nan)
    for normalizer, value in means.items():
        shown = f"{power(plain)} → {power(value)}, gap {gaps.get('none', math.nan):.3f} → {gaps[normalizer]:.3f}"
        yield Comparison(f"certified sum, none → {normalizer}", "smaller with normalizers", shown, less(value, plain))


def tau(predicted: list[float], gaps: list[float]) -> float:
    """Kendall's rank correlation, between −1 and 1; 0 where all predictions are equal, for they order nothing."""
    if len(set(predicted)) < 2:
        return 0.0 if len(predicted) > 1 else math.nan
    return float(kendalltau(predicted, gaps).statistic)


def plots(results: Results) -> dict[str, Plot]:
    def series(name: str) -> dict[str, tuple[list[float], list[float]]]:
        groups = results.groups("normalizer").items()
        return {normalizer: (group.values("predicted", name), group.values("gap")) for (normalizer,), group in groups}

    title = "What the theorem predicts, and the gap"
    return {
        name: Plot(title, f"log10 {what}" if name in VERSIONS else what, "test loss − training loss", series(name), kind="points")
        for name, what in PREDICTORS.items()
        if name != BASELINE
    }


EXPERIMENT = Experiment(
    name="bound-prediction",
    source="Than 2025, Theorem 20",
    statement="The bound on the test loss, through local Lipschitz constants, explains which networks generalize.",
    quick=FamilySettings(),
    full=FamilySettings(images=None, epochs=200, depths=(2, 4, 6, 8), widths=(16, 64, 256), seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
