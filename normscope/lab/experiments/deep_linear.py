"""Deep linear networks with and without BN: do saddles go away, and do flat directions?"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, fit, prepare
from normscope.lab.workspace import Workspace

NEAR = 1.25  # a loss up to so many times the convex one's counts as converged
STUCK = 0.9  # of ln(classes), the loss of a network that has not left the saddle
SAMPLES = 80  # of which outputs are differentiated: more outputs than affine maps of the input have dimensions
SADDLE = 0.3  # of He's weights: the product of ten layers is 10^-5 times as large


@dataclass(frozen=True)
class Linear(Training):
    """scale: of the initial weights."""

    scale: float = 1.0


@dataclass(frozen=True)
class LinearSettings(TrainingSettings):
    networks: dict[str, dict[str, object]] = field(default_factory=lambda: {"mlp": {"width": 12, "activation": "linear"}})
    epochs: int = 25
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    depths: tuple[int, ...] = (4, 10)


def trials(settings: LinearSettings, seed: int) -> dict[str, Linear]:
    """The convex network of one layer, then every depth with and without BN, from He's weights and from near the saddle at 0."""
    base = settings.training("mlp", "none", seed, optimizer="plain-sgd", unit_ball=False)
    start = Linear(**vars(base))
    found = {"convex": replace(start, options={**start.options, "depth": 1})}
    for depth in settings.depths:
        for normalizer in settings.normalizers:
            for where, scale in {"": 1.0, " near 0": SADDLE}.items():
                options = {**start.options, "depth": depth}
                found[f"{depth} layers, {normalizer}{where}"] = replace(start, normalizer=normalizer, options=options, scale=scale)
    return found


def measure(trial: Linear, workspace: Workspace) -> Numbers:
    model, split = prepare(trial, workspace)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(trial.scale)
    flat = flat_directions(model, split.train[0][:SAMPLES])
    return {**fit(model, split, trial, workspace).numbers(), **flat, "chance_loss": math.log(split.classes)}


def flat_directions(model: nn.Module, inputs: torch.Tensor) -> Numbers:
    """Directions of the parameters that leave every output as it is: their number less the rank of ∂outputs/∂parameters."""
    copied = torch.func.replace_all_batch_norm_modules_(copy.deepcopy(model).double().train())
    parameters = {name: parameter.detach() for name, parameter in copied.named_parameters()}

    def outputs(chosen: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(copied, chosen, (inputs.double(),))
        return y.flatten()

    parts = torch.func.jacrev(outputs, chunk_size=100)(parameters)
    jacobian = torch.cat([part.flatten(1) for part in parts.values()], 1)
    rank = int(torch.linalg.matrix_rank(jacobian))
    return {"parameters": jacobian.shape[1], "rank": rank, "flat": jacobian.shape[1] - rank}


def judge(results: Results) -> list[Comparison]:
    convex = results.labelled("convex").mean("train_loss")
    rows = [Comparison("one layer (convex): training loss", "", f"{convex:.3f}")]
    for label in results.labels[1:]:
        group = results.labelled(label)
        loss = group.mean("train_loss")
        if ", batch" in label:
            rows.append(
                Comparison(f"{label}: training loss", "no bad saddles, as convex", f"{loss:.3f}", less(loss, NEAR * convex))
            )
        elif label.endswith("near 0"):
            stuck = less(STUCK * group.mean("chance_loss"), loss)
            rows.append(Comparison(f"{label}: training loss", "held by the saddle", f"{loss:.3f}", stuck))
        else:
            rows.append(Comparison(f"{label}: training loss", "", f"{loss:.3f}"))
    for depth in _depths(results):
        plain, normalized = (results.labelled(f"{depth} layers, {name}") for name in ("none", "batch"))
        shown = [f"{group.mean('flat'):.0f} of {group.mean('parameters'):.0f}" for group in (plain, normalized)]
        fewer = less(normalized.mean("flat"), plain.mean("flat"))
        rows.append(Comparison(f"{depth} layers: flat directions without → with BN", "BN removes them", " → ".join(shown), fewer))
    return rows


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for label in results.labels:
        epochs, losses = results.labelled(label).track("train_loss")
        series[label] = (epochs[1:], losses[1:])
    return {"loss": Plot("Training loss of linear networks", "epoch", "cross-entropy", series, log_y=True)}


def _depths(results: Results) -> list[int]:
    return list(dict.fromkeys(int(label.split()[0]) for label in results.labels[1:]))


EXPERIMENT = Experiment(
    name="deep-linear",
    source="Akbar, 6.2 and 6.4",
    statement="In deep linear networks BN eliminates pathological saddles, enabling global convergence, and removes zero modes.",
    quick=LinearSettings(),
    full=LinearSettings(depths=(2, 4, 10, 20), epochs=100, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
