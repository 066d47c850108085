"""Training in batches from tiny to large: BN against normalizers that do not look at the batch, and batch renormalization."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, accuracy_numbers

NOTICEABLE = 0.02  # of accuracy
HELPERS = {"renorm": "batch renormalization", "group": "group normalization", "layer": "layer normalization"}


@dataclass(frozen=True)
class BatchSettings(TrainingSettings):
    """sizes: of batches, each tried, in place of batch_size; as many samples are seen with each, at the recipe's learning rate."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 4}})
    normalizers: tuple[str, ...] = ("none", "batch", "renorm", "group", "layer")
    epochs: int = 5
    sizes: tuple[int, ...] = (2, 4, 16, 128)


def trials(settings: BatchSettings, seed: int) -> dict[str, Training]:
    if min(settings.sizes, default=0) < 2:
        raise InputError("sizes must be at least 2: a batch of one has no batch statistics")
    pairs = [(normalizer, size) for normalizer in settings.normalizers for size in settings.sizes]
    return {f"{normalizer}, {size}": settings.training("mlp", normalizer, seed, batch_size=size) for normalizer, size in pairs}


def judge(results: Results) -> Iterator[Comparison]:
    sizes = [size for (size,) in results.groups("batch_size")]
    smallest = min(sizes)
    groups = results.where(batch_size=smallest).groups("normalizer")
    tiny = {normalizer: group.mean("test_accuracy") for (normalizer,), group in groups.items()}
    normal = tiny.get("batch", math.nan)
    best = max(results.where(normalizer="batch", batch_size=size).mean("test_accuracy") for size in sizes)
    shown = f"{best:.3f} → {normal:.3f}"
    yield Comparison(f"BN: test accuracy, best size → {smallest}", "falls", shown, less(normal, best, by=NOTICEABLE))
    for normalizer, name in HELPERS.items():
        accuracy = tiny.get(normalizer, math.nan)
        helps = less(normal, accuracy, by=NOTICEABLE)
        yield Comparison(f"{name}: test accuracy in batches of {smallest}", "above BN", f"{accuracy:.3f}", helps)
    plain = tiny.get("none", math.nan)
    yield Comparison(f"no normalizer: test accuracy in batches of {smallest}", "", f"{plain:.3f}")


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for (normalizer,), group in results.groups("normalizer").items():
        sizes = group.groups("batch_size")
        series[normalizer] = ([size for (size,) in sizes], [same.mean("test_accuracy") for same in sizes.values()])
    return {"accuracy": Plot("Test accuracy by batch size", "batch size", "test accuracy", series, "lines+points", log_x=True)}


EXPERIMENT = Experiment(
    name="small-batches",
    source="Akbar, Section 9.4",
    statement="In very small batches BN's noise overwhelms the training signal; batch renormalization or GN can help.",
    quick=BatchSettings(),
    full=BatchSettings(networks={"mlp": {"width": 256, "depth": 6}}, sizes=(2, 4, 8, 16, 32, 128), epochs=20, seeds=(0, 1, 2)),
    trials=trials,
    measure=accuracy_numbers,
    judge=judge,
    plots=plots,
)
