"""Dropout with a random stream of its own."""

from __future__ import annotations

import torch
from torch import nn

from normscope.core.errors import InputError


class SeededDropout(nn.Module):
    """In training every entry is 0 with chance `rate`, else divided by 1 − rate.

    Where the stream stands is a part of the state, so that a training goes on after a kill as if there had been none.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise InputError(f"the dropout rate must be at least 0 and less than 1, got {rate}")
        self.rate = rate
        self.stream = torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.rate:
            return x
        kept = torch.rand(x.shape, generator=self.stream) >= self.rate
        return x * kept / (1 - self.rate)

    def get_extra_state(self) -> torch.Tensor:
        return self.stream.get_state()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.stream.set_state(state)

    def __deepcopy__(self, memo: dict[int, object]) -> SeededDropout:
        copied = SeededDropout(self.rate)
        copied.stream.set_state(self.stream.get_state())
        return copied.train(self.training)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
