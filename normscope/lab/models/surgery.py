"""Networks with some of their modules exchanged for others."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def exchange(model: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Put change(module) in the place of every submodule for which it is not None; in the order of the model's modules."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            other = change(child)
            if other is not None:
                setattr(parent, name, other)
    return model
