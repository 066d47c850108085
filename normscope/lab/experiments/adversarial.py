"""Adversarial robustness without → with BN: attacks, random noise, and radii that are proved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normscope.certify.robustness import certify_radius, local_brackets
from normscope.core.errors import InputError
from normscope.lab.datasets import Labelled
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, less
from normscope.lab.training import Training, TrainingSettings, ends, evaluated, train, with_and_without
from normscope.lab.workspace import Workspace

RADII = (0.02, 0.05, 0.1, 0.2, 0.4)  # in ℓ2; inputs have norm at most 1
SHOWN = 0.1  # the radius of the verdict
STEPS = 20  # of the attack
BALL = 0.05  # radius of the balls on which constants are bracketed
NOTICEABLE = 0.02  # of accuracy


@dataclass(frozen=True)
class Attacked(Training):
    """attacked: how many test samples. certified: for how many of them radii are proved."""

    attacked: int = 360
    certified: int = 12


@dataclass(frozen=True)
class AttackSettings(TrainingSettings):
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"mlp": {"width": 64, "depth": 4}})
    epochs: int = 30
    seeds: tuple[int, ...] = (0, 1)
    attacked: int = 360
    certified: int = 12


def trials(settings: AttackSettings, seed: int) -> dict[str, Attacked]:
    if min(settings.attacked, settings.certified) < 1:
        raise InputError("attacked and certified must be at least 1")
    return {
        label: Attacked(**vars(training), attacked=settings.attacked, certified=settings.certified)
        for label, training in with_and_without(settings, seed).items()
    }


def measure(trial: Attacked, workspace: Workspace) -> Numbers:
    trained = train(trial, workspace)
    model, (inputs, classes) = trained.model, trained.split.test
    data = inputs[: trial.attacked], classes[: trial.attacked]
    attacked = {f"{radius:g}": _accuracy(model, (attack(model, data, radius), data[1])) for radius in RADII}
    noise = workspace.generator("noise")
    noisy = {f"{radius:g}": _accuracy(model, (data[0] + _on_sphere(data[0], radius, noise), data[1])) for radius in RADII}
    chosen = inputs[: trial.certified], classes[: trial.certified]
    brackets = local_brackets(model, inputs[:2], chosen[0], radius=BALL).brackets
    return {
        **ends(trained),
        "attacked": attacked,
        "noisy": noisy,
        "margin": _margin(model, data),
        "certified_radius": statistics.fmean(certify_radius(model, inputs[:2], chosen).radius),
        "lower_log10": statistics.fmean(bracket.lower.log10 for bracket in brackets),
        "upper_log10": statistics.fmean(bracket.proved.log10 for bracket in brackets),
    }


def attack(model: nn.Module, data: Labelled, radius: float) -> Tensor:
    """Projected gradient ascent of the loss in the ℓ2 ball around every sample, in steps of 2.5 · radius/STEPS."""
    inputs, classes = data
    moved = torch.zeros_like(inputs)
    for _ in range(STEPS):
        moved.requires_grad_(True)
        (gradient,) = torch.autograd.grad(cross_entropy(model(inputs + moved), classes, reduction="sum"), moved)
        moved = _in_ball(moved.detach() + 2.5 * radius / STEPS * _unit(gradient), radius)
    return inputs + moved


def judge(results: Results) -> list[Comparison]:
    plain, normalized = (results.where(normalizer=name) for name in ("none", "batch"))
    radius = f"{SHOWN:g}"

    def pair(*path: str) -> tuple[float, float]:
        return plain.mean(*path), normalized.mean(*path)

    attacked, noisy, margins, radii = (
        pair(*path) for path in (("attacked", radius), ("noisy", radius), ("margin",), ("certified_radius",))
    )
    weaker, stronger = less(attacked[1], attacked[0], by=NOTICEABLE), less(attacked[0], attacked[1], by=NOTICEABLE)
    steadier = less(noisy[0], noisy[1], by=NOTICEABLE)
    constants = [f"10^{low:.2f} to 10^{high:.2f}" for low, high in zip(pair("lower_log10"), pair("upper_log10"), strict=True)]
    return [
        Comparison(f"accuracy under attack of radius {radius}", "some: BN slightly reduces it", _shown(attacked), weaker),
        Comparison(f"accuracy under attack of radius {radius}", "others: BN increases it", _shown(attacked), stronger),
        Comparison("mean margin", "BN increases it", _shown(margins), less(*margins)),
        Comparison(f"accuracy under random noise of norm {radius}", "BN helps", _shown(noisy), steadier),
        Comparison("mean certified radius", "", _shown(radii)),
        Comparison(f"constant on balls of radius {BALL:g}", "", " → ".join(constants)),
        Comparison("test accuracy", "", _shown(pair("test_accuracy"))),
    ]


def plots(results: Results) -> dict[str, Plot]:
    series = {}
    for (normalizer,), group in results.groups("normalizer").items():
        for kind, name in {"attacked": "attack", "noisy": "noise"}.items():
            accuracies = [group.mean("test_accuracy"), *(group.mean(kind, f"{radius:g}") for radius in RADII)]
            series[f"{normalizer}, {name}"] = ([0.0, *RADII], accuracies)
    title, x = "Accuracy under attack and under noise", "ℓ2 radius (inputs have norm ≤ 1)"
    return {"accuracy": Plot(title, x, "accuracy", series, "lines+points")}


def _shown(values: tuple[float, float]) -> str:
    """Without → with BN."""
    return " → ".join(f"{value:.3f}" for value in values)


def _accuracy(model: nn.Module, data: Labelled) -> float:
    return float(evaluated(model, data, "all")["all_accuracy"])


def _margin(model: nn.Module, data: Labelled) -> float:
    """The mean of the right class's logit less the largest other."""
    with torch.no_grad():
        outputs = model(data[0])
    right = outputs.gather(1, data[1][:, None])[:, 0]
    others = outputs.scatter(1, data[1][:, None], -torch.inf).amax(1)
    return float((right - others).mean())


def _unit(x: Tensor) -> Tensor:
    norms = x.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
    return x / norms.reshape(-1, *[1] * (x.dim() - 1))


def _in_ball(x: Tensor, radius: float) -> Tensor:
    norms = x.flatten(1).norm(dim=1).clamp(min=radius)
    return x * (radius / norms).reshape(-1, *[1] * (x.dim() - 1))


def _on_sphere(x: Tensor, radius: float, noise: torch.Generator) -> Tensor:
    return radius * _unit(torch.randn(x.shape, generator=noise))


EXPERIMENT = Experiment(
    name="adversarial",
    source="Akbar, Section 9.5",
    statement="Some say BN slightly reduces robustness; others say it increases margins, which should increase robustness.",
    quick=AttackSettings(),
    full=AttackSettings(
        networks={"mlp": {"width": 256, "depth": 6}}, epochs=100, seeds=(0, 1, 2, 3, 4), attacked=1000, certified=50
    ),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
