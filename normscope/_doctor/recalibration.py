"""`ns.recalibrate`: running statistics of batch normalizers, estimated anew on data."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normscope.core.data import Call, Data, Example, calls
from normscope.core.errors import InputError, boundary
from normscope.core.randomness import preserved_random_state
from normscope.core.twins import twin_of


@boundary
def recalibrate(model: nn.Module, data: Data, *, example: Example | None = None, batch_size: int = 64) -> nn.Module:
    """A copy of the model whose batch normalizers have the statistics of `data`: means over its batches, from scratch.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> int(recalibrate(model, torch.randn(256, 2))[1].num_batches_tracked)
    4

    data: a tensor, (inputs, targets), a Dataset or batches.
    example: one input, where data does not begin with a tensor of inputs.
    batch_size: where the data come as tensors or as a Dataset. Batches of one sample have no variance, and torch refuses them.

    After averaging weights (EMA, SWA, merging), after pruning or quantization, or on data of another kind, the stored statistics
    are those of another function; this makes them those of the model as it is. Everything but the batch normalizers is in eval
    mode meanwhile, and nothing else changes.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if example is None:
        first = data[0] if isinstance(data, tuple) and data else data
        if not isinstance(first, torch.Tensor):
            raise InputError("pass example=, one batch of inputs, where data is not a tensor or (inputs, targets)")
        example = first[:1]
    copied = twin_of(model)
    modes = {module: module.training for module in copied.modules()}
    copied.eval()
    momenta = {}
    for layer in copied.modules():
        if isinstance(layer, _BatchNorm) and layer.running_var is not None:
            momenta[layer], layer.momentum = layer.momentum, None  # a mean over all batches
            layer.reset_running_stats()
            layer.train()
    if not momenta:
        raise InputError("the model has no batch normalizer with running statistics")
    with torch.no_grad(), preserved_random_state():
        for call in calls(data, Call.of(example), batch_size):
            copied(*call.args, **call.kwargs)
    for layer, momentum in momenta.items():
        layer.momentum = momentum
    for module, training in modes.items():
        module.training = training
    return copied
