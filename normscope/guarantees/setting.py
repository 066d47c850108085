"""What the bounds of one call share: the model, the loss, the samples, and what was proved about them, each found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import Upper, upper
from normscope.core.data import Call, Data
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude, Real
from normscope.core.progress import Wanted
from normscope.core.region import Region
from normscope.curvature.batches import Batch, Batches
from normscope.curvature.objective import snapshot
from normscope.graph.graph import Graph
from normscope.guarantees.bound import CERTIFIED, GAP, Bound, Part
from normscope.guarantees.folding import as_double, canonical_form, folded
from normscope.guarantees.losses import Loss
from normscope.guarantees.network import Network, network
from normscope.guarantees.sample import Probe, Sample
from normscope.guarantees.table import NotApplicable
from normscope.ledger import LayerRow, ledger
from normscope.rules.normalizers import normalizer_of
from normscope.rules.registry import Gain

BATCH_SIZE = 256


class Setting:
    """A model h, a loss f with 0 ≤ f ≤ C, a sample D of size m, and a confidence 1 − δ.

    model: a copy in eval mode, parameters without gradients; the user's own is never touched. train, held_out: `Sample`s, read
    batch by batch. initial: the model before training, where a bound may look at it. constant: the certified Lipschitz constant of x ↦ h(x) on all inputs; `constant_on` is that of a region.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        train: Data,
        held_out: Data | None = None,
        delta: float = 0.05,
        domain: Region | None = None,
        batch_size: int = BATCH_SIZE,
        generator: torch.Generator | None = None,
        progress: Wanted = None,
        initial: nn.Module | None = None,
    ) -> None:
        if not 0 < delta < 1:
            raise InputError(f"delta is a probability between 0 and 1, not {delta}")
        self.model, self.loss, self.delta, self.domain = snapshot(model, "eval", None), loss, delta, domain
        self.model.requires_grad_(False)
        self.initial = initial
        self.generator = generator or torch.Generator().manual_seed(0)
        self.batch_size, self.progress = batch_size, progress
        self.train = self._sample(train, "train")
        self.held_out = None if held_out is None else self._sample(held_out, "held-out")
        self._known: dict[object, Gain] = {}

    def _sample(self, data: Data, what: str) -> Sample:
        first = next(self.model.parameters(), torch.empty(0))
        batches = Batches(data, self.model.forward, self.batch_size, None, first.device, first.dtype)
        return Sample(batches, self.model, self.loss, what, progress=self.progress, expected=_length(data))

    # the sample --------------------------------------------------------------------------------------------------------

    @cached_property
    def first(self) -> Batch:
        """The first batch of the training sample."""
        return next(iter(self.train.batches))

    @property
    def example(self) -> Call:
        """Two samples, or one: enough to trace the model."""
        return self.first.call.samples(slice(0, 2))

    @cached_property
    def classes(self) -> int:
        """How many classes the outputs have."""
        outputs = self.train.outputs(self.first)
        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
            raise NotApplicable("it needs a classifier, with outputs (samples, classes)")
        return int(outputs.shape[1])

    def require_held_out(self) -> Sample:
        if self.held_out is None:
            raise NotApplicable("it needs held_out=, data that training has not seen")
        return self.held_out

    # what is proved about the model ------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> Graph:
        return certifiable_graph(self.model, self.example.kwargs or self.example.args, "eval", None)

    @cached_property
    def above(self) -> Upper:
        """The certified bound with its links, on all inputs."""
        return upper(self.graph, known=self._known)

    @property
    def constant(self) -> Magnitude:
        return self.above.bound

    def constant_on(self, region: Region) -> Magnitude:
        """The certified constant on a region; norms of weights are computed once for all regions."""
        return upper(self.graph, region=region, known=self._known).bound

    @cached_property
    def folded(self) -> nn.Module:
        """The same function in float64 without running statistics, which depend on the training data and are no parameters."""
        return folded(self.model, self.example.kwargs or self.example.args)

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
        normalizers = [normalizer for node in self.graph if (normalizer := normalizer_of(node)) is not None]
        read = all(normalizer.fixed for normalizer in normalizers)
        calls = [self.example] if read else (batch.call for batch in self.train.batches)
        return tuple(ledger(self.graph, self.above, calls))

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
        return Bound(name, Magnitude(value), quantity, loss.name, trivial, status, dict(parts or {}), tuple(assumptions))


def _length(data: Any) -> int:
    """How many samples there are, or 0 if that is not known before they are read."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, tuple) and data and isinstance(data[-1], torch.Tensor):
        return len(data[-1])
    return len(data) if isinstance(data, Dataset) and hasattr(data, "__len__") else 0


__all__ = ["BATCH_SIZE", "Probe", "Setting"]
