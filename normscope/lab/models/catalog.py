"""Networks by name, fitted to a data set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.datasets.split import Split
from normscope.lab.models.mlp import mlp
from normscope.lab.models.resnet18 import resnet18

IMAGE_NETWORKS: dict[str, Callable[..., nn.Module]] = {"resnet18": resnet18}
NETWORKS = ("mlp", *IMAGE_NETWORKS)


def build(
    name: str, split: Split, normalizer: str, generator: torch.Generator | None = None, **options: Any
) -> tuple[nn.Module, Split]:
    """The network `name` for the samples and classes of `split`, and the split as the network takes it."""
    if name == "mlp":
        inputs = math.prod(split.sample_shape)
        return mlp(inputs=inputs, classes=split.classes, normalizer=normalizer, generator=generator, **options), split
    if name not in IMAGE_NETWORKS:
        raise InputError(f"no network {name!r}: choose from {', '.join(NETWORKS)}")
    network = IMAGE_NETWORKS[name](classes=split.classes, normalizer=normalizer, generator=generator, **options)
    return network, split.as_rgb()
