"""What the bounds of one call share: the model, the loss, the samples, and what was proved about them, each found once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from normscope.bounds.bound import CERTIFIED, GAP, Bound, Part
from normscope.bounds.cellwise import Cellwise, Locator
from normscope.bounds.folding import as_double, canonical_form, folded
from normscope.bounds.hypothesis import check_hypothesis
from normscope.bounds.losses import Loss, is_labels
from normscope.bounds.network import Network, network
from normscope.bounds.partition import Cells, Choice, expanded, partitions
from normscope.bounds.sample import Sample, flat, run
from normscope.bounds.saved_columns import SavedColumns
from normscope.bounds.table import NotApplicable
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.upper import Upper, upper
from normscope.core.data import Call, Data
from normscope.core.errors import ExportError, InputError, Refusal
from normscope.core.magnitude import Magnitude, Real
from normscope.core.progress import Progress
from normscope.core.region import Region
from normscope.curvature.batches import Batch, Batches
from normscope.curvature.objective import snapshot
from normscope.graph.graph import Graph
from normscope.graph.restoring import untouched
from normscope.graph.samples import check_samples_independent
from normscope.ledger import LayerRow, ledger
from normscope.rules.readings import Normalizer
from normscope.rules.registry import registry

BATCH_SIZE = 64  # a backward pass keeps what every layer read, for so many samples
LEAST_DELTA = 1e-300  # shares of it are no less than float64's numbers
MOST_POINTS = 20_000  # held-out points that partitions are made from


class Setting:
    """A model h, a loss f with 0 ≤ f ≤ C, a sample D of size m, and a confidence 1 − δ.

    model: a copy in eval mode, parameters without gradients; the user's own is never touched. train, held_out: `Sample`s, read
    batch by batch. constant: the certified Lipschitz constant of x ↦ h(x) on all inputs; `above_on` is the bound on a region.
    cellwise: whether the pass over the training sample looks at cells and slopes too. initial: the model before training.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        train: Data,
        held_out: Data | None = None,
        delta: float = 0.05,
        domain: Region | None = None,
        partition: Choice = None,
        cellwise: bool = False,
        batch_size: int = BATCH_SIZE,
        generator: torch.Generator | None = None,
        progress: Progress = None,
        checkpoint: str | Path | None = None,
        initial: nn.Module | None = None,
    ) -> None:
        if not isinstance(delta, (int, float, np.floating)) or not LEAST_DELTA <= delta < 1:
            raise InputError(f"delta must be a probability between 0 and 1, of at least {LEAST_DELTA:g}, got {delta!r}")
        self.model, self.loss, self.delta = snapshot(model, "eval", None), loss, delta
        self.model.requires_grad_(False)
        self.partition, self.cellwise, self.checkpoint = partition, cellwise, checkpoint
        self.generator = generator or torch.Generator().manual_seed(0)
        self.batch_size, self.progress, self.initial = batch_size, progress, initial
        self._data, self._held_out = train, held_out
        self._batches = self._read(train)
        self.domain = expanded(domain, [part.shape[1:] for part in self.example.floats()])
        self._known = Known()
        self._unproved = _unproved_independence(self.model, self.example)

    def _read(self, data: Data) -> Batches:
        first = next((value for value in self.model.parameters() if value.is_floating_point()), torch.empty(0))
        return Batches(data, self.model.forward, self.batch_size, None, first.device, first.dtype)

    # samples -----------------------------------------------------------------------------------------------------------

    @cached_property
    def train(self) -> Sample:
        locators = self._probes
        return Sample(
            self._batches,
            self.model,
            self.loss,
            "train",
            slopes=bool(locators),
            probes=locators,
            progress=self.progress,
            checkpoint=None if self.checkpoint is None else SavedColumns(self.checkpoint, self._key(locators)),
            expected=_length(self._data),
        )

    @cached_property
    def held_out(self) -> Sample | None:
        if self._held_out is None:
            return None
        batches = self._read(self._held_out)
        return Sample(batches, self.model, self.loss, "held-out", progress=self.progress, expected=_length(self._held_out))

    def require_held_out(self) -> Sample:
        if self.held_out is None:
            raise NotApplicable("it needs held_out=, data that training has not seen")
        return self.held_out

    @cached_property
    def first(self) -> Batch:
        """The first batch of the training sample."""
        return next(iter(self._batches))

    @property
    def example(self) -> Call:
        """Two samples, or one: enough to trace the model."""
        return self.first.call.samples(slice(0, 2))

    @cached_property
    def classes(self) -> int:
        """How many classes the outputs have."""
        with torch.no_grad():
            outputs = run(self.model, self.example)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
            raise NotApplicable("it needs a classifier, with outputs (samples, classes)")
        return int(outputs.shape[1])

    # cells -------------------------------------------------------------------------------------------------------------

    @cached_property
    def cells(self) -> list[Cellwise]:
        """The training sample by cells, once for every partition that is tried; `NotApplicable` where there can be none."""
        if not self.cellwise:
            raise NotApplicable("the pass over the sample was made without cells: make the setting with cellwise=True")
        locators, columns = self._locators, self.train.columns
        return [Cellwise(locator, columns, self.classes, len(locators)) for locator in locators]

    @cached_property
    def _locators(self) -> list[Locator]:
        if self._held_out is None and self.domain is None:
            raise NotApplicable("it needs cells: pass held_out=, data that training has not seen, or domain= for a grid")
        if not is_labels(self.first.target):
            raise NotApplicable("it needs classes: cells are pairs of an input and a label")
        if not self.example.floats() or len(self.example.floats()) != len(self.example.tensors):
            raise NotApplicable("it needs inputs that are real numbers, for distances between samples")
        points = self._held_out_points()
        wanted = partitions(self.partition, self.classes, 0 if points is None else len(points), self.domain)
        made = [one.build(points, self.domain, self.generator) for one in wanted]
        return [
            Locator(f"partition {number}", cells, self.loss, self._outputs(cells.centers), _mean_distance(cells, points))
            for number, cells in enumerate(made)
        ]

    @property
    def _probes(self) -> list[Locator]:
        """What the pass over the training sample looks at beside the losses."""
        try:
            return self._locators if self.cellwise else []
        except NotApplicable:  # told to whoever asks for cells
            return []

    def _held_out_points(self) -> torch.Tensor | None:
        if self.held_out is None:
            return None
        parts: list[torch.Tensor] = []
        for batch in self.held_out.batches:
            points = flat(batch.call).cpu()
            parts.append(points.to(torch.promote_types(points.dtype, torch.float32)))
            if sum(map(len, parts)) >= MOST_POINTS:
                break
        return torch.cat(parts)[:MOST_POINTS]

    def _outputs(self, points: torch.Tensor) -> torch.Tensor:
        """The model at flat points."""
        with torch.no_grad():
            return torch.cat([self._at(part).cpu() for part in points.split(self.batch_size)])

    def _at(self, points: torch.Tensor) -> torch.Tensor:
        shown = self.example.floats()
        values = iter(part.to(like) for part, like in zip(self.unflattened(points), shown, strict=True))
        args = tuple(next(values) for _ in self.example.args)
        return run(self.model, Call(args, {name: next(values) for name in self.example.kwargs}))

    def unflattened(self, points: torch.Tensor) -> list[torch.Tensor]:
        """Rows (samples, d) as the model's inputs."""
        shapes = [part.shape[1:] for part in self.example.floats()]
        parts = points.split([shape.numel() for shape in shapes], dim=-1)
        return [part.reshape(*points.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _key(self, locators: Sequence[Locator]) -> str:
        """What a checkpoint depends on, beside the data: the model, the loss, the partitions and the size of batches."""
        digest = hashlib.sha256(f"{self.loss.name} {self.loss.bound} {self.batch_size} {type(self.model).__name__}".encode())
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for locator in locators:
            tensors += [locator.cells.centers, locator.cells.radii]
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # what is proved about the model ------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        try:
            return certifiable_graph(self.model, self.example.kwargs or self.example.args, "eval", None)
        except (ExportError, InputError) as error:
            raise NotApplicable(f"it needs a certified constant, but the model has none: {error}") from error

    @cached_property
    def above(self) -> Upper:
        """The certified bound with its links, on all inputs."""
        return upper(self.graph, known=self._known)

    @property
    def constant(self) -> Magnitude:
        return self.above.bound

    def above_on(self, region: Region) -> Upper:
        """The certified bound on a region; norms of weights are computed once for all regions."""
        return upper(self.graph, region=region, known=self._known)

    @cached_property
    def folded(self) -> nn.Module:
        """The same function in float64 without running statistics, which depend on the training data and are not parameters."""
        try:
            example = self.example.kwargs or self.example.args
            model = folded(self.model, example)
            check_hypothesis(model, None if self.initial is None else folded(self.initial, example), as_double(example))
            return model
        except (InputError, ExportError) as error:
            raise NotApplicable(str(error)) from error

    @cached_property
    def network(self) -> Network:
        """The folded model at its canonical representative, as theorems on norms see it."""
        example = self.example.kwargs or self.example.args
        form = canonical_form(self.folded, example)
        return network(form.model, as_double(example), form.notes)

    @cached_property
    def layers(self) -> tuple[LayerRow, ...]:
        """A row for every weight layer and normalizer, as in `ns.audit`; statistics are those of the training sample.

        Running statistics need no data, so the sample is read only where a normalizer takes its own.
        """
        readings = map(registry.reading, self.graph)
        settled = all(reading.fixed for reading in readings if isinstance(reading, Normalizer))
        return tuple(ledger(self.graph, self.above, [self.example] if settled else (batch.call for batch in self._batches)))

    # bounds ------------------------------------------------------------------------------------------------------------

    def bound(
        self,
        name: str,
        value: Real,
        quantity: str,
        status: str = CERTIFIED,
        parts: Mapping[str, Part] | None = None,
        assumptions: Sequence[str] = (),
        loss: Loss | None = None,
    ) -> Bound:
        """A bound on this setting's loss, or on another; for a gap, C − F(D, h) is known without theory."""
        loss = loss or self.loss
        trivial = loss.bound - self.train.risk if quantity == GAP and loss is self.loss else loss.bound
        assumed = (*assumptions, *self._unproved)
        return Bound(name, Magnitude(value), quantity, loss.name, trivial, status, dict(parts or {}), assumed)


def _unproved_independence(model: nn.Module, pair: Call) -> tuple[str, ...]:
    """In eval mode a sample's output is its own, whatever stands beside it: what of this is assumed. Refuses where it is not so."""
    with torch.no_grad(), untouched(model):
        outputs = run(model, pair)
    floats = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    try:
        notes = [check_samples_independent(model, pair.kwargs or pair.args, "eval", position) for position in range(len(floats))]
    except Refusal as error:
        raise InputError(
            f"a sample has no loss of its own in eval mode: {error.headline} ({'; '.join(error.causes)}); "
            "give normalizers running statistics, and let eval mode switch dropout off"
        ) from error
    return tuple(f"every sample has an output of its own; {note}" for note in dict.fromkeys(notes) if note is not None)


def _mean_distance(cells: Cells, points: torch.Tensor | None) -> torch.Tensor:
    """Of the held-out points in each cell from its centre, 0 where there are none."""
    total = torch.zeros(cells.count + 1, dtype=torch.float64)
    if points is None:
        return total[:-1]
    cell, distance = cells.locate(points)
    counts = torch.zeros_like(total).index_add(0, cell, torch.ones_like(distance))
    return (total.index_add(0, cell, distance) / counts.clamp(min=1))[:-1]


def _length(data: Any) -> int:
    """How many samples there are, or 0 if that is not known before they are read."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, tuple) and data and isinstance(data[-1], torch.Tensor):
        return len(data[-1])
    return len(data) if isinstance(data, Dataset) and hasattr(data, "__len__") else 0
