"""Santurkar et al. 2018: how much loss and gradient vary along the step, epoch by epoch, and how large gradients become."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from normscope.core.errors import InputError
from normscope.curvature.landscape import landscape
from normscope.lab.datasets import Labelled
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, side_by_side
from normscope.lab.experiments.max_learning_rate import trains
from normscope.lab.training import Training, TrainingSettings, ends, prepare, train, with_and_without
from normscope.lab.workspace import Workspace

STEPS = (0.5, 1.0, 2.0, 4.0)  # lengths along the gradient over the learning rate, the paper's range
QUANTITIES = {
    "loss_range": "range of the loss along the step",
    "gradient_change": "change of the gradient along the step",
    "smoothness": "effective β",
}


@dataclass(frozen=True)
class SmoothnessSettings(TrainingSettings):
    """learning_rates: in place of learning_rate. images: 11 batches; a shorter one at the end would have larger gradients."""

    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 10}})
    images: int | None = 1408
    unit_ball: bool = False
    optimizer: str = "plain-sgd"
    learning_rates: tuple[float, ...] = (0.03, 0.1)
    weight_decay: float = 0.0
    epochs: int = 20


def trials(settings: SmoothnessSettings, seed: int) -> dict[str, Training]:
    return with_and_without(settings, seed, {f" rate {rate:g}": {"learning_rate": rate} for rate in settings.learning_rates})


class SlopeMeter:
    """The landscape on one batch after every epoch, and the norm of every gradient that was stepped along."""

    def __init__(self, model: nn.Module, batch: Labelled, learning_rate: float) -> None:
        self.batch = batch
        self.rates = [step * learning_rate for step in STEPS]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.squares: list[torch.Tensor] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._seen)

    def _seen(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.squares.append(parameter.grad.detach().square().sum())

    def __call__(self, model: nn.Module) -> Numbers:
        norms = torch.stack(self.squares).reshape(-1, len(self.parameters)).sum(1).sqrt().tolist() if self.squares else []
        self.squares.clear()
        return {**self._along_the_step(model), "gradient_norms": norms}

    def _along_the_step(self, model: nn.Module) -> Numbers:
        """NaN where a network that blew up has no finite loss, or one that died no gradient."""
        try:
            found = landscape(model, cross_entropy, self.batch, learning_rates=self.rates, batch_size=len(self.batch[0]))
        except InputError:
            return dict.fromkeys(QUANTITIES, math.nan)
        low, high = found.loss_range
        change = float(found.gradient_changes.max())
        return {"loss_range": high - low, "gradient_change": change, "smoothness": found.smoothness}


def measure(training: Training, workspace: Workspace) -> Numbers:
    _, split = prepare(training, workspace)
    batch = split.train[0][: training.batch_size], split.train[1][: training.batch_size]
    return ends(train(training, workspace, lambda model, inputs: SlopeMeter(model, batch, training.learning_rate)))


def judge(results: Results) -> Iterator[Comparison]:
    for (network, rate), own in results.groups("network", "learning_rate").items():
        plain, normalized = (own.where(normalizer=kind) for kind in ("none", "batch"))
        what = f"{network}, rate {rate:g}"
        both_train = all(map(trains, own))
        for quantity, name in QUANTITIES.items():
            with_bn, without = (statistics.fmean(group.track(quantity)[1]) for group in (normalized, plain))
            paper, agrees = ("smaller with BN", with_bn < without) if both_train else ("", None)
            ours = side_by_side(with_bn, without)
            yield Comparison(f"{what}: {name}, mean over epochs", paper, ours, agrees)
        with_bn, without = (max(map(spike, _norms(group))) for group in (normalized, plain))
        ours = side_by_side(with_bn, without)
        paper, agrees = ("no spikes with BN", with_bn < without) if both_train else ("", None)
        yield Comparison(f"{what}: largest gradient over the median", paper, ours, agrees)
        ours = f"{normalized.mean('train_loss'):.3f} BN, {plain.mean('train_loss'):.3f} no BN"
        yield Comparison(f"{what}: training loss at the end", "", ours)


def spike(norms: Sequence[float]) -> float:
    """The largest norm over the median; infinite where training blew up."""
    return max(norms) / statistics.median(norms) if norms and all(map(math.isfinite, norms)) else math.inf


def _norms(group: Results) -> list[list[float]]:
    """The norms of the gradients of every trial, step by step."""
    return [[float(norm) for record in trial.numbers["history"] for norm in record["gradient_norms"]] for trial in group]


def plots(results: Results) -> dict[str, Plot]:
    groups = {
        f"{network}, {kind}, rate {rate:g}": group
        for (network, kind, rate), group in results.groups("network", "normalizer", "learning_rate").items()
    }
    drawn = {
        quantity.replace("_", "-"): Plot(
            name[0].upper() + name[1:], "epoch", name, {what: group.track(quantity) for what, group in groups.items()}, log_y=True
        )
        for quantity, name in QUANTITIES.items()
    }
    norms = {what: _norms(group)[0] for what, group in groups.items()}
    series = {what: (range(1, len(values) + 1), values) for what, values in norms.items()}
    drawn["gradient-norms"] = Plot("Norm of the gradient", "step", "‖∇L‖", series, log_y=True)
    return drawn


EXPERIMENT = Experiment(
    name="smoothness",
    source="Santurkar et al. 2018, Figure 4; Akbar, Section 6",
    statement="With BN the loss and its gradient change less along a step, and gradients have no spikes.",
    quick=SmoothnessSettings(),
    full=SmoothnessSettings(seeds=(0, 1, 2), networks={"mlp": {"width": 512, "depth": 10}, "vgg": {}}, epochs=100),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
