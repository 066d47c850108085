"""Σ ℓ_l/σ_l and the Jacobian of pre-norm transformers against their depth, as initialized and trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from normscope.core.errors import InputError
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results
from normscope.lab.models.transformer import Branch, NextToken, VisionTransformer
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace

DATA = {"gpt": "markov", "vit": "digits"}
STATES = {"start": "as initialized", "end": "trained"}
SAMPLES = 2  # inputs at which Jacobians are taken
ROUNDING = 1e-9


@dataclass(frozen=True)
class DepthSettings(TrainingSettings):
    """depths: numbers of blocks, of two branches each."""

    networks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"gpt": {"width": 16, "heads": 2}, "vit": {"width": 16, "heads": 2, "patch": 2}}
    )
    normalizers: tuple[str, ...] = ("layer",)
    epochs: int = 10
    learning_rate: float = 3e-3
    depths: tuple[int, ...] = (2, 4, 8, 16)


def trials(settings: DepthSettings, seed: int) -> dict[str, Training]:
    if unknown := set(settings.networks) - set(DATA):
        raise InputError(f"this experiment is about transformers, {' and '.join(DATA)}, not {', '.join(sorted(unknown))}")
    made = {}
    for network in settings.networks:
        for depth in settings.depths:
            training = settings.training(network, settings.normalizers[0], seed, data=DATA[network], depth=depth)
            made[f"{network}, {depth} blocks"] = training
    return made


def measure(training: Training, workspace: Workspace) -> Numbers:
    """Before training and after: Σℓ/σ, log ‖J‖ of the stream from the first block to the last, and how σ grows."""
    model, split = prepare(training, workspace)
    probe = split.test[0][:SAMPLES]
    start = sums(model, probe)
    trained = fit(model, split, training, workspace)
    return {**ends(trained), "branches": len(branches(model)), "start": start, "end": sums(trained.model, probe)}


def branches(model: nn.Module) -> list[Branch]:
    """The residual branches, x + F(no(x)), in order."""
    return [module for module in model.modules() if isinstance(module, Branch)]


def sums(model: nn.Module, inputs: Tensor) -> Numbers:
    """Means over the inputs; everything in float64 and dense, so ℓ_l and ‖J‖ are exact norms at the point."""
    model = copy.deepcopy(model).double().eval()
    rows = [_at(model, sample) for sample in _stream(model, inputs)]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


@torch.no_grad()
def _stream(model: nn.Module, inputs: Tensor) -> Tensor:
    """(samples, tokens, width): what enters the first block."""
    if isinstance(model, NextToken):
        return model.embedding(inputs) + model.positions[:, : inputs.shape[1]]
    assert isinstance(model, VisionTransformer)
    return model.patches(inputs.double()).flatten(2).transpose(1, 2) + model.positions


def _at(model: nn.Module, stream: Tensor) -> Numbers:
    """At one sample: a branch's derivative behind the norm is ℓ_l (γ included), its divisor the least over tokens."""
    x, size = stream[None], stream.numel()
    total = torch.eye(size, dtype=x.dtype)
    ratios, deviations = [], []
    for branch in branches(model):
        normalizer = branch.normalizer
        assert isinstance(normalizer, nn.LayerNorm)
        width, epsilon = normalizer.normalized_shape, normalizer.eps
        normalized = layer_norm(x, width, eps=epsilon)
        inner = _jacobian(lambda z, b=branch, n=normalizer: b.function(n.weight * z + n.bias), normalized)
        outer = _jacobian(lambda y, w=width, e=epsilon: layer_norm(y, w, eps=e), x)
        deviations.append(float((x.var(-1, correction=0) + epsilon).sqrt().min()))
        ratios.append(float(torch.linalg.matrix_norm(inner, 2)) / deviations[-1])
        total = total + inner @ (outer @ total)
        with torch.no_grad():
            x = branch(x)
    growth = np.polyfit(np.log(np.arange(1, len(deviations) + 1)), np.log(deviations), 1)[0]
    return {
        "sum": sum(ratios),
        "log_product": float(np.log1p(ratios).sum()),
        "log_jacobian": float(torch.linalg.matrix_norm(total, 2).log()),
        "growth": float(growth),
    }


def _jacobian(function: Any, x: Tensor) -> Tensor:
    matrix: Tensor = torch.autograd.functional.jacobian(function, x, vectorize=True)
    return matrix.reshape(x.numel(), x.numel())


def judge(results: Results) -> Iterator[Comparison]:
    for (network,), group in results.groups("network").items():
        for state, name in STATES.items():
            found = [trial.numbers[state] for trial in group]
            below = all(row["log_jacobian"] <= row["log_product"] + ROUNDING <= row["sum"] + 2 * ROUNDING for row in found)
            for key, what, paper, agrees in (
                ("log_jacobian", "log ‖J‖", "at most Σ log(1 + ℓ/σ)", below),
                ("log_product", "Σ log(1 + ℓ/σ)", "at most Σℓ/σ", below),
                ("sum", "Σℓ/σ", "", None),
                ("growth", "p of σ_l ∝ l^p", "", None),
            ):
                depths, values = _by_depth(group, state, key)
                at = f"at {', '.join(map(str, depths))} blocks"
                ours = ", ".join(f"{value:.3g}" for value in values)
                if key != "growth" and len(depths) > 1:
                    ours += f"; as blocks^{np.polyfit(np.log(depths), np.log(values), 1)[0]:.2f}"
                yield Comparison(f"{network}, {name}: {what} {at}", paper, ours, agrees)
        depths, values = _by_depth(group, "test_accuracy")
        ours = ", ".join(f"{value:.3f}" for value in values)
        yield Comparison(f"{network}, trained: test accuracy at {', '.join(map(str, depths))} blocks", "", ours)


def _by_depth(group: Results, *path: str) -> tuple[list[int], list[float]]:
    """Numbers of blocks, and the mean of a number for each."""
    found: dict[int, list[float]] = {}
    for trial in group:
        value: Any = reduce(getitem, path, trial.numbers)
        found.setdefault(int(trial.parameters["options"]["depth"]), []).append(float(value))
    return list(found), [float(np.mean(values)) for values in found.values()]


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for (network,), group in results.groups("network").items():
        series = {
            f"{what}, {name}": _by_depth(group, state, key)
            for state, name in STATES.items()
            for key, what in {"sum": "Σℓ/σ", "log_jacobian": "log ‖J‖"}.items()
        }
        title = f"{network}: bound and Jacobian of the stream"
        drawn[network] = Plot(title, "blocks", "logarithm", series, "lines+points", log_x=True, log_y=True)
    return drawn


EXPERIMENT = Experiment(
    name="prenorm-depth",
    source="our answer to Than 2025, Section 6 (docs/open-questions.md, question 2)",
    statement="For pre-norm blocks the local constant is at most ∏(1 + ℓ/σ), whose logarithm is at most Σℓ/σ.",
    quick=DepthSettings(),
    full=DepthSettings(epochs=30, depths=(2, 4, 8, 16, 32), seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
