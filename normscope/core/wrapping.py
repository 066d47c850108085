"""The model itself, inside of what runs it."""

from __future__ import annotations

import torch
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel or torch.compile."""
    while True:
        if "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the step: accelerate's wrapper is an Optimizer, too, but has no hooks of its own."""
    while isinstance(wrapped := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        optimizer = wrapped
    return optimizer
