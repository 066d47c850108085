"""A labelled sample, walked batch by batch: what the bounds need of it is a few numbers per sample, found in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.bounds.losses import Loss, check_classes, is_labels, margins
from normscope.bounds.saved_columns import SavedColumns, joined
from normscope.bounds.table import NotApplicable
from normscope.core.data import Call
from normscope.core.errors import InputError
from normscope.core.progress import Progress, shown
from normscope.core.rounding import euclidean_norm
from normscope.curvature.batches import Batch, Batches


@dataclass(frozen=True)
class ObservedBatch:
    """One batch with what the model and the loss make of it."""

    points: torch.Tensor  # (samples, d): all real inputs of a sample in one row
    outputs: Any
    targets: Any
    losses: torch.Tensor


Probe = Callable[[ObservedBatch], Mapping[str, torch.Tensor]]  # further columns, one value per sample each


class Sample:
    """The samples of `batches` under a model in eval mode: one column of numbers a quantity, one row per sample.

    slopes: also record ‖∇_x f(h(x), y)‖. In eval mode samples do not touch each other, so the gradient of the summed loss holds
    every sample's own gradient, and one backward pass per batch is enough.
    """

    def __init__(
        self,
        batches: Batches,
        model: nn.Module,
        loss: Loss,
        what: str = "train",
        slopes: bool = False,
        probes: Sequence[Probe] = (),
        progress: Progress = None,
        checkpoint: SavedColumns | None = None,
        expected: int = 0,
    ) -> None:
        self.batches, self.model, self.loss, self.what = batches, model, loss, what
        self.slopes, self.probes, self.progress = slopes, tuple(probes), progress
        self.checkpoint, self.expected = checkpoint, expected

    @cached_property
    def columns(self) -> dict[str, torch.Tensor]:
        """Every column by name: loss and norm; margin and label where targets are classes; slope; those of the probes."""
        parts = self.checkpoint.load() if self.checkpoint else []
        stored = joined(parts).get("norm", torch.empty(0))
        done = 0
        with shown(f"{self.what} samples", self.progress, self.expected) as progress:
            for batch in self.batches:
                if done < len(stored):
                    _check_same(batch, stored[done : done + batch.size])
                else:
                    parts.append(self._look(batch))
                    if self.checkpoint:
                        self.checkpoint.keep(parts)
                done += batch.size
                progress.advance(batch.size)
        if self.checkpoint:
            self.checkpoint.keep(parts, now=True)
        return joined(parts)

    @property
    def size(self) -> int:
        """m."""
        return len(self.losses)

    @property
    def losses(self) -> torch.Tensor:
        return self.columns["loss"]

    @property
    def norms(self) -> torch.Tensor:
        """‖x‖₂ of every sample."""
        return self.columns["norm"]

    @property
    def labels(self) -> torch.Tensor:
        return self._of_classes("label")

    @property
    def margins(self) -> torch.Tensor:
        """z_y − max_{j≠y} z_j of every sample."""
        return self._of_classes("margin")

    @property
    def risk(self) -> float:
        """F(D, h), the mean loss."""
        return float(self.losses.mean())

    @property
    def error(self) -> float:
        """The share of samples with a wrong answer."""
        return float((~(self.margins > 0)).double().mean())

    def _of_classes(self, name: str) -> torch.Tensor:
        if name not in self.columns:
            raise NotApplicable("it needs margins and labels: outputs (samples, classes) and integer targets")
        return self.columns[name]

    def _check_finite(self, batch: Batch, outputs: Any) -> None:
        """NaN and ∞ have no loss: a network of NaN is neither right nor wrong. −∞ is a class that the model rules out."""
        if not bool(flat(batch.call).isfinite().all()):
            raise InputError(f"the {self.what} data hold nan or infinite values: leave those samples out, or repair them")
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        bad = [int((leaf.isnan() | leaf.isposinf()).sum()) for leaf in tensors]
        if any(bad):
            count = f"{sum(bad):,} of {sum(leaf.numel() for leaf in tensors):,}"
            raise InputError(f"{count} outputs of the model on {self.what} data are nan or infinite: look for nan in its weights")

    def _look(self, batch: Batch) -> dict[str, torch.Tensor]:
        call, leaves = _with_leaves(batch.call) if self.slopes else (batch.call, [])
        with torch.set_grad_enabled(self.slopes):
            outputs = run(self.model, call)
            self._check_finite(batch, outputs)
            losses = self.loss(outputs, batch.target)
            if len(losses) != batch.size:
                raise InputError(f"the loss returned {len(losses)} values for {batch.size} samples")
            slopes = {"slope": _slopes(losses, leaves)} if self.slopes else {}
        losses = losses.detach().double().clamp(0, self.loss.bound)
        points, outputs, target, losses = _at_rest((flat(batch.call), outputs, batch.target, losses))
        columns = {"loss": losses, "norm": euclidean_norm(points, 1), **slopes}
        if is_labels(target) and isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1:
            check_classes(outputs, target)
            columns |= {"label": target, "margin": margins(outputs.double(), target)}
        for probe in self.probes:
            columns |= probe(ObservedBatch(points, outputs, target, losses))
        return columns


def leading(batches: Iterable[Batch], samples: int) -> Iterator[Batch]:
    """The first batches, until they hold this many samples."""
    for batch in batches:
        yield batch
        samples -= batch.size
        if samples <= 0:
            return


def run(model: nn.Module, call: Call) -> Any:
    """The model's outputs; an error of its forward becomes one line."""
    try:
        return model(*call.args, **call.kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # what a forward raises on inputs that do not fit it
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in call.tensors)
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"the model does not run on inputs of shape {shapes}: {reason}") from error


def flat(call: Call) -> torch.Tensor:
    """(samples, d): the real inputs of every sample in one row."""
    parts = [tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in call.floats()]
    return torch.cat(parts, 1) if parts else torch.zeros(call.batch_size, 0)


def _with_leaves(call: Call) -> tuple[Call, list[torch.Tensor]]:
    """The same call with real inputs that a gradient can be taken in."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    args, kwargs = tree_map_only(torch.Tensor, leaf, (call.args, call.kwargs))
    return Call(args, kwargs), leaves


def _slopes(losses: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """‖∇_x f‖ of every sample, zero where the loss is locally constant for autograd; infinite where it is NaN."""
    found = [torch.zeros(len(losses), dtype=torch.float64)]
    if losses.requires_grad:
        for gradient in torch.autograd.grad(losses.sum(), list(leaves), allow_unused=True):
            if gradient is not None:
                found.append(euclidean_norm(gradient.flatten(1), 1).cpu())
    return euclidean_norm(torch.stack(found), 0).nan_to_num(torch.inf, torch.inf)


def _at_rest(values: Any) -> Any:
    """Off the tape, and on the host."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), values)


def _check_same(batch: Batch, norms: torch.Tensor) -> None:
    """A batch that a checkpoint has is the one that it was made from."""
    own = euclidean_norm(flat(batch.call), 1).cpu()
    if own.shape != norms.shape or not torch.allclose(own, norms, rtol=1e-9, atol=0):
        raise InputError("the checkpoint was made from other data or other batches: remove it")
