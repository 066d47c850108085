"""Experiment 2 of Akbar: loss curves, gradient norms and the Hessian of a tiny regression network with and without BN."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from normscope.core.errors import InputError
from normscope.curvature.spectrum import Curvature, hessian
from normscope.geometry.flow import gradient_descent
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings, less, side_by_side
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
    """normalizers: none, and those that are compared with it."""

    data: str = "waves"
    seeds: tuple[int, ...] = (0, 1, 2)
    normalizers: tuple[str, ...] = ("none", "batch")
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
    if "none" not in settings.normalizers or len(settings.normalizers) < 2:
        raise InputError("normalizers must hold none and at least one other, such as none,batch: they are compared")
    pairs = [(kind, rate) for kind in settings.normalizers for rate in settings.learning_rates]
    recipe = (settings.data, settings.width, settings.depth, settings.steps)
    return {f"{kind} rate {rate:g}": Descent(kind, rate, *recipe) for kind, rate in pairs}


def regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs[:, 0], targets.to(outputs))


def measure(trial: Descent, workspace: Workspace) -> Numbers:
    data = workspace.data(trial.data).train
    options = {"width": trial.width, "depth": trial.depth, "inputs": data[0][0].numel(), "classes": 1}
    model = mlp(**options, normalizer=trial.normalizer, generator=workspace.generator("weights")).train()
    path = gradient_descent(
        model, regression, data, lr=trial.learning_rate, steps=trial.steps, symmetries=symmetries(model, data[0])
    )
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
    """λ_max, and κ without zero modes, from all eigenvalues; κ is near 1/part where eigenvalues lie all the way down to the part.

    spread: λ_max over the median of those above the smaller part, which no cut decides.
    """
    eigenvalues = torch.linalg.eigvalsh(curvature.dense())
    sizes = eigenvalues.abs()
    kept = {f"{part:g}": sizes[sizes > part * sizes.max()] for part in ZEROS}
    return {
        "largest": float(eigenvalues[-1]),
        **{f"condition {part}": float(values.max() / values.min()) for part, values in kept.items()},
        "spread": float(sizes.max() / kept[f"{ZEROS[0]:g}"].median()),
        "eigenvalues": eigenvalues.tolist(),
    }


def _first_below(values: Tensor, level: float) -> float:
    reached = (values <= level).nonzero()
    return float(reached[0]) if len(reached) else math.inf


def judge(results: Results) -> Iterator[Comparison]:
    for (rate,), group in results.groups("learning_rate").items():
        plain = group.where(normalizer="none")
        for (kind,), normalized in group.groups("normalizer").items():
            if kind != "none":
                yield from _compared(f"rate {rate:g}" if kind == "batch" else f"{kind}, rate {rate:g}", kind, normalized, plain)


def _compared(rate: str, kind: str, normalized: Results, plain: Results) -> Iterator[Comparison]:
    """A normalizer beside none; of BN the paper has figures, of others it says that they improve conditioning and speed."""

    def medians(*path: str) -> tuple[float, float]:
        return _median(normalized.values(*path)), _median(plain.values(*path))

    def shown(found: tuple[float, float], form: str = ".3g") -> str:
        return side_by_side(*found, form) if kind == "batch" else f"{found[0]:{form}} {kind}, {found[1]:{form}} none"

    for quantity, (name, paper, factor) in STATED.items():
        found = medians("plain", quantity)
        said, agrees = (paper, found[1] >= factor / 2 * found[0]) if kind == "batch" else ("", None)
        yield Comparison(f"{rate}: {name}", said, shown(found), agrees)
        yield Comparison(f"{rate}: {name}, symmetries divided out", "", shown(medians("quotient", quantity)))
    found = medians("plain", "spread")
    said, agrees = ("", None) if kind == "batch" else ("smaller with it", less(*found))
    yield Comparison(f"{rate}: λ_max over the median |λ| above {ZEROS[0]:g} λ_max", said, shown(found), agrees)
    found = medians("iterations")
    said, agrees = ("under 100 BN, more without" if kind == "batch" else "fewer with it"), found[0] < found[1]
    agrees = agrees and (kind != "batch" or found[0] < 100)
    yield Comparison(f"{rate}: iterations to a tenth of the loss", said, shown(found, ".0f"), agrees)
    found = medians("spike")
    said, agrees = ("spikes only without BN", found[0] < found[1]) if kind == "batch" else ("", None)
    name = f"{rate}: largest gradient over the median, after step {SETTLED}"
    yield Comparison(name, said, shown(found, ".1f"), agrees)


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
