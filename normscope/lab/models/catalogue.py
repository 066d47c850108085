"""Networks by name, fitted to a data set."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.datasets.split import Split
from normscope.lab.models.efficientnet import efficientnet_b3
from normscope.lab.models.mlp import mlp
from normscope.lab.models.resnet18 import resnet18
from normscope.lab.models.transformer import gpt, vit
from normscope.lab.models.vgg import vgg


@dataclass(frozen=True)
class NetworkMaker:
    """A function that returns a module, what it takes from the data, and the data as the module takes it.

    channels_last: whether that memory format makes its convolutions faster.
    """

    make: Callable[..., nn.Module]
    fitted: Callable[[Split], dict[str, int]]
    prepared: Callable[[Split], Split]
    channels_last: bool = False

    def options(self) -> list[str]:
        """What an experiment may choose."""
        return [name for name in inspect.signature(self.make).parameters if name not in ("generator", "normalizer")]


def _check_fit(name: str, model: nn.Module, split: Split, normalizer: str) -> None:
    """One pass of two samples through a copy: torch refuses some normalizers on some shapes."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(split.train[0][:2])
    except (ValueError, RuntimeError) as error:
        shape = "×".join(map(str, split.sample_shape))
        raise InputError(f"{name} with normalizer {normalizer} cannot take samples of {shape}: {error}") from error


def _as_it_is(split: Split) -> Split:
    return split


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _classes(split: Split) -> dict[str, int]:
    return {"classes": split.classes}


NETWORKS = {
    "mlp": NetworkMaker(mlp, lambda split: {"inputs": math.prod(split.sample_shape), **_classes(split)}, _as_it_is),
    "resnet18": NetworkMaker(resnet18, _classes, Split.as_rgb),
    "efficientnet-b3": NetworkMaker(efficientnet_b3, _classes, Split.as_rgb, channels_last=True),
    "vgg": NetworkMaker(vgg, _classes, Split.as_rgb),
    "vit": NetworkMaker(vit, lambda split: {"size": split.sample_shape[-1], **_classes(split)}, Split.as_rgb),
    "gpt": NetworkMaker(gpt, lambda split: {"vocabulary": split.classes, "context": split.sample_shape[0]}, Split.as_tokens),
}


def build(
    name: str, split: Split, normalizer: str, generator: torch.Generator | None = None, **options: Any
) -> tuple[nn.Module, Split]:
    """The network `name` for the samples and classes of `split`, and the split as the network takes it."""
    if name not in NETWORKS:
        raise InputError(f"no network {name!r}: choose from {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    unknown = [option for option in options if option not in network.options()]
    if unknown:
        raise InputError(f"{name} has no option {', '.join(unknown)}: choose from {', '.join(network.options())}")
    split = network.prepared(split)
    model = network.make(**{**network.fitted(split), **options}, normalizer=normalizer, generator=generator)
    _check_fit(name, model, split, normalizer)
    if network.channels_last:
        return model.to(memory_format=torch.channels_last), split.map(_channels_last)
    return model, split
