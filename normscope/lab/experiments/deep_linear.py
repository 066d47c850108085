"""Deep linear networks with and without BN: do saddles go away, and do flat directions?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace

NEAR = 1.25  # a loss up to so many times the convex one's counts as converged
STUCK = 0.9  # of ln(classes), the loss of a network that has not left the saddle
SAMPLES = 80  # whose outputs are differentiated: for digits more outputs than affine maps of the input have dimensions
SADDLE = 0.3  # of He's weights: the product of ten layers is 10^-5 times as large


@dataclass(frozen=True)
class LinearSettings(TrainingSettings):
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 12, "activation": "linear"}})
    unit_ball: bool = False
    epochs: int = 25
    optimizer: str = "plain-sgd"
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    depths: tuple[int, ...] = (4, 10)


def trials(settings: LinearSettings, seed: int) -> dict[str, Training]:
    """The convex network of one layer, then every depth with and without BN, from He's weights and from near the saddle at 0."""
    found = {"1 layer": settings.training("mlp", "none", seed, depth=1)}
    for depth in settings.depths:
        for normalizer in settings.normalizers:
            usual = settings.training("mlp", normalizer, seed, depth=depth)
            found[f"{depth} layers, {normalizer}"] = usual
            found[f"{depth} layers, {normalizer}, near 0"] = replace(usual, initial_scale=SADDLE)
    return found


def measure(trial: Training, workspace: Workspace) -> Numbers:
    model, split = prepare(trial, workspace)
    flat = flat_directions(model, split.train[0][:SAMPLES])
    return {**ends(fit(model, split, trial, workspace)), **flat, "chance_loss": math.log(split.classes)}


def flat_directions(model: nn.Module, inputs: torch.Tensor) -> Numbers:
    """Directions of the parameters that leave all outputs on these inputs: their number less the rank of ∂outputs/∂parameters."""
    copied = torch.func.replace_all_batch_norm_modules_(copy.deepcopy(model).double().train())
    parameters = {name: parameter.detach() for name, parameter in copied.named_parameters()}

    def outputs(chosen: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(copied, chosen, (inputs.double(),))
        return y.flatten()

    parts = torch.func.jacrev(outputs, chunk_size=100)(parameters)
    jacobian = torch.cat([part.flatten(1) for part in parts.values()], 1)
    rank = int(torch.linalg.matrix_rank(jacobian))
    return {"parameters": jacobian.shape[1], "rank": rank, "flat": jacobian.shape[1] - rank}


def judge(results: Results) -> Iterator[Comparison]:
    convex = results.where(depth=1).mean("train_loss")
    for label, group in results.by_label().items():
        paper, agrees = "", None
        loss, parameters = group.mean("train_loss"), group[0].parameters
        if parameters["normalizer"] == "batch":
            paper, agrees = "as low as convex", less(loss, NEAR * convex)
        elif parameters["initial_scale"] == SADDLE:
            paper, agrees = "held by the saddle", less(STUCK * group.mean("chance_loss"), loss)
        yield Comparison(f"{label}: training loss", paper, f"{loss:.3f}", agrees)
    for (depth,), group in results.where(initial_scale=1.0).groups("depth").items():
        if depth == 1:
            continue
        plain, normalized = (group.where(normalizer=name) for name in ("none", "batch"))
        shown = " → ".join(f"{part.mean('flat'):.0f} of {part.mean('parameters'):.0f}" for part in (plain, normalized))
        fewer = less(normalized.mean("flat"), plain.mean("flat"))
        yield Comparison(f"{depth} layers: flat directions without → with BN", "BN removes them", shown, fewer)


def plots(results: Results) -> dict[str, Plot]:
    convex = results.where(depth=1).by_label()
    drawn = {}
    for (depth,), group in results.groups("depth").items():
        if depth == 1:
            continue
        series = {label: part.track("train_loss") for label, part in {**convex, **group.by_label()}.items()}
        drawn[f"loss-{depth}"] = Plot("Training loss of linear networks", "epoch", "cross-entropy", series, log_y=True)
    return drawn


EXPERIMENT = Experiment(
    name="deep-linear",
    source="Akbar, Sections 6.1 and 7.1",
    statement="In deep linear networks BN eliminates pathological saddles, enabling global convergence, and removes zero modes.",
    quick=LinearSettings(),
    full=LinearSettings(depths=(2, 4, 10, 20), epochs=100, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
