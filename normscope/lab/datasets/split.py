"""A data set in two parts, and what is done to it before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from normscope.core.errors import InputError

Labelled = tuple[torch.Tensor, torch.Tensor]  # inputs (samples, …) and classes or real targets (samples,)


@dataclass(frozen=True)
class Split:
    """A data set in two parts, each (inputs, classes)."""

    train: Labelled
    test: Labelled

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].shape[1:])

    @property
    def classes(self) -> int:
        if self.train[1].is_floating_point():
            raise InputError("these data have real targets and no classes: choose others, such as digits")
        return int(torch.cat([self.train[1], self.test[1]]).max()) + 1

    def in_unit_ball(self) -> Split:
        """x / max ‖x_train‖, one number for all: ‖x‖ ≤ 1 on the training part (Than 2025, Appendix E); ids stay."""
        if not self.train[0].is_floating_point():
            return self
        largest = self.train[0].flatten(1).norm(dim=1).max()
        return self.map(lambda inputs: inputs / largest if largest > 0 else inputs)

    def as_rgb(self) -> Split:
        """Grey images as three equal channels, divided by √3 so that norms stay."""
        if self.sample_shape[0] == 3:
            return self
        if len(self.sample_shape) != 3 or self.sample_shape[0] != 1:
            raise InputError(f"samples of shape {self.sample_shape} are not images, which have 1 or 3 channels and two more axes")
        return self.map(lambda inputs: inputs.expand(-1, 3, -1, -1).contiguous() / 3**0.5)

    def as_tokens(self) -> Split:
        """Sequences of token ids, or an error."""
        if len(self.sample_shape) != 1 or self.train[0].is_floating_point():
            raise InputError("this network takes sequences of token ids: choose data like that, such as markov")
        return self

    def subset(self, images: int | None, generator: torch.Generator) -> Split:
        """`images` random ones of the training part, the whole test part; None: all."""
        if images is None or images == len(self.train[0]):
            return self
        if not 0 < images <= len(self.train[0]):
            raise InputError(f"images must be from 1 to {len(self.train[0])}, the size of the training part, got {images}")
        chosen = torch.randperm(len(self.train[0]), generator=generator)[:images]
        return replace(self, train=(self.train[0][chosen], self.train[1][chosen]))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Split:
        """The same split with `change` applied to the inputs of both parts."""
        return Split((change(self.train[0]), self.train[1]), (change(self.test[0]), self.test[1]))
