"""`ns.margins`: by how much a classifier prefers the right class, signed, and in units of how fast its outputs can change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import upper
from normscope.core.data import Call, Data
from normscope.core.errors import ExportError, InputError, Refusal
from normscope.core.magnitude import Magnitude
from normscope.core.progress import Progress, Wanted, shown
from normscope.core.region import Ball
from normscope.core.rendering import Rendered
from normscope.curvature.batches import Batch, Batches
from normscope.graph.graph import Graph
from normscope.graph.trace import in_mode
from normscope.guarantees import losses
from normscope.guarantees.bound import plain
from normscope.guarantees.losses import check_classes
from normscope.rules.registry import Gain

SCHEMA = "normscope.margins/1"
PERCENTILES = (0, 1, 10, 50, 90, 100)
BATCH_SIZE = 256
MOST_CLASSES_SHOWN = 20


@dataclass(frozen=True)
class Margins(Rendered):
    """values[i] = h_y(x_i) − max_{j≠y} h_j(x_i), y the label of sample i: negative where the answer is wrong.

    constant: a certified Lipschitz constant L of h on all inputs, ℓ2 to ℓ2, None where there is none (`reason` says why).
    local_constants: certified constants on the balls of `radius` around the first samples, where they were asked for.
    """

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

    def figure(self, normalized: bool = False) -> Any:
        """The distribution of the margins, with zero marked."""
        from normscope.report.guarantees import margin_histogram

        return margin_histogram(self, normalized)

    def to_dict(self) -> dict[str, Any]:
        """Percentiles in all and by class as plain JSON values; docs/generalization.md documents every field."""
        return {
            "schema": SCHEMA,
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
        }

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


def margins(
    model: nn.Module,
    data: Data,
    *,
    constant: bool = True,
    radius: float | None = None,
    local_samples: int = 64,
    batch_size: int = BATCH_SIZE,
    progress: Wanted = None,
) -> Margins:
    """The signed margins of a classifier on labelled data, in eval mode, batch by batch.

    >>> found = margins(nn.Identity(), (torch.tensor([[2.0, 0.0], [1.0, 4.0]]), torch.tensor([0, 0])))
    >>> found.values.tolist(), found.accuracy
    ([2.0, -3.0], 0.5)

    data: (inputs, classes), a Dataset of such pairs, or an iterable of batches; one pass, of which one number a sample is kept.
    constant: also certify a Lipschitz constant, which normalizes margins. radius: certify one on the ball of this radius around
    each of the first `local_samples` samples, too.
    """
    batches = Batches(data, model.forward, batch_size, None, *_placement(model))
    values: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    first: list[Batch] = []
    with shown("margins", progress) as bar, in_mode(model, "eval"), torch.no_grad():
        for batch in batches:
            outputs = model(*batch.call.args, **batch.call.kwargs)
            values.append(signed_margins(outputs, batch.target).cpu().numpy())
            labels.append(batch.target.cpu().numpy())
            if not first or (radius is not None and sum(kept.size for kept in first) < local_samples):
                first.append(batch)
            bar.advance()
    found: Magnitude | None = None
    reason, local = "", tuple[Magnitude, ...]()
    if constant or radius is not None:
        try:
            graph = certifiable_graph(model, _example(first[0]), "eval", None)
            above = upper(graph)
            found, reason = above.bound, above.certificate.reason
            if radius is not None:
                with shown("local constants", progress, local_samples) as bar:
                    local = tuple(_local_constants(graph, first, radius, local_samples, bar))
        except (Refusal, InputError, ExportError) as error:
            if radius is not None:
                raise
            reason = str(error)
    return Margins(np.concatenate(values), np.concatenate(labels), found, reason, local, radius)


def signed_margins(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """z_y − max_{j≠y} z_j of every sample, in float64: (samples, classes) and (samples,) → (samples,)."""
    check_classes(outputs, labels)
    found = losses.margins(outputs.detach().double(), labels)
    if bool(found.isnan().any()):
        raise InputError("the outputs hold NaN or infinite values, so that margins do not exist: look for them in data and weights")
    return found


def _local_constants(graph: Graph, batches: Sequence[Batch], radius: float, most: int, bar: Progress) -> Iterator[Magnitude]:
    known: dict[object, Gain] = {}
    left = most
    for batch in batches:
        for index in range(min(left, batch.size)):
            center = tuple(part[index].to(torch.float64) for part in batch.call.floats())
            yield upper(graph, region=Ball(center, radius), known=known).bound
            bar.advance()
        left -= batch.size


def _example(batch: Batch) -> Any:
    call: Call = batch.call.samples(slice(0, 1))
    return call.kwargs or call.args


def _placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model computes, and in which floating-point type."""
    tensors = [*model.parameters(), *model.buffers()]
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    return floating.device, floating.dtype


def _normalized(values: np.ndarray, constants: Sequence[Magnitude]) -> np.ndarray:
    """values / (√2 constants) through logarithms, so that no constant overflows."""
    logs = np.array([constant.log for constant in constants]) + 0.5 * math.log(2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sizes = np.exp(np.log(np.abs(values)) - logs)
    return np.where(values == 0, 0.0, np.copysign(sizes, values))


def _percentiles(values: np.ndarray) -> dict[str, float | str]:
    return {str(percent): plain(float(np.percentile(values, percent))) for percent in PERCENTILES}
