"""`ns.bounds.flatness`: what is left of accuracy and loss when the parameters are moved by noise of growing size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope.bounds.folding import LARGEST_BALANCED
from normscope.bounds.losses import check_classes, margins
from normscope.core.codec import named, number, numbers, plain
from normscope.core.data import Data
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, NormscopeError, boundary
from normscope.core.progress import Progress, shown
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result
from normscope.core.rounding import euclidean_norm
from normscope.curvature.estimators import Estimate, student_interval
from normscope.curvature.objective import BATCH_SIZE, Loss, Objective
from normscope.curvature.quotient import named_point, representative, symmetries_of
from normscope.geometry.quotient import horizontal

DEFAULT_SIGMAS = tuple(np.logspace(-3, 0, 13))

Direction = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Curve:
    """Accuracy and loss at θ + σ d for several σ (rows) and directions d (columns), the same directions for every σ.

    kind: "plain", "filter" or "quotient". accuracy, loss: at θ itself.
    """

    kind: str
    sigmas: np.ndarray
    accuracies: np.ndarray
    losses: np.ndarray
    accuracy: float
    loss: float

    def bands(self, values: np.ndarray, confidence: float = 0.95) -> list[Estimate]:
        """The mean over directions at every σ, with Student's interval."""
        with np.errstate(invalid="ignore"):  # a loss may be infinite
            return [student_interval(row, confidence) for row in values]

    def tolerance(self, lost: float = 0.1) -> float:
        """The least σ at which the mean accuracy is down to (1 − lost) times that without noise, by interpolation in log σ.

        0 where it is lost at the smallest σ already, infinite where it is not lost at the largest.
        """
        wanted = (1 - lost) * self.accuracy
        means = self.accuracies.mean(1)
        below = np.flatnonzero(means <= wanted)
        if not len(below):
            return math.inf
        after = int(below[0])
        if after == 0:
            return 0.0
        share = (means[after - 1] - wanted) / (means[after - 1] - means[after])
        low, high = np.log(self.sigmas[after - 1 : after + 1])
        return float(np.exp(low + share * (high - low)))


@dataclass(frozen=True, repr=False)
class Flatness(Result):
    """How accuracy and loss fall under noise of standard deviation σ on the parameters, one curve per kind of noise.

    statistics: what normalizers with running statistics use in this mode. symmetries: how many directions the quotient leaves out.
    notes: which curves are missing, and why.
    """

    schema = "normscope.flatness/1"

    curves: tuple[Curve, ...]
    mode: str
    statistics: str
    samples: int
    symmetries: int | None = None
    confidence: float = 0.95
    notes: tuple[str, ...] = ()

    def __getitem__(self, kind: str) -> Curve:
        found = [curve for curve in self.curves if curve.kind == kind]
        if not found:
            raise KeyError(f"no curve of kind {kind!r}: there are {', '.join(curve.kind for curve in self.curves)}")
        return found[0]

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """Accuracy and loss against σ, with confidence bands."""
        from normscope.report.bounds import flatness_curves

        return {quantity: partial(flatness_curves, self, quantity) for quantity in ("accuracy", "loss")}

    def to_dict(self) -> dict[str, Any]:
        """Means, bands and tolerances as plain JSON values; docs/generalization.md documents every field."""
        return {
            **named(self, "schema", "mode", "statistics", "samples"),
            "symmetry_directions": self.symmetries,
            **named(self, "confidence", "notes"),
            "curves": [
                {
                    **named(curve, "kind", "accuracy", "loss", "sigmas"),
                    "mean_accuracy": [_band(band) for band in curve.bands(curve.accuracies, self.confidence)],
                    "mean_loss": [_band(band) for band in curve.bands(curve.losses, self.confidence)],
                    "tolerance": plain(curve.tolerance()),
                    **named(curve, "accuracies", "losses"),
                }
                for curve in self.curves
            ],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Flatness:
        """The curves that `to_dict` described."""
        curves = [
            Curve(
                curve["kind"],
                numbers(curve["sigmas"]),
                numbers(curve["accuracies"]),
                numbers(curve["losses"]),
                number(curve["accuracy"]),
                number(curve["loss"]),
            )
            for curve in content["curves"]
        ]
        return cls(
            tuple(curves), content["mode"], content["statistics"], content["samples"], content["symmetry_directions"],
            content["confidence"], tuple(content["notes"]),
        )  # fmt: skip

    def render(self) -> RenderableType:
        head = f"flatness on {self.samples:,} samples, {self.mode} mode ({self.statistics}): mean accuracy in %\n"
        return Group(Text(head), self._table(), *map(Text, self._tolerances()))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("σ", justify="right", no_wrap=True)
        for curve in self.curves:
            table.add_column(curve.kind, justify="right", no_wrap=True)
            table.add_column("loss", justify="right", no_wrap=True)
        bands = [curve.bands(curve.accuracies, self.confidence) for curve in self.curves]
        for row, sigma in enumerate(self.curves[0].sigmas):
            cells = []
            for curve, band in zip(self.curves, bands, strict=True):
                cells.append(f"{100 * band[row].value:.2f} ± {50 * (band[row].high - band[row].low):.2f}")
                cells.append(f"{curve.losses[row].mean():.4g}")
            table.add_row(f"{sigma:.3g}", *cells)
        return table

    def _tolerances(self) -> Iterable[str]:
        for curve in self.curves:
            sigma = curve.tolerance()
            largest = f"above {curve.sigmas[-1]:.3g}"
            text = f"{sigma:.3g}" if 0 < sigma < math.inf else (largest if sigma else f"below {curve.sigmas[0]:.3g}")
            yield f"{curve.kind}: accuracy {100 * curve.accuracy:.2f} % without noise; a tenth of it is lost at σ = {text}"
        if self.symmetries is not None:
            yield f"quotient: at the canonical representative, {self.symmetries:,} directions of symmetries left out of the noise"
        yield from self.notes


@earlier(positional=2)
@boundary
def flatness(
    model: nn.Module,
    data: Data,
    *,
    loss: Loss = nn.functional.cross_entropy,
    mode: str = "eval",
    sigmas: Sequence[float] = DEFAULT_SIGMAS,
    kinds: Sequence[str] = ("plain", "filter", "quotient"),
    seeds: int = 5,
    confidence: float = 0.95,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Progress = None,
) -> Flatness:
    """Accuracy and loss of a classifier at θ + σ d, with d of unit variance per entry; the model itself is not changed.

    >>> data = torch.randn(64, 4), torch.randint(3, (64,))
    >>> found = flatness(nn.Linear(4, 3), data, kinds=("plain",), sigmas=(0.01, 0.1))
    >>> found["plain"].accuracies.shape
    (2, 5)

    data: (inputs, classes), a Dataset of such pairs, or an iterable of batches; the same on every pass.
    loss: of (outputs, targets), a mean over the batch.
    mode: "eval" (running statistics as they are) or "train" (those of every batch).
    sigmas: standard deviations of the noise, in increasing order.
    kinds: "plain", d standard normal on all parameters; "filter", d normal with the root mean square of its filter (a row of a
    weight), other parameters held (after Li et al. 2018); "quotient", d standard normal without what the model's symmetries
    move, θ the canonical representative, so that the answer is that of the function.
    seeds: how many directions; the confidence bands are over them.
    confidence: of the bands.
    batch_size: where the data come as tensors or as a Dataset.
    seed: of the first direction, and of dropout on every pass.
    progress: True for a bar on stderr, or a callable (what, done, total).
    """
    chosen = np.asarray(sigmas, dtype=np.float64)
    if chosen.ndim != 1 or not len(chosen) or not (chosen > 0).all() or not (np.diff(chosen) > 0).all():
        raise InputError("sigmas must be positive and increasing, and there must be at least one")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        raise InputError(f"a kind of noise must be one of {', '.join(_KINDS)}, got {unknown[0] if unknown else 'none'!r}")
    if seeds < 2:
        raise InputError(f"a confidence band needs at least 2 seeds, got {seeds}")
    tally = _Tally(loss)
    objective = Objective(model, tally, data, mode, batch_size=batch_size, seed=seed)
    with shown("flatness", progress, len(kinds) * (1 + len(chosen) * seeds)) as bar:

        def evaluated(point: torch.Tensor) -> tuple[float, float]:
            bar.advance()
            return tally.evaluated(objective, point)

        curves, notes, moved = [], [], None
        for kind in kinds:
            try:
                if kind == "quotient" and len(kinds) > 1 and objective.size > LARGEST_BALANCED:
                    raise InputError(f"above {LARGEST_BALANCED:,} parameters it takes long: ask for kinds=('quotient',) alone")
                point, direction, left_out = _KINDS[kind](objective)
            except NormscopeError as error:
                if len(kinds) == 1:
                    raise
                notes.append(f"{kind}: no curve, because {error}")
                continue
            moved = moved if left_out is None else left_out
            drawn = [direction(torch.Generator().manual_seed(seed + number)) for number in range(seeds)]
            start = evaluated(point)
            grid = np.array([[evaluated(point + sigma * step) for step in drawn] for sigma in chosen])
            curves.append(Curve(kind, chosen, grid[..., 0], grid[..., 1], *start))
    return Flatness(tuple(curves), mode, _statistics(objective), sum(objective.sizes), moved, confidence, tuple(notes))


class _Tally:
    """A loss that also counts right answers."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.right = loss, 0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        check_classes(outputs, target)
        self.right += int((margins(outputs, target) > 0).sum())  # NaN is no right answer
        return self.loss(outputs, target)

    def evaluated(self, objective: Objective, point: torch.Tensor) -> tuple[float, float]:
        """Accuracy and loss at a point."""
        self.right = 0
        value = objective.value(point)
        return self.right / sum(objective.sizes), value


Noise = tuple[torch.Tensor, Direction, "int | None"]  # where it starts, how it is drawn, how many directions it leaves out


def plain_noise(objective: Objective) -> Noise:
    """Standard normal on every parameter, at the parameters as they are."""
    return objective.point, lambda generator: _normal(objective, generator), None


def filter_noise(objective: Objective) -> Noise:
    """Normal, with the root mean square of the filter that an entry belongs to; parameters of one axis or none are held."""
    scales = {
        name: _root_mean_square(value).reshape(-1, *[1] * (value.dim() - 1)).expand(value.shape)
        if value.dim() > 1
        else torch.zeros_like(value)
        for name, value in named_point(objective).items()
    }
    scale = objective.layout.flatten(scales).to(objective.point)
    return objective.point, lambda generator: scale * _normal(objective, generator), None


def _root_mean_square(filters: torch.Tensor) -> torch.Tensor:
    return euclidean_norm(filters.flatten(1), 1).to(filters) / math.sqrt(max(filters[:1].numel(), 1))


def quotient_noise(objective: Objective) -> Noise:
    """Standard normal on the directions that change the function, at the canonical representative of the parameters' orbit."""
    symmetries = symmetries_of(objective)
    canonical = representative(objective, symmetries)
    point = named_point(canonical)

    def direction(generator: torch.Generator) -> torch.Tensor:
        drawn = objective.layout.unflatten(_normal(objective, generator).double())
        return objective.layout.flatten(horizontal(symmetries, point, drawn)).to(objective.point)

    return canonical.point, direction, sum(group.count for group in symmetries.groups)


_KINDS: dict[str, Callable[[Objective], Noise]] = {"plain": plain_noise, "filter": filter_noise, "quotient": quotient_noise}


def _normal(objective: Objective, generator: torch.Generator) -> torch.Tensor:
    """A standard normal vector of the size of the parameters; drawn in float64, so that it is the same in every precision."""
    return torch.randn(objective.size, generator=generator, dtype=torch.float64).to(objective.point)


def _statistics(objective: Objective) -> str:
    running = any(getattr(part, "running_mean", None) is not None for part in objective.model.modules())
    if not running:
        return "no running statistics"
    return "batch statistics" if objective.mode == "train" else "running statistics, held"


def _band(estimate: Estimate) -> list[float | str]:
    return [plain(value) for value in (estimate.value, estimate.low, estimate.high)]
