"""Capacity against the number of normalizers, in residual and attention networks, where the paper's theorems do not reach."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from normscope._watch.layers import NORMALIZING
from normscope.certify.robustness import local_brackets
from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less, power
from normscope.lab.measurements import audited
from normscope.lab.models.surgery import exchange
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace

BALL = 0.01  # radius of the balls on which constants are bracketed; attention has no finite constant everywhere
SAMPLES = 3
FALLS = 0.9  # a factor a normalizer at which twenty of them make a tenth
NAMES = {"mlp": "residual", "resnet18": "ResNet-18", "vit": "attention"}


@dataclass(frozen=True)
class Kept(Training):
    """share: of the normalizers that stay, spread over the depth; the others are left out."""

    share: float = 1.0


@dataclass(frozen=True)
class CapacitySettings(TrainingSettings):
    """normalizers: one for each of the networks. shares: of the normalizers, how many stay."""

    networks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {
            "mlp": {"width": 32, "depth": 10, "skip": True},
            "vit": {"patch": 4, "width": 16, "depth": 3, "heads": 2},
        }
    )
    normalizers: tuple[str, ...] = ("batch", "layer")
    epochs: int = 10
    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)


def trials(settings: CapacitySettings, seed: int) -> dict[str, Kept]:
    if len(settings.networks) != len(settings.normalizers):
        raise InputError(f"normalizers must name one per network: {len(settings.networks)}, got {len(settings.normalizers)}")
    return {
        f"{network} {normalizer}, {share:.0%}": Kept(**vars(settings.training(network, normalizer, seed)), share=share)
        for network, normalizer in zip(settings.networks, settings.normalizers, strict=True)
        for share in settings.shares
    }


def measure(trial: Kept, workspace: Workspace) -> Numbers:
    """Brackets of the trained network on small balls around test samples, and the products that the paper looks at."""
    model, split = prepare(trial, workspace)
    kept = keep_normalizers(model, trial.share)
    trained = fit(model, split, trial, workspace)
    probe = split.test[0]
    brackets = local_brackets(model, probe[:2], probe[:SAMPLES], radius=BALL).brackets
    return {
        **ends(trained),
        "normalizers": kept,
        "lower_log10": statistics.fmean(bracket.lower.log10 for bracket in brackets),
        "upper_log10": statistics.fmean(bracket.proved.log10 for bracket in brackets),
        "audit": audited(model, split.train[0][: trial.batch_size], workspace.generator("audit")),
    }


def keep_normalizers(model: nn.Module, share: float) -> int:
    """Leave out all but a share of the normalizers, those that stay spread evenly; how many stay."""
    normalizers = [module for module in model.modules() if isinstance(module, NORMALIZING)]
    count = round(share * len(normalizers))
    chosen = {int(index) for index in np.linspace(0, len(normalizers) - 1, count).round()}
    dropped = {id(module) for index, module in enumerate(normalizers) if index not in chosen}
    exchange(model, lambda module: nn.Identity() if id(module) in dropped else None)
    return len(chosen)


def judge(results: Results) -> Iterator[Comparison]:
    for (network,), group in results.groups("network").items():
        name = NAMES.get(network, network)
        for side, what in {"upper_log10": "certified upper bound", "lower_log10": "witnessed lower bound"}.items():
            slope, (first, last) = _slope(group, side), _ends(group, side)
            shown = f"×{10**slope:.3g} ({power(first)} → {power(last)})"
            yield Comparison(f"{name}: {what} per added normalizer", "falls exponentially", shown, less(10**slope, FALLS))
        product = _ends(group, "audit", "products", "normalizers_tight")[1]
        yield Comparison(f"{name}: ∏max|γ|/σ of all", "exponentially small", power(product), less(product, 0.0))
        gaps = " → ".join(f"{gap:.3f}" for gap in _ends(group, "gap_accuracy"))
        yield Comparison(f"{name}: gap of accuracy, none → all normalizers", "", gaps)


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for (network,), group in results.groups("network").items():
        for side in ("upper", "lower"):
            series[f"{NAMES.get(network, network)}, {side}"] = _by_count(group, f"{side}_log10")
    title = f"Lipschitz constants on balls of radius {BALL:g} around samples"
    return {"constants": Plot(title, "normalizers", "log10 of the bound", series, "lines+points")}


def _by_count(group: Results, *path: str) -> tuple[list[float], list[float]]:
    """Numbers of normalizers, and the mean of a number for each."""
    shares = group.groups("share").values()
    return [part.mean("normalizers") for part in shares], [part.mean(*path) for part in shares]


def _ends(group: Results, *path: str) -> tuple[float, float]:
    _, values = _by_count(group, *path)
    return values[0], values[-1]


def _slope(group: Results, *path: str) -> float:
    """Decades a normalizer, by least squares; NaN for one count only."""
    counts, values = _by_count(group, *path)
    return float(np.polyfit(counts, values, 1)[0]) if len(set(counts)) > 1 else float("nan")


EXPERIMENT = Experiment(
    name="capacity-count",
    source="Than 2025, Corollary 11 and Section 1",
    statement="Constants fall exponentially with the number of normalizers, and naturally so in residual and attention networks.",
    quick=CapacitySettings(),
    full=CapacitySettings(
        networks={"resnet18": {"stem": "small"}, "vit": {"patch": 4, "width": 64, "depth": 6, "heads": 4}}, epochs=30, seeds=(0, 1)
    ),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
