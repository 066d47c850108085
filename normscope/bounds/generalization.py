"""`ns.generalization`: every bound that theory gives for a model on its data, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Union

import torch
from torch import nn

from normscope.bounds.bound import RANDOMIZED, STATUSES, Bound
from normscope.bounds.losses import Loss, loss_of
from normscope.bounds.partition import Choice
from normscope.bounds.setting import BATCH_SIZE, Setting
from normscope.bounds.table import BoundEntry, NotApplicable
from normscope.bounds.theorems import TABLE
from normscope.core.codec import plain
from normscope.core.data import Data
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, Refusal, boundary
from normscope.core.progress import Progress
from normscope.core.region import Region
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import ResultSequence

BOUND_WIDTH = 33  # columns of a bound's name in the table


@dataclass(frozen=True, repr=False)
class Guarantees(ResultSequence[Bound]):
    """Bounds, certified ones first and each kind from small to large; `not_given` says why others say nothing here."""

    schema = "normscope.generalization/1"

    bounds: tuple[Bound, ...]
    empirical: float
    size: int
    delta: float
    not_given: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, index: Any) -> Any:
        """By position, or by name."""
        if isinstance(index, str):
            for bound in self.bounds:
                if bound.name == index:
                    return bound
            raise KeyError(f"no bound {index!r}: there are {'; '.join(bound.name for bound in self.bounds)}")
        return self.bounds[index]

    @property
    def best(self) -> Bound | None:
        """The smallest certified bound on a risk."""
        return next((bound for bound in self.bounds if bound.certified and bound.quantity == "risk"), None)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """bounds: every value on a logarithmic scale, by status; `truth=` is what the risk is known to be, from elsewhere."""
        from normscope.report.bounds import bound_comparison

        return {"bounds": partial(bound_comparison, self)}

    @property
    def held_out(self) -> float | None:
        """The mean loss on held-out data, where a bound states it."""
        found = (bound.parts["F(H, h)"] for bound in self.bounds if bound.name == "held-out Hoeffding")
        return next((value for value in found if isinstance(value, float)), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "empirical_risk": self.empirical,
            "samples": self.size,
            "delta": self.delta,
            "bounds": plain(self.bounds),
            "not_given": dict(self.not_given),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Guarantees:
        """The guarantees that `to_dict` described."""
        bounds = tuple(map(Bound.from_dict, content["bounds"]))
        return Guarantees(bounds, content["empirical_risk"], content["samples"], content["delta"], dict(content["not_given"]))

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
        table.add_column("bound", overflow="fold", min_width=BOUND_WIDTH)
        for name in ("quantity", "loss"):
            table.add_column(name, overflow="fold")
        for name in ("value", "trivial"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("status", "verdict"):
            table.add_column(name, no_wrap=True)
        for bound in self.bounds:
            trivial = "" if bound.status == "measure" else f"{bound.trivial:.3g}"
            quantity = "randomized" if bound.quantity == RANDOMIZED else bound.quantity
            table.add_row(bound.name, quantity, bound.loss, str(bound.value), trivial, bound.status, bound.verdict)
        head = (
            f"{self.size:,} training samples, mean loss {self.empirical:.4g}; each bound holds with probability {1 - self.delta:g}"
        )
        missing = [Text(f"· {name}: {reason}", "dim") for name, reason in self.not_given.items()]
        return Group(Text(f"{head}\n"), table, *([Text("\nnot given:"), *missing] if missing else []))


@earlier(positional=11, train="data", only="select")
@boundary
def generalization(
    model: nn.Module,
    loss: Union[str, Loss, Callable[[Any, Any], torch.Tensor]],
    data: Data,
    *,
    held_out: Data | None = None,
    delta: float = 0.05,
    domain: Region | None = None,
    partition: Choice = None,
    loss_bound: float | None = None,
    select: Sequence[str] | None = None,
    batch_size: int = BATCH_SIZE,
    generator: torch.Generator | None = None,
    progress: Progress = None,
    checkpoint: str | Path | None = None,
    initial: nn.Module | None = None,
) -> Guarantees:
    """What theory guarantees about the loss of `model` on unseen data, by every bound that applies.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 100)[:, None]
    >>> model, y = torch.nn.Linear(1, 2), (x[:, 0] > 0).long()
    >>> found = generalization(model, "zero-one", (x[::2], y[::2]), held_out=(x[1::2], y[1::2]), select=["held-out binomial"])
    >>> found.best.certified, found.best.quantity, found.best.parts["n"]
    (True, 'risk', 50)

    loss: "l1" (on softmax outputs), "zero-one", "ramp", or a callable of (outputs, targets) that returns one value per sample.
    data: the training data: (inputs, targets), a Dataset, or an iterable of batches.
    held_out: data that training has not seen, in the same forms.
    delta: each bound by itself fails with at most this probability.
    domain: a `Ball` or `Box` in which inputs are expected, for grids.
    partition: "voronoi", "k-means", "grid", a `Partition`, or several, between which δ is split.
    loss_bound: the largest value of a loss of your own.
    select: names of bounds; all if not given.
    batch_size: where the data come as tensors or as a Dataset.
    generator: what partitions and noise are drawn from.
    progress: True for a bar on stderr, or a callable (what, done, total).
    checkpoint: a file that keeps the pass over the training sample, so that a stopped call goes on from there.
    initial: the model before training, independent of the data: the centre of the prior of PAC-Bayes.
    """
    chosen = _chosen(select)
    cellwise = any(entry.cellwise for entry in chosen.values())
    setting = Setting(
        model, loss_of(loss, loss_bound), data, held_out, delta=delta, domain=domain, partition=partition, cellwise=cellwise,
        batch_size=batch_size, generator=generator, progress=progress, checkpoint=checkpoint, initial=initial,
    )  # fmt: skip
    found: list[Bound] = []
    missing: dict[str, str] = {}
    for name, entry in chosen.items():
        try:
            found += entry.source(setting)
        except (NotApplicable, Refusal) as reason:
            missing[name] = str(reason)
    ordered = sorted(found, key=lambda bound: (STATUSES.index(bound.status), bound.loss != setting.loss.name, bound.value.log))
    return Guarantees(tuple(ordered), setting.train.risk, setting.train.size, delta, missing)


def _chosen(select: Sequence[str] | None) -> dict[str, BoundEntry]:
    unknown = [name for name in select or () if name not in TABLE]
    if unknown:
        raise InputError(f"no bound {unknown[0]!r}: choose from {'; '.join(TABLE)}")
    return dict(TABLE) if select is None else {name: TABLE[name] for name in select}
