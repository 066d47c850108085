"""Weights around the optimizer's step: their norms before it, and how far it moved them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from normscope._watch.layers import WatchedLayer
from normscope._watch.motion import equilibrium_factor, group_rate
from normscope._watch.transfer import Transfer
from normscope._watch.unrecorded import aside
from normscope._watch.weights import PowerIteration, dots, local, norms


class StepView:
    """The weights and γ of a layer table that are among `parameters`.

    look: as in ForwardView, with the name of what is measured first.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        layers: Sequence[WatchedLayer],
        look: Callable[..., None],
    ) -> None:
        self.optimizer, self.look = optimizer, look
        named = {row: layer.parameter for row, layer in enumerate(layers) if layer.parameter}
        known = {row: parameters[name] for row, name in named.items() if name in parameters}
        self.rows, self.tensors = list(known), list(known.values())
        self.spectral = {  # row → warm-started iteration
            row: PowerIteration(local(tensor), seed=row)
            for row, tensor in zip(self.rows, self.tensors, strict=True)
            if has_spectral_norm(layers[row]) and not layers[row].sharded and tensor.numel() and not tensor.is_complex()
        }
        self.affine = {  # (weight or bias, row) → γ or β
            (name, row): parameters[f"{layer.module}.{name}".lstrip(".")]
            for row, layer in enumerate(layers)
            for name in ("weight", "bias")
            if layer.role == "normalizer" and f"{layer.module}.{name}".lstrip(".") in parameters
        }
        self._before: list[torch.Tensor] = []
        self._lengths: torch.Tensor | None = None  # norms of the weights before the step
        self._held: Mapping[int, torch.Tensor] = {}
        self._scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # row → γ at the first sample and at the last

    @aside
    def before(self, transfer: Transfer, held: Mapping[int, torch.Tensor] | None = None) -> None:
        """Norms of the weights as the forward pass used them, and a copy to compare with.

        held: id → copy, where the step has been made already.
        """
        self._before, self._lengths, self._held = [], None, held or {}
        tensors = [self._used(tensor) for tensor in self.tensors]
        self.look("weight norms", self._norms, tensors, transfer)
        self.look("spectral norms", self._spectral_norms, transfer)
        self.look("affine ranges", self._ranges, transfer)
        self.look("moved scales", self._moved, transfer)
        self.look("learning rates", self._rates, transfer)
        self.look("updates", self._copy, tensors)
        self._held = {}

    @aside
    def after(self, transfer: Transfer) -> None:
        """‖Δ‖ and ⟨Δ, w⟩ of the step just made."""
        self.look("updates", self._updates, transfer)
        self._before = []

    def _used(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight as the forward pass used it."""
        held = self._held.get(id(tensor))
        return local(tensor) if held is None else held

    def _norms(self, tensors: Sequence[torch.Tensor], transfer: Transfer) -> None:
        self._lengths = norms(tensors)
        transfer.add("frobenius_norm", self._lengths)

    def _spectral_norms(self, transfer: Transfer) -> None:
        by_row = dict(zip(self.rows, self.tensors, strict=True))
        found = [iteration.step(self._used(by_row[row])) for row, iteration in self.spectral.items()]
        if found:
            transfer.add("spectral", torch.stack(found))  # (rows, 2)
            transfer.add("row_norms", torch.stack([_rms_to_max(self._used(by_row[row])) for row in self.spectral]))

    def _ranges(self, transfer: Transfer) -> None:
        for key, tensor in self.affine.items():
            held = self._used(tensor)
            if held.numel():
                transfer.add(key, torch.stack(torch.aminmax(held)))

    def _moved(self, transfer: Transfer) -> None:
        """MOVED_METRICS: the share of entries of γ that are others than at the last sample, and than at the first."""
        for (name, row), tensor in self.affine.items():
            held = self._used(tensor)
            if name != "weight" or not held.numel():
                continue
            if row in self._scales and self._scales[row][0].shape == held.shape:
                first, last = self._scales[row]
                transfer.add(("moved", row), torch.stack([(held != then).float().mean() for then in (last, first)]))
                last.copy_(held)
            else:
                self._scales[row] = held.clone(), held.clone()

    def _rates(self, transfer: Transfer) -> None:
        """Of each weight its effective rate but for its norm, and the angle that it turns by in equilibrium."""
        groups = self.optimizer.param_groups
        by_group = [_numbers(group_rate(group), equilibrium_factor(self.optimizer, group), group["lr"]) for group in groups]
        by_parameter = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
        places = [by_parameter.get(id(tensor), len(groups)) for tensor in self.tensors]
        unknown = torch.full((2,), torch.nan, dtype=torch.float64)
        device = by_group[0].device
        table = torch.stack([*(numbers.to(device) for numbers in by_group), unknown.to(device)])
        transfer.add("rates", table[torch.tensor(places, dtype=torch.long, device=device)].mT)  # (2, rows)
        transfer.add("learning_rate", torch.as_tensor(groups[0]["lr"], dtype=torch.float64).reshape(1))

    def _copy(self, tensors: Sequence[torch.Tensor]) -> None:
        self._before = [_wide(tensor).clone() for tensor in tensors]

    def _updates(self, transfer: Transfer) -> None:
        """With Δ = w' − w, ⟨Δ, w⟩ = ⟨Δ, w'⟩ − ‖Δ‖², so that the copy of w can become −Δ in place.

        Where Δ is longer than w, that difference cancels, and ⟨Δ, w⟩ = ⟨w, w'⟩ − ‖w‖² does not.
        """
        if not self._before:
            return
        now = [_wide(local(tensor)) for tensor in self.tensors]
        weights = (norms(self._before) if self._lengths is None else self._lengths).to(torch.float64)
        long = dots(self._before, now).to(torch.float64) - weights.square()
        torch._foreach_sub_(self._before, now)
        lengths = norms(self._before).to(torch.float64)
        short = -dots(self._before, now).to(torch.float64) - lengths.square()
        transfer.add("updates", torch.stack([lengths, torch.where(lengths > weights, long, short)]))  # (2, rows)


def _rms_to_max(weight: torch.Tensor) -> torch.Tensor:
    """max ‖Wx‖_∞ over x of root mean square 1: √n · max_i ‖W_i‖₂ of the rows of the weight as (out, n entries)."""
    matrix = weight.flatten(1)
    dtype = torch.float32 if matrix.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(matrix, dim=1, dtype=dtype).amax() * matrix.shape[1] ** 0.5


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step that was called with these (the optimizer first) makes its passes itself, by a closure."""
    return (len(args) > 1 and callable(args[1])) or kwargs.get("closure") is not None


def has_spectral_norm(layer: WatchedLayer) -> bool:
    """Weights that multiply; an embedding is a table, and γ is a diagonal."""
    return layer.role == "weight" and layer.kind not in ("Embedding", "EmbeddingBag")


def _numbers(rate: Any, factor: float, lr: Any) -> torch.Tensor:
    """(rate, factor · √lr); a learning rate on a device stays there."""
    if isinstance(lr, torch.Tensor):
        return torch.stack([torch.as_tensor(rate, device=lr.device).reshape(()), factor * lr.reshape(()).sqrt()]).to(torch.float64)
    return torch.tensor([float(rate), factor * math.sqrt(max(float(lr), 0.0))], dtype=torch.float64)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
