"""What a chain of torch's own modules proves of its weights, without a trace: the model is not run, and no code of a user's is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HOMOGENEOUS = (  # f(cx) = c f(x) for c > 0; a chain adds nothing to its parts
    nn.Sequential, nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ReLU, nn.LeakyReLU,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
OF_THE_INPUT = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # by their input's own statistics in every mode
OF_THE_BATCH = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (torch.Tensor, nn.Parameter)


def scale_free_in_chain(model: nn.Module, training: Mapping[str, bool]) -> dict[str, str]:
    """Weight → module path of the normalizer that ends its scale, where modules of torch alone stand in a row up to it.

    A linear map, scaled by c > 0 with its bias, then maps of degree 1, then a normalizer: c is gone, and nothing else can have seen
    it, if every module of the model runs torch's own code and no other tensor shares the weight's memory. Of any other model, and
    of the other weights, nothing is said. training: module path → whether it was in train mode, for the modules that were called.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    if not all(_is_torchs_own(module) for _, module in modules):
        return {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    if not all(type(tensor) in PLAIN and tensor.layout is torch.strided for _, tensor in named):
        return {}
    shared = _sharing_memory([tensor for _, tensor in named])
    uses = Counter(module for _, module in modules)
    found: dict[str, str] = {}
    waiting: str | None = None
    for path, module in modules:
        if type(module) in LINEAR:
            weight = module._parameters.get("weight")
            once = weight is not None and uses[module] == 1 and id(weight) not in shared
            waiting = f"{path}.weight".lstrip(".") if once and path in training else None
        elif waiting is not None and _normalizes(module, training.get(path, False)):
            found[waiting], waiting = path, None
        elif type(module) not in HOMOGENEOUS:
            waiting = None
    return found


def _sharing_memory(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of tensors whose storage overlaps that of another; arrays of numpy give every tensor a storage of its own."""
    storages = ((tensor.untyped_storage(), id(tensor)) for tensor in tensors)
    spans = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), own) for storage, own in storages)
    found: set[int] = set()
    end, holder = -1, 0
    for start, stop, own in spans:
        if start < end:
            found |= {own, holder}
        if stop > end:
            end, holder = stop, own
    return found


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether it is a chain or has no children, and no code of a user's has a part in its call."""
    kind, own = type(module), vars(module)
    in_place = kind.__module__.startswith("torch.nn.modules.") and kind.forward.__module__.startswith("torch.nn.modules.")
    added = bool({"forward", "weight", "bias"} & own.keys()) or any(own.get(hooks) for hooks in HOOKS)
    return in_place and not added and (kind is nn.Sequential or not module._modules)


def _normalizes(module: nn.Module, training: bool) -> bool:
    of_the_batch = training or module._buffers.get("running_mean") is None
    return type(module) in OF_THE_INPUT or (type(module) in OF_THE_BATCH and of_the_batch)
