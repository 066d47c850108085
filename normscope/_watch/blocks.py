"""Blocks of a network (elements of a ModuleList or Sequential that keep the shape of what they get): what enters them, what they
add to it, and how the backward pass grows through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normscope._watch.columns import BLOCK_METRICS
from normscope._watch.layers import PLAIN
from normscope._watch.statistics import magnitudes
from normscope._watch.unrecorded import aside

Place = tuple[str, int]  # module path, and which call of it


def block_paths(model: nn.Module) -> frozenset[str]:
    """Modules with children of their own that are elements of a list or a chain."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found |= {
                f"{path}.{name}".lstrip(".") for name, child in module._modules.items() if child is not None and child._modules
            }
    return frozenset(found)


@dataclass
class BlockView:
    """Of the first training pass of a sampled step.

    measured: `BLOCK_METRICS`. lengths: (place, "in" or "out") → ‖gradient‖ there.
    """

    paths: frozenset[str]
    look: Callable[..., None]
    measured: dict[Place, torch.Tensor] = field(default_factory=dict)
    lengths: dict[tuple[Place, str], torch.Tensor] = field(default_factory=dict)
    _entered: dict[Place, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def enter(self, place: Place, value: Any) -> None:
        if place[0] in self.paths and type(value) in PLAIN and value.is_floating_point() and _is_readable(value):
            self._entered[place] = value, value._version

    def leave(self, place: Place, output: Any, guarded: Callable[..., Any], channel_axis: int) -> None:
        value, version = self._entered.pop(place, (None, 0))
        result = output[0] if type(output) in (tuple, list) and output else output
        if value is None or type(result) not in PLAIN or result.shape != value.shape or not _is_readable(result):
            return
        if value._version == version:  # else the block wrote into what it got
            self.look("blocks", self._measure, place, value, result, channel_axis)
        for name, tensor in (("in", value), ("out", result)):
            if tensor.grad_fn is not None:
                hook = guarded(lambda gradients, key=(place, name), number=tensor.output_nr: self._passed(key, number, gradients))
                self._handles.append(tensor.grad_fn.register_prehook(hook))

    def stop(self) -> None:
        self._entered.clear()
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        self.stop()
        self.measured, self.lengths = {}, {}

    def gains(self) -> dict[Place, torch.Tensor]:
        """‖dx‖/‖dy‖ of the backward pass, of blocks where both were seen."""
        places = {place for place, _ in self.lengths}
        both = [place for place in places if (place, "in") in self.lengths and (place, "out") in self.lengths]
        return {place: self.lengths[place, "in"] / self.lengths[place, "out"] for place in both}

    @aside
    def _measure(self, place: Place, value: torch.Tensor, result: torch.Tensor, channel_axis: int) -> None:
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        length = torch.linalg.vector_norm(wide)
        written = torch.linalg.vector_norm(result.to(wide.dtype) - wide)
        found = [length / wide.numel() ** 0.5, written / length, *magnitudes(wide, channel_axis)]
        self.measured[place] = torch.stack(found)
        assert len(found) == len(BLOCK_METRICS)

    def _passed(self, key: tuple[Place, str], number: int, gradients: Any) -> None:
        """Before a node's backward: what reaches its outputs."""
        gradient = gradients[number] if isinstance(gradients, tuple) and number < len(gradients) else None
        if type(gradient) in PLAIN:
            self.look("backward gains", self._length, key, gradient)

    @aside
    def _length(self, key: tuple[Place, str], gradient: torch.Tensor) -> None:
        self.lengths[key] = torch.linalg.vector_norm(gradient.detach().float() if gradient.dtype != torch.float64 else gradient)


def _is_readable(value: torch.Tensor) -> bool:
    return bool(value.numel()) and not value.is_meta and not value.is_sparse and not value.is_inference()
