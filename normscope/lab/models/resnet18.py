"""ResNet-18 (He et al. 2016), with any normalizer; its parameters have torchvision's names, so its weights load."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.models.layers import convolution, follows_bias, initialize, linear
from normscope.lab.models.normalizers import normalizer as normalizer_of

STEMS = ("imagenet", "small")
WIDTHS = (64, 128, 256, 512)  # of the four stages, two blocks each


class Block(nn.Module):
    """relu(x + no(conv(relu(no(conv(x)))))), with a 1×1 convolution on x where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalizer: str) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, 3, stride, bias=follows_bias(normalizer))
        self.bn1 = normalizer_of(normalizer, outputs, 2)
        self.conv2 = convolution(outputs, outputs, 3, bias=follows_bias(normalizer))
        self.bn2 = normalizer_of(normalizer, outputs, 2)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, 1, stride, bias=follows_bias(normalizer)), normalizer_of(normalizer, outputs, 2)
            )

    @property
    def branch_end(self) -> nn.Module:
        return self.conv2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(branch)) + self.downsample(x))


def resnet18(
    classes: int = 1000, normalizer: str = "batch", stem: str = "imagenet", generator: torch.Generator | None = None
) -> nn.Sequential:
    """ResNet-18 for RGB images: 20 normalizers, those of the three downsampling shortcuts included.

    stem: "imagenet", a 7×7 convolution and a max-pool, each of stride 2; "small", one 3×3 convolution of stride 1, for
    images of 32×32. generator: of the weights (He-normal, fan-out); without one they are the same every time.
    """
    if stem not in STEMS:
        raise InputError(f"no stem {stem!r}: choose from {', '.join(STEMS)}")
    large = stem == "imagenet"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = convolution(3, WIDTHS[0], 7 if large else 3, 2 if large else 1, bias=follows_bias(normalizer))
    layers["bn1"] = normalizer_of(normalizer, WIDTHS[0], 2)
    layers["relu"] = nn.ReLU()
    if large:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    before = WIDTHS[0]
    for stage, width in enumerate(WIDTHS, start=1):
        first = Block(before, width, 1 if stage == 1 else 2, normalizer)
        layers[f"layer{stage}"] = nn.Sequential(first, Block(width, width, 1, normalizer))
        before = width
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = linear(before, classes)
    model = nn.Sequential(layers)
    initialize(model, normalizer, generator)
    return model
