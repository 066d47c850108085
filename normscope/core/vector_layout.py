"""Named tensors as one vector, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from normscope.core.errors import InputError


def movable(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters among `model.named_parameters()` that can move by a little: not those of whole numbers."""
    return {name: value for name, value in named if value.is_floating_point() or value.is_complex()}


class VectorLayout:
    """The order and the shapes of some parameters."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def flatten(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One vector; names that are not there count as zero."""
        unknown = [name for name in tensors if name not in self.shapes]
        if unknown:
            raise InputError(f"no parameter {unknown[0]!r} among those chosen: {', '.join(list(self.shapes)[:3])}, …")
        wrong = [name for name, tensor in tensors.items() if tensor.shape != self.shapes[name]]
        if wrong:
            given, own = (tuple(shape) for shape in (tensors[wrong[0]].shape, self.shapes[wrong[0]]))
            raise InputError(f"{wrong[0]} has shape {own}, the vector gives it {given}")
        like = next(iter(tensors.values()))
        parts = [tensors[name] if name in tensors else like.new_zeros(shape) for name, shape in self.shapes.items()]
        return self.join(parts)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a vector, each in its shape; views of it."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes.values(), strict=True)]

    def unflatten(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.shapes, self.split(vector), strict=True))
