"""Experiment 2 of Akbar: loss curves, gradient norms and the Hessian of a tiny regression network with and without BN."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from normscope.curvature.spectrum import Curvature, hessian
from normscope.geometry.flow import gradient_descent
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings, side_by_side
from normscope.lab.models import mlp
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

ZEROS = (1e-6, 1e-3)  # parts of the largest eigenvalue below which others are zero modes
STATED = {  # of the Hessian: name, the paper's figures, and their ratio, of which half is enough to agree
    "largest": ("λ_max", "5 × smaller with BN", 5.0),
    **{f"condition {part:g}": (f"κ over |λ| > {part:g} λ_max", "20 BN, 200 no BN", 10.0) for part in ZEROS},
}
ROUNDING = 1e-12  # of the largest eigenvalue
SETTLED = 10  # steps after which a gradient larger than the median is a spike
CONVERGED = 0.1  # of the loss at the start


@dataclass(frozen=True)
class ConditioningSettings(Settings):
    data: str = "waves"
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rates: tuple[float, ...] = (0.05, 0.2)
    width: int = 10
    depth: int = 3
    steps: int = 500


@dataclass(frozen=True)
class Descent:
    normalizer: str
    learning_rate: float
    data: str
    width: int
    depth: int
    steps: int


def trials(settings: ConditioningSettings, seed: int) -> dict[str, Descent]:
    pairs = [(kind, rate) for kind in ("none", "batch") for rate in settings.learning_rates]
    recipe = (settings.data, settings.width, settings.depth, settings.steps)
    return {f"{kind} rate {rate:g}": Descent(kind, rate, *recipe) for kind, rate in pairs}


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs[:, 0], targets.to(outputs))


def measure(trial: Descent, workspace: Workspace) -> Numbers:
    data = workspace.data(trial.data).train
    options = {"width": trial.width, "depth": trial.depth, "inputs": data[0][0].numel(), "classes": 1}
    model = mlp(**options, normalizer=trial.normalizer, generator=workspace.generator("weights")).train()
    path = gradient_descent(model, regression, data, trial.learning_rate, trial.steps, symmetries(model, data[0]))
    losses, norms = path.losses, path.gradient_norms
    numbers: Numbers = {
        "iterations": _first_below(losses, CONVERGED * float(losses[0])),
        "end_loss": float(losses[-1]),
        "spike": float(norms[SETTLED:].max() / norms[SETTLED:].median()),
        "losses": losses.tolist(),
        "gradient_norms": norms.tolist(),
    }
    if all(value.isfinite().all() for value in path.parameters.values()):
        model.double().load_state_dict({**model.state_dict(), **path.parameters})
        for name, quotient in (("plain", False), ("quotient", True)):
            numbers[name] = spectrum(hessian(model, regression, data, quotient=quotient, batch_size=len(data[0])))
    return numbers


def spectrum(curvature: Curvature) -> Numbers:
    """λ_max, and κ without zero modes, from all eigenvalues."""
    eigenvalues = torch.linalg.eigvalsh(curvature.dense())
    sizes = eigenvalues.abs()
    kept = {f"{part:g}": sizes[sizes > part * sizes.max()] for part in ZEROS}
    return {
        "largest": float(eigenvalues[-1]),
        **{f"condition {part}": float(values.max() / values.min()) for part, values in kept.items()},
        "eigenvalues": eigenvalues.tolist(),
    }


def _first_below(values: Tensor, level: float) -> float:
    reached = (values <= level).nonzero()
    return float(reached[0]) if len(reached) else math.inf


def judge(results: Results) -> list[Comparison]:
    rows = []
    for (rate,), group in results.groups("learning_rate").items():
        plain, normalized = (group.where(normalizer=kind) for kind in ("none", "batch"))
        for quantity, (name, paper, factor) in STATED.items():
            with_bn, without = (_median(part.values("plain", quantity)) for part in (normalized, plain))
            ours, agrees = side_by_side(with_bn, without), without >= factor / 2 * with_bn
            rows.append(Comparison(f"rate {rate:g}: {name}", paper, ours, agrees))
            with_bn, without = (_median(part.values("quotient", quantity)) for part in (normalized, plain))
            ours = side_by_side(with_bn, without)
            rows.append(Comparison(f"rate {rate:g}: {name}, symmetries divided out", "", ours))
        with_bn, without = (_median(part.values("iterations")) for part in (normalized, plain))
        ours, agrees = side_by_side(with_bn, without, ".0f"), with_bn < min(100, without)
        rows.append(Comparison(f"rate {rate:g}: iterations to a tenth of the loss", "under 100 BN, more without", ours, agrees))
        with_bn, without = (_median(part.values("spike")) for part in (normalized, plain))
        name = f"rate {rate:g}: largest gradient over the median, after step {SETTLED}"
        ours = side_by_side(with_bn, without, ".1f")
        rows.append(Comparison(name, "spikes only without BN", ours, with_bn < without))
    return rows


def _median(values: list[float]) -> float:
    """Over seeds; a training that blew up has no Hessian, and counts as infinitely sharp."""
    return statistics.median(math.inf if math.isnan(value) else value for value in values)


def plots(results: Results) -> dict[str, Plot]:
    curves = {"losses": "Training loss", "gradient_norms": "Norm of the gradient"}
    drawn = {}
    for quantity, title in curves.items():
        series = {
            f"{normalizer}, rate {rate:g}": (range(len(group[0].numbers[quantity])), [float(v) for v in group[0].numbers[quantity]])
            for (normalizer, rate), group in results.groups("normalizer", "learning_rate").items()
        }
        drawn[quantity.replace("_", "-")] = Plot(title, "iteration", title.lower(), series, log_y=True)
    series = {}
    for (normalizer, rate), group in results.groups("normalizer", "learning_rate").items():
        sizes = sorted((abs(value) for value in group[0].numbers.get("plain", {}).get("eigenvalues", [])), reverse=True)
        kept = [size for size in sizes if size > ROUNDING * sizes[0]]
        series[f"{normalizer}, rate {rate:g}, {len(sizes) - len(kept)} zeros left out"] = (range(1, len(kept) + 1), kept)
    drawn["spectrum"] = Plot("Eigenvalues of the Hessian at the end, by size", "rank", "|λ|", series, log_y=True)
    return drawn


EXPERIMENT = Experiment(
    name="conditioning",
    source="Akbar, Experiment 2 and Figure 8.1 right",
    statement="With BN λ_max is 5 times smaller, κ about 20 instead of 200, training takes under 100 iterations without spikes.",
    quick=ConditioningSettings(),
    full=ConditioningSettings(seeds=tuple(range(10)), learning_rates=(0.02, 0.05, 0.1, 0.2, 0.5), steps=5000),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
