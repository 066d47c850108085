"""`ns.bounds.margins`: by how much a classifier prefers the right class, signed, and in units of how fast outputs can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope.bounds.losses import zero_one
from normscope.bounds.setting import BATCH_SIZE, Setting
from normscope.bounds.table import NotApplicable
from normscope.core.codec import logarithm, number, numbers, plain
from normscope.core.data import Data
from normscope.core.errors import InputError, Refusal, boundary
from normscope.core.magnitude import Magnitude
from normscope.core.progress import Progress, shown
from normscope.core.region import Ball
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result

PERCENTILES = (0, 1, 10, 50, 90, 100)
MOST_CLASSES_SHOWN = 20


@dataclass(frozen=True, repr=False)
class Margins(Result):
    """values[i] = h_y(x_i) − max_{j≠y} h_j(x_i), y the label of sample i: negative where the answer is wrong.

    constant: a certified Lipschitz constant L of h on all inputs, ℓ2 to ℓ2, None where there is none (`reason` says why).
    local_constants: certified constants on the balls of `radius` around the first samples, where they were asked for.
    """

    schema = "normscope.margins/1"

    values: np.ndarray
    labels: np.ndarray
    constant: Magnitude | None = None
    reason: str = ""
    local_constants: tuple[Magnitude, ...] = ()
    radius: float | None = None
    mode: str = "eval"

    def __len__(self) -> int:
        return len(self.values)

    @property
    def accuracy(self) -> float:
        """The share of positive margins; a tie counts as wrong."""
        return float((self.values > 0).mean())

    @property
    def classes(self) -> tuple[int, ...]:
        return tuple(int(label) for label in np.unique(self.labels))

    def of_class(self, label: int) -> np.ndarray:
        """The margins of the samples of one class."""
        return self.values[self.labels == label]

    def percentile(self, percent: float | Sequence[float]) -> Any:
        """Of all margins; with 10, the value that 10 % of the samples stay below."""
        return np.percentile(self.values, percent)

    @property
    def normalized(self) -> np.ndarray:
        """values / (√2 L): no input closer than this changes a right answer, since h_y − h_j is √2 L-Lipschitz."""
        if self.constant is None:
            raise InputError(f"no constant to normalize margins by: {self.reason}")
        return _normalized(self.values, [self.constant] * len(self))

    @property
    def locally_normalized(self) -> np.ndarray:
        """values / (√2 L_i) of the first samples, L_i their local constants; a certified radius as far as it is below `radius`."""
        if not self.local_constants:
            raise InputError("no local constants were computed: pass radius=, the size of the balls")
        return _normalized(self.values[: len(self.local_constants)], self.local_constants)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """The distribution of the margins, and of the margins over √2 L."""
        from normscope.report.bounds import margin_histogram

        drawn: dict[str, Callable[..., Any]] = {"margins": partial(margin_histogram, self)}
        return drawn if self.constant is None else {**drawn, "normalized": partial(margin_histogram, self, normalized=True)}

    def to_dict(self) -> dict[str, Any]:
        """Percentiles in all and by class as plain JSON values; docs/generalization.md documents every field."""
        return {
            "schema": self.schema,
            "mode": self.mode,
            "samples": len(self),
            "accuracy": self.accuracy,
            "mean": float(self.values.mean()),
            "percentiles": _percentiles(self.values),
            "classes": {str(label): _percentiles(self.of_class(label)) for label in self.classes},
            "constant_log10": None if self.constant is None else plain(self.constant.log10),
            "reason": self.reason,
            "normalized": None if self.constant is None else _percentiles(self.normalized),
            "radius": self.radius,
            "locally_normalized": _percentiles(self.locally_normalized) if self.local_constants else None,
            "local_constants_log10": [plain(constant.log10) for constant in self.local_constants],
            "values": plain(self.values),
            "labels": plain(self.labels),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Margins:
        """The margins that `to_dict` described."""
        constant, radius = content["constant_log10"], content["radius"]
        return cls(
            values=numbers(content["values"]),
            labels=np.array(content["labels"]),
            constant=None if constant is None else logarithm(constant),
            reason=content["reason"],
            local_constants=tuple(map(logarithm, content["local_constants_log10"])),
            radius=None if radius is None else number(radius),
            mode=content["mode"],
        )

    def render(self) -> RenderableType:
        head = Text(f"margins of {len(self):,} samples, {self.mode} mode: {100 * self.accuracy:.2f} % positive\n")
        return Group(head, self._table(), *map(Text, self._notes()))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("class", no_wrap=True)
        for name in ("samples", "right", "mean", "least", *(f"{percent} %" for percent in PERCENTILES[1:-1]), "largest"):
            table.add_column(name, justify="right", no_wrap=True)
        shown_classes = self.classes[:MOST_CLASSES_SHOWN]
        rows = [("all", self.values), *((str(label), self.of_class(label)) for label in shown_classes)]
        if self.constant is not None:
            rows.append(("over √2 L", self.normalized))
        if self.local_constants:
            rows.append((f"on balls of {self.radius:g}", self.locally_normalized))
        for name, values in rows:
            numbers = (values.mean(), *np.percentile(values, PERCENTILES))
            right = f"{100 * (values > 0).mean():.1f} %"
            table.add_row(name, f"{len(values):,}", right, *(f"{number:.3g}" for number in numbers))
        return table

    def _notes(self) -> Iterator[str]:
        hidden = len(self.classes) - MOST_CLASSES_SHOWN
        if hidden > 0:
            yield f"and {hidden} more classes"
        if self.constant is not None:
            yield f"L = {self.constant}: certified Lipschitz constant of the outputs (ℓ2) on all inputs"
        if self.local_constants:
            count = len(self.local_constants)
            yield f"on balls of {self.radius:g}: the first {count} margins over √2 L_i, L_i certified on the ball around each"
        if self.reason:
            yield f"no finite constant on all inputs: {self.reason}"


@boundary
def margins(
    model: nn.Module,
    data: Data,
    *,
    constant: bool = True,
    radius: float | None = None,
    local_samples: int = 64,
    batch_size: int = BATCH_SIZE,
    progress: Progress = None,
) -> Margins:
    """The signed margins of a classifier on labelled data, in eval mode, batch by batch.

    >>> found = margins(nn.Identity(), (torch.tensor([[2.0, 0.0], [1.0, 4.0]]), torch.tensor([0, 0])))
    >>> found.values.tolist(), found.accuracy
    ([2.0, -3.0], 0.5)

    data: (inputs, classes), a Dataset of such pairs, or an iterable of batches; one pass, of which one number per sample is kept.
    constant: also certify a Lipschitz constant, which normalizes margins.
    radius: also certify one on the ball of this radius around each of the first `local_samples` samples.
    local_samples: how many of them.
    batch_size: where the data come as tensors or as a Dataset.
    progress: True for a bar on stderr, or a callable (what, done, total).
    """
    setting = Setting(model, zero_one(), data, batch_size=batch_size, progress=progress)
    values = setting.train.margins.numpy()
    if np.isneginf(values).any():
        raise InputError("the outputs hold NaN or infinite values, so that margins do not exist: look for them in data and weights")
    bound, reason = _constant(setting) if constant or radius is not None else (None, "")
    local = () if radius is None else tuple(_local_constants(setting, radius, local_samples))
    return Margins(values, setting.train.labels.numpy(), bound, reason, local, radius)


def _constant(setting: Setting) -> tuple[Magnitude | None, str]:
    """The certified constant on all inputs and why it is infinite; none, and why, where none can be proved."""
    try:
        return setting.constant, setting.above.certificate.reason
    except (Refusal, NotApplicable) as error:
        return None, str(error)


def _local_constants(setting: Setting, radius: float, most: int) -> Iterator[Magnitude]:
    """Certified constants on the balls around the first samples."""
    done = 0
    with shown("local constants", setting.progress, most) as bar:
        for batch in setting.train.batches:
            for index in range(min(most - done, batch.size)):
                center = tuple(part[index].to(torch.float64) for part in batch.call.floats())
                yield setting.above_on(Ball(center, radius)).bound
                bar.advance()
            done += batch.size
            if done >= most:
                return


def _normalized(values: np.ndarray, constants: Sequence[Magnitude]) -> np.ndarray:
    """values / (√2 constants) through logarithms, so that no constant overflows."""
    logs = np.array([constant.log for constant in constants]) + 0.5 * math.log(2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sizes = np.exp(np.log(np.abs(values)) - logs)
    return np.where(values == 0, 0.0, np.copysign(sizes, values))


def _percentiles(values: np.ndarray) -> dict[str, float | str]:
    return {str(percent): plain(float(np.percentile(values, percent))) for percent in PERCENTILES}
