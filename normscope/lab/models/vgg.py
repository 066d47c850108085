"""A plain convolutional network in the manner of VGG (Simonyan & Zisserman 2015), with any normalizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from normscope.lab.models.layers import convolution, follows_bias, initialize, linear
from normscope.lab.models.normalizers import normalizer as normalizer_of


def vgg(
    classes: int = 10,
    normalizer: str = "batch",
    widths: Sequence[Sequence[int]] = ((64,), (128,), (256, 256), (512, 512)),
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Stages of 3×3 convolutions, each followed by a normalizer and a ReLU, with 2×2 max-pools between the stages.

    >>> vgg(widths=((8,), (16,)))(torch.zeros(5, 3, 8, 8)).shape
    torch.Size([5, 10])
    """
    layers: list[nn.Module] = []
    before = 3
    for stage, channels in enumerate(widths):
        layers += [nn.MaxPool2d(2)] if stage else []
        for width in channels:
            layers += [convolution(before, width, 3, bias=follows_bias(normalizer)), normalizer_of(normalizer, width, 2), nn.ReLU()]
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(before, classes)]
    model = nn.Sequential(*(layer for layer in layers if not isinstance(layer, nn.Identity)))
    initialize(model, normalizer, generator)
    return model
