"""Figure 5.1 of Akbar: the loss of a linear classifier over the plane of its weights, a valley along every ray with BN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from normscope.curvature.objective import Objective
from normscope.curvature.slices import slice_of
from normscope.curvature.spectrum import hessian
from normscope.geometry.flow import Path, gradient_descent
from normscope.lab.datasets import Labelled
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings
from normscope.lab.experiments.toy_flow import ALIGNED, classifier, in_the_plane, logistic, separator, turned
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

FLAT = 0.01  # the part of the surface's range within which a ray is flat


@dataclass(frozen=True)
class ValleySettings(Settings):
    """extent: of the plane from its centre. points: along an axis. degrees: of the starts of descents, from the separator."""

    data: str = "halfplanes"
    extent: float = 3.0
    points: int = 41
    degrees: tuple[float, ...] = (90.0, 150.0, -120.0)
    learning_rate: float = 0.1
    steps: int = 1000


@dataclass(frozen=True)
class Valley:
    normalizer: str
    data: str
    extent: float
    points: int
    degrees: tuple[float, ...]
    learning_rate: float
    steps: int


def trials(settings: ValleySettings, seed: int) -> dict[str, Valley]:
    recipe = (settings.data, settings.extent, settings.points, settings.degrees, settings.learning_rate, settings.steps)
    return {kind: Valley(kind, *recipe) for kind in ("none", "batch")}


def measure(trial: Valley, workspace: Workspace) -> Numbers:
    data = in_the_plane(trial.data, workspace)
    centre = classifier(trial.normalizer, torch.zeros(2)).double()
    axes = [{"0.weight": axis[None]} for axis in torch.eye(2, dtype=torch.float64)]
    plane = slice_of(Objective(centre, logistic, data), *axes, radius=trial.extent, points=trial.points)
    rays = [_ray(trial, data, degrees) for degrees in range(0, 360, 15)]
    direction = separator(data)
    starts = [classifier(trial.normalizer, 0.7 * trial.extent * turned(direction, degrees)) for degrees in trial.degrees]
    paths = [
        gradient_descent(start, logistic, data, lr=trial.learning_rate, steps=trial.steps, symmetries=symmetries(start, data[0]))
        for start in starts
    ]
    along, across = _curvatures(paths[0], trial.normalizer, data)
    return {
        "ray_spread": max(float(np.ptp(losses)) for losses in rays) / float(np.ptp(plane.losses)),
        "curvature_along": along,
        "curvature_across": across,
        "steps": [_steps_to_aligned(path, direction) for path in paths],
        "offsets": plane.offsets.tolist(),
        "losses": plane.losses.tolist(),
        "paths": [[state["0.weight"][0].tolist() for state in path.states] for path in paths],
    }


def _ray(trial: Valley, data: Labelled, degrees: float) -> np.ndarray:
    """The loss at w = c·u for c from a sixth of the extent to all of it."""
    direction = turned(torch.tensor([1.0, 0.0]), degrees)
    middle = classifier(trial.normalizer, 7 / 12 * trial.extent * direction).double()
    along = {"0.weight": direction.double()[None]}
    return slice_of(Objective(middle, logistic, data), along, radius=5 / 12 * trial.extent, points=11).losses


def _curvatures(path: Path, normalizer: str, data: Labelled) -> tuple[float, float]:
    """Second derivatives of the loss along and across w, at the end of a descent."""
    weight = path.parameters["0.weight"][0]
    matrix = hessian(classifier(normalizer, weight), logistic, data, dtype=torch.float64).dense()
    unit = weight / weight.norm()
    normal = torch.stack([-unit[1], unit[0]])
    return float(unit @ matrix @ unit), float(normal @ matrix @ normal)


def _steps_to_aligned(path: Path, direction: Tensor) -> float:
    """Steps until w is within ALIGNED degrees of a direction; infinite where it never is."""
    points = torch.stack([state["0.weight"][0] for state in path.states])
    cosines = nn.functional.normalize(points) @ direction.to(points)
    reached = (cosines >= math.cos(math.radians(ALIGNED))).nonzero()
    return float(reached[0]) if len(reached) else math.inf


def judge(results: Results) -> list[Comparison]:
    normalized, plain = (results.where(normalizer=kind)[0].numbers for kind in ("batch", "none"))
    flat, bent = (float(numbers["ray_spread"]) for numbers in (normalized, plain))
    steps = [[float(step) for step in numbers["steps"]] for numbers in (normalized, plain)]
    ratios = [float(numbers["curvature_along"]) / float(numbers["curvature_across"]) for numbers in (normalized, plain)]
    what = f"steps until w is within {ALIGNED:g}° of the separator, from each start"
    return [
        Comparison("BN: change of the loss along rays, of the surface's range", "none, a flat valley", f"{flat:.2%}", flat < FLAT),
        Comparison("no BN: change of the loss along rays, of the surface's range", "no valley", f"{bent:.1%}", bent > FLAT),
        Comparison("BN: curvature along w over that across, at the end", "0", f"{ratios[0]:.1e}", abs(ratios[0]) < FLAT),
        Comparison("no BN: curvature along w over that across, at the end", "", f"{ratios[1]:.2g}"),
        Comparison(what, "sooner with BN", f"{_list(steps[0])} with, {_list(steps[1])} without", sum(steps[0]) < sum(steps[1])),
    ]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for trial in results:
        numbers, normalizer = trial.numbers, trial.parameters["normalizer"]
        series = {}
        for degrees, path in zip(trial.parameters["degrees"], numbers["paths"], strict=True):
            series[f"from {degrees:g}°"] = ([point[0] for point in path], [point[1] for point in path])
        heights = np.array(numbers["losses"]).T.tolist()
        title = f"Loss {'with' if normalizer == 'batch' else 'without'} BN, and gradient descent on it"
        surface = (numbers["offsets"], numbers["offsets"], heights)
        drawn[f"surface-{normalizer}"] = Plot(title, "w₁", "w₂", series, surface=surface, equal=True)
    return drawn


EXPERIMENT = Experiment(
    name="invariant-valleys",
    source="Akbar, Section 1.4, Figure 5.1",
    statement="With BN the contours of the loss are stretched along a flat valley, and descent reaches its minimum more directly.",
    quick=ValleySettings(),
    full=ValleySettings(points=121, degrees=(30.0, 90.0, 150.0, -60.0, -120.0), steps=10_000),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
