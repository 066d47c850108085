"""A loss over fixed batches as a function of a vector of parameters; the model, its buffers and random state stay as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Union

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter

from normscope.core.data import Data
from normscope.core.errors import InputError, first_line
from normscope.core.randomness import seed_generators
from normscope.core.twins import twin_of
from normscope.core.vector_layout import VectorLayout
from normscope.core.wrapping import unwrapped
from normscope.curvature.batches import Batch, Batches
from normscope.curvature.twice import twice_differentiable

MODES = ("train", "eval")
BATCH_SIZE = 256
MISFITS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)  # what code raises on data that do not fit
MICROBATCH_TOLERANCE = 1e-4  # relative: what rounding may change in a loss when a batch is computed in parts

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Term:
    """One batch on the tape: loss(outputs) of `size` samples as a function of `leaves`."""

    leaves: list[torch.Tensor]
    outputs: Any
    loss_of: Callable[[Any], torch.Tensor]
    size: int

    @property
    def loss(self) -> torch.Tensor:
        return self.loss_of(self.outputs)

    def gradient(self, create_graph: bool = False) -> list[torch.Tensor]:
        return derivative([self.loss], self.leaves, None, create_graph=create_graph)


def derivative(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
    create_graph: bool = False,
    keep: bool = False,
) -> list[torch.Tensor]:
    """∂⟨outputs, weights⟩/∂inputs, zero where nothing depends on an input. keep: the tape can be used again."""
    tracked = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not tracked:
        return [torch.zeros_like(tensor) for tensor in inputs]
    found = torch.autograd.grad(
        [outputs[i] for i in tracked],
        inputs,
        None if weights is None else [weights[i] for i in tracked],
        create_graph=create_graph,
        retain_graph=keep or create_graph,
        allow_unused=True,
    )
    return [torch.zeros_like(tensor) if part is None else part for part, tensor in zip(found, inputs, strict=True)]


class Objective:
    """L(θ) = Σ_b (n_b/N) loss(model_θ(x_b), y_b) for a snapshot of a model, θ the vector of the chosen parameters.

    Every batch starts from the buffers that the model had and from a random state that depends on `seed` and its number alone,
    so that L is one function: running statistics, dropout masks and the order of a shuffled loader are the same on every pass.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Sequence[Loss],
        batches: Data,
        mode: str = "train",
        parameters: Union[str, Iterable[str], None] = None,
        dtype: torch.dtype | None = None,
        batch_size: int = BATCH_SIZE,
        microbatch: int | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.mode, self.seed = mode, seed
        self.model = snapshot(model, mode, dtype)
        chosen = _chosen(self.model, parameters)
        self.layout = VectorLayout(chosen)
        self.point = self.layout.join(list(chosen.values()))  # in one dtype, the widest
        self.dtypes = [tensor.dtype for tensor in chosen.values()]
        self.losses = tuple(loss) if isinstance(loss, Sequence) else (loss,)
        self.model.requires_grad_(False)
        self.batches = Batches(batches, self.model.forward, batch_size, microbatch, self.point.device, self.point.dtype)
        self.sizes = self._first_pass()

    @property
    def size(self) -> int:
        return self.layout.size

    def at(self, point: torch.Tensor) -> Objective:
        """The same function with another point in mind."""
        other = copy.copy(self)
        other.point = point.to(self.point)
        return other

    def of(self, parameters: str | Iterable[str]) -> Objective:
        """The same loss as a function of some of the parameters, the others held."""
        other = copy.copy(self)
        own = self.layout.unflatten(self.point)
        other.model = twin_of(self.model)
        with torch.no_grad():
            for name, value in other.model.named_parameters():
                value.copy_(own.get(name, value))
        chosen = {name: own[name] for name in _matching(list(own), parameters)}
        other.layout = VectorLayout(chosen)
        other.point, other.dtypes = self.layout.join(list(chosen.values())), [own[name].dtype for name in chosen]
        return other

    def terms(self, point: torch.Tensor | None = None) -> Iterator[Term]:
        """The batches in turn, each on a tape of its own."""
        yield from self._terms(self.point if point is None else point.to(self.point), iter(self.batches))

    def value(self, point: torch.Tensor | None = None) -> float:
        """L(θ)."""
        with torch.no_grad():
            return sum(term.size * float(term.loss) for term in self.terms(point)) / sum(self.sizes)

    def gradient(self, point: torch.Tensor | None = None) -> torch.Tensor:
        """∇L(θ)."""
        return self.value_and_gradient(point)[1]

    @torch.enable_grad()
    def value_and_gradient(self, point: torch.Tensor | None = None) -> tuple[float, torch.Tensor]:
        value, total = 0.0, torch.zeros_like(self.point)
        for term in self.terms(point):
            share = term.size / sum(self.sizes)
            loss = term.loss
            value += share * float(loss.detach())
            total.add_(self.layout.join(derivative([loss], term.leaves, None)), alpha=share)
        return value, total

    def _terms(self, point: torch.Tensor, source: Iterator[Any]) -> Iterator[Term]:
        number = 0
        while True:
            with self._isolated(number):
                batch = next(source, None)
                if batch is None:
                    return
                leaves = [
                    part.detach().to(dtype).requires_grad_(torch.is_grad_enabled())
                    for part, dtype in zip(self.layout.split(point), self.dtypes, strict=True)
                ]
                buffers = {name: tensor.clone() for name, tensor in self.model.named_buffers()}
                state = {**buffers, **dict(zip(self.layout.shapes, leaves, strict=True))}
                outputs = self._outputs(state, batch)
            yield Term(leaves, outputs, partial(self._loss, target=batch.target), batch.size)
            number += 1

    def _outputs(self, state: dict[str, torch.Tensor], batch: Batch) -> Any:
        try:
            return functional_call(self.model, state, batch.call.args, batch.call.kwargs)
        except MISFITS as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.call.tensors)
            raise InputError(
                f"the model does not run on inputs of shape {shapes} in {self.mode} mode: {first_line(error)}"
            ) from error

    def _loss(self, outputs: Any, target: Any) -> torch.Tensor:
        try:
            value = sum(loss(outputs, target) for loss in self.losses)
        except MISFITS as error:
            raise InputError(
                f"loss(outputs, targets) fails on what the model and the batches give it: {first_line(error)}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(f"loss(outputs, targets) must return one number, the mean over the batch; it returned {shape}")
        return value.reshape(())

    def _first_pass(self) -> tuple[int, ...]:
        """The sizes of the batches, once each is known to have a finite loss that does not depend on how it is computed."""
        sizes, losses = [], []
        with torch.no_grad():
            for term in self._terms(self.point, self.batches.groups()):
                sizes.append(term.size)
                losses.append(float(term.loss))
                if not math.isfinite(losses[-1]):
                    raise InputError(
                        f"the loss of batch {len(losses) - 1} is {losses[-1]}: look for nan in the data and the weights"
                    )
            if self.batches.microbatch:
                self._check_microbatches(sizes[0], losses[0])
        return tuple(sizes)

    def _check_microbatches(self, size: int, whole: float) -> None:
        total, done = 0.0, 0
        for term in self.terms():
            total, done = total + term.size * float(term.loss), done + term.size
            if done >= size:
                break
        if abs(total / size - whole) > MICROBATCH_TOLERANCE * max(abs(whole), 1e-8):
            raise InputError(
                f"microbatches change the loss of the first batch from {whole:.6g} to {total / size:.6g}, by batch statistics, "
                "dropout or a loss that is not a mean: leave microbatch out, or use mode='eval'"
            )

    @contextmanager
    def _isolated(self, number: int) -> Iterator[None]:
        """Random state of its own, and operations that can be differentiated twice."""
        devices = [self.point.device] if self.point.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), twice_differentiable():
            seed_generators(self.seed + number)
            yield


def snapshot(model: nn.Module, mode: str, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model in one mode; what happens to it never reaches the model."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be an nn.Module, got {type(model).__name__}")
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"dtype must be real, such as torch.float64, got {dtype}")
    _check_parameters(model)
    model = unwrapped(model)  # torch.compile has no second derivatives, and data parallelism no functional form
    try:
        twin = twin_of(model)
    except Exception as error:  # modules may hold anything
        raise InputError(f"the model cannot be copied ({type(error).__name__}: {error}): remove what it caches") from error
    for part in twin.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None and dtype is not None:  # torch's default depends on the dtype
            part.eps = torch.finfo(next(model.parameters()).dtype).eps
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):  # a sparse gradient has no derivative
            part.sparse = False
    return (twin if dtype is None else twin.to(dtype)).train(mode == "train")


def _check_parameters(model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if isinstance(tensor, UninitializedParameter):
            raise InputError(f"{name} has no shape yet: call the model once")
        if tensor.is_meta:
            raise InputError(f"{name} has no values (device meta): load the weights")
        if tensor.is_complex() and tensor.requires_grad:
            raise InputError(f"{name} is complex, and the matrices are of real parameters: store its real and imaginary parts")


def _chosen(model: nn.Module, parameters: str | Iterable[str] | None) -> dict[str, torch.Tensor]:
    """The named parameters, or all that are trained."""
    own = {name: tensor for name, tensor in model.named_parameters() if tensor.is_floating_point()}
    names = [name for name in own if own[name].requires_grad] if parameters is None else _matching(list(own), parameters)
    if not names:
        raise InputError("the model has no parameter that requires a gradient: name some with parameters=")
    return {name: own[name].detach() for name in names}


def _matching(own: Sequence[str], wanted: str | Iterable[str]) -> list[str]:
    """Names of parameters, or of modules for all that is in them; in the order of the model."""
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    missing = [name for name in wanted if not any(_within(other, name) for other in own)]
    if missing or not wanted:
        raise InputError(
            f"no parameter or module {missing[0]!r}: the model has {', '.join(own[:3])}, …" if missing else "parameters= is empty"
        )
    return [name for name in own if any(_within(name, place) for place in wanted)]


def _within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")
