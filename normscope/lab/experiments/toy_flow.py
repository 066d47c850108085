"""Experiment 1 of Akbar: a linear classifier in the plane goes downhill from many starts, with and without BN.

Gradient flow conserves ‖w‖ where BN has no ε. With torch's ε = 1e-5 a small w creeps outward, as the loss gains a little by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from normscope.core.errors import InputError
from normscope.geometry.flow import Path, gradient_descent, gradient_flow
from normscope.lab.datasets import Labelled
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, Settings
from normscope.lab.models.normalizers import EPSILON
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

KEPT = 0.01  # the part by which the norm may change and still be called constant
ALIGNED = 10.0  # degrees
WAYS = {"flow": "gradient flow", "descent": "gradient descent"}


@dataclass(frozen=True)
class FlowSettings(Settings):
    """radii, degrees: of the starts, angles from the direction that separates the classes. epsilon: of BN."""

    data: str = "halfplanes"
    radii: tuple[float, ...] = (0.3, 1.0, 3.0)
    degrees: tuple[float, ...] = (90.0, 150.0, -120.0)
    learning_rate: float = 0.1
    steps: int = 1000
    epsilon: float = EPSILON


@dataclass(frozen=True)
class Start:
    normalizer: str
    radius: float
    degrees: float
    data: str
    learning_rate: float
    steps: int
    epsilon: float


def trials(settings: FlowSettings, seed: int) -> dict[str, Start]:
    starts = [(kind, radius, angle) for kind in ("none", "batch") for radius in settings.radii for angle in settings.degrees]
    recipe = (settings.data, settings.learning_rate, settings.steps, settings.epsilon)
    return {f"{kind} {radius:g} at {angle:g}": Start(kind, radius, angle, *recipe) for kind, radius, angle in starts}


def classifier(normalizer: str, weight: Tensor, epsilon: float = EPSILON) -> nn.Sequential:
    """x ↦ w·x, or BN(w·x) without γ and β."""
    linear = nn.utils.skip_init(nn.Linear, len(weight), 1, bias=False)
    linear.weight = nn.Parameter(weight[None])
    return nn.Sequential(linear, nn.BatchNorm1d(1, epsilon, affine=False) if normalizer == "batch" else nn.Identity())


def logistic(outputs: Tensor, classes: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(outputs[:, 0], classes.to(outputs))


def in_the_plane(name: str, workspace: Workspace) -> Labelled:
    """The training part of a data set of two classes in the plane."""
    split = workspace.data(name)
    if split.sample_shape != (2,) or split.classes != 2:
        raise InputError(f"{name} is not two classes in the plane: choose other data, such as halfplanes or rings")
    return split.train


def separator(data: Labelled) -> Tensor:
    """The unit vector along which least squares tell the classes apart (Fisher's discriminant)."""
    inputs, classes = (part.double() for part in data)
    solution = torch.linalg.lstsq(inputs - inputs.mean(0), classes - classes.mean()).solution
    return nn.functional.normalize(solution, dim=0).float()


def turned(direction: Tensor, degrees: float) -> Tensor:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cosine, -sine], [sine, cosine]]) @ direction


def measure(trial: Start, workspace: Workspace) -> Numbers:
    data = in_the_plane(trial.data, workspace)
    direction = separator(data)
    model = classifier(trial.normalizer, trial.radius * turned(direction, trial.degrees), trial.epsilon).train()
    report = symmetries(model, data[0])
    duration = trial.learning_rate * trial.steps
    paths = {
        "flow": gradient_flow(model, logistic, data, duration=duration, symmetries=report, points=101, tolerance=1e-9),
        "descent": gradient_descent(model, logistic, data, lr=trial.learning_rate, steps=trial.steps, symmetries=report),
    }
    return {way: described(path, direction) for way, path in paths.items()}


def described(path: Path, direction: Tensor) -> Numbers:
    """The way of w through the plane: its points, norms over that at the start, and angles to a direction in degrees."""
    points = torch.stack([state["0.weight"][0] for state in path.states])
    sine = direction[0] * points[:, 1] - direction[1] * points[:, 0]
    degrees = torch.atan2(sine, points @ direction.to(points)).rad2deg()
    turns = degrees.diff()
    norms = points.norm(dim=1) / points[0].norm()
    return {
        "x": points[:, 0].tolist(),
        "y": points[:, 1].tolist(),
        "time": (path.times / path.times[-1]).tolist(),
        "norms": norms.tolist(),
        "end_norm": float(norms[-1]),
        "least_norm": float(norms.min()),
        "norm_change": float((norms - 1).abs().max()),
        "end_degrees": float(degrees[-1]),
        "turned_back": float(turns.abs().sum() - turns.sum().abs()) / 2,
    }


def judge(results: Results) -> Iterator[Comparison]:
    normalized, plain = (results.where(normalizer=kind) for kind in ("batch", "none"))
    for way, name in WAYS.items():
        change = max(normalized.values(way, "norm_change"))
        yield Comparison(f"BN, {name}: largest change of ‖w‖", "below 1 %", f"{change:.2%}", change < KEPT)
        back = max(normalized.values(way, "turned_back"))
        yield Comparison(f"BN, {name}: turned back on the way, at most", "never", f"{back:.2g}°", back < 1)
        left = max(abs(angle) for angle in normalized.values(way, "end_degrees"))
        yield Comparison(f"BN, {name}: angle left at the end, at most", "aligned", f"{left:.1f}°", left < ALIGNED)
    radii = sorted({trial.parameters["radius"] for trial in plain})
    small, large = (plain.where(radius=radius) for radius in (radii[0], radii[-1]))
    ends, leasts = small.values("descent", "end_norm"), large.values("descent", "least_norm")
    yield Comparison(f"no BN, start {radii[0]:g}: ‖w‖ at the end over the start", "grows", _range(ends), min(ends) > 1)
    name = f"no BN, start {radii[-1]:g}: least ‖w‖ on the way over the start"
    yield Comparison(name, "shrinks first", _range(leasts), max(leasts) < 1)


def _range(values: list[float]) -> str:
    return f"× {min(values):.2f} to × {max(values):.2f}"


def plots(results: Results) -> dict[str, Plot]:
    drawn = {}
    for (normalizer,), group in results.groups("normalizer").items():
        name = {"batch": "with BN", "none": "without BN"}[normalizer]
        series = {trial.label.partition(" ")[2]: (trial.numbers["descent"]["x"], trial.numbers["descent"]["y"]) for trial in group}
        drawn[f"trajectories-{normalizer}"] = Plot(f"Gradient descent {name}", "w₁", "w₂", series, equal=True)
    for way, name in WAYS.items():
        series = {
            f"{normalizer}, start {radius:g}": (group[0].numbers[way]["time"], group[0].numbers[way]["norms"])
            for (normalizer, radius), group in results.groups("normalizer", "radius").items()
        }
        title = f"Norm of w from one angle, {name}"
        drawn[f"norms-{way}"] = Plot(title, "part of the time", "‖w‖ over that at the start", series, log_y=True)
    return drawn


EXPERIMENT = Experiment(
    name="toy-flow",
    source="Akbar, Section 5.2, Experiment 1 and Figure 8.1 left",
    statement="With BN the weight turns on a circle, its norm changes by less than 1 %; without, the norm grows or shrinks first.",
    quick=FlowSettings(),
    full=FlowSettings(radii=(0.1, 0.3, 1.0, 3.0, 10.0), degrees=(30.0, 90.0, 150.0, -60.0, -120.0), steps=10_000),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
