"""ReLUs that are 0 on every sample, with and without BN, at learning rates up to too large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, train
from normscope.lab.workspace import Workspace

FEW = 0.01  # of all units: up to so many are "no dead neurons"


@dataclass(frozen=True)
class DeadSettings(TrainingSettings):
    """rates: of learning, each tried, in place of learning_rate."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 6}})
    epochs: int = 10
    rates: tuple[float, ...] = (1e-3, 1e-2, 1e-1)


def trials(settings: DeadSettings, seed: int) -> dict[str, Training]:
    pairs = [(normalizer, rate) for normalizer in settings.normalizers for rate in settings.rates]
    return {
        f"{normalizer}, rate {rate:g}": settings.training("mlp", normalizer, seed, learning_rate=rate) for normalizer, rate in pairs
    }


def measure(trial: Training, workspace: Workspace) -> Numbers:
    trained = train(trial, workspace, dead_meter)
    return {**ends(trained), "dead": dead_share(trained.model, trained.split.train[0])}


def dead_meter(model: nn.Module, batch: torch.Tensor) -> Callable[[nn.Module], Numbers]:
    """The share of ReLUs without a positive output on the batch."""
    return lambda model: {"dead": dead_share(model, batch)}


def dead_share(model: nn.Module, inputs: torch.Tensor) -> float:
    """The share of ReLU units that are 0 on all inputs, in eval mode."""
    alive: list[torch.Tensor] = []
    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    handles = [relu.register_forward_hook(lambda _, __, output: alive.append((output > 0).any(0).flatten())) for relu in relus]
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        model.train(mode)
        for handle in handles:
            handle.remove()
    return 1 - float(torch.cat(alive).double().mean())


def judge(results: Results) -> Iterator[Comparison]:
    for (rate,), group in results.groups("learning_rate").items():
        plain, normalized = (group.where(normalizer=name).mean("dead") for name in ("none", "batch"))
        few = less(normalized, FEW)
        yield Comparison(f"rate {rate:g}: dead ReLUs with BN", "none", f"{normalized:.1%}", few)
        yield Comparison(f"rate {rate:g}: dead ReLUs without", "more", f"{plain:.1%}", less(normalized, plain))
        accuracies = [group.where(normalizer=name).mean("test_accuracy") for name in ("none", "batch")]
        yield Comparison(f"rate {rate:g}: test accuracy without → with BN", "", " → ".join(f"{a:.3f}" for a in accuracies))


def plots(results: Results) -> dict[str, Plot]:
    series = {label: group.track("dead") for label, group in results.by_label().items()}
    return {"dead": Plot("ReLUs that are 0 on a whole batch", "epoch", "share of all units", series)}


EXPERIMENT = Experiment(
    name="dead-relus",
    source="Akbar, Section 7.3",
    statement="Normalization keeps the network in a well-behaved regime: no saturations or dead neurons.",
    quick=DeadSettings(),
    full=DeadSettings(networks={"mlp": {"width": 512, "depth": 10}}, epochs=50, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
