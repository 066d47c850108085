"""EfficientNet-B3 (Tan & Le 2019), with any normalizer; its parameters have torchvision's names, so its weights load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from normscope.lab.models.layers import convolution, follows_bias, initialize, linear
from normscope.lab.models.normalizers import normalizer as normalizer_of


@dataclass(frozen=True)
class Stage:
    """`blocks` inverted residual blocks of one width; the first of them has the stride."""

    expansion: int
    kernel: int
    stride: int
    width: int
    blocks: int


STEM, HEAD = 40, 1536  # channels
STAGES = (  # B0's, with width times 1.2 (to a multiple of 8) and depth times 1.4 (rounded up)
    Stage(1, 3, 1, 24, 2),
    Stage(6, 3, 2, 32, 3),
    Stage(6, 5, 2, 48, 3),
    Stage(6, 3, 2, 96, 5),
    Stage(6, 5, 1, 136, 5),
    Stage(6, 5, 2, 232, 6),
    Stage(6, 3, 1, 384, 2),
)
SQUEEZE = 4  # a block's input channels for one of its gate


class Gate(nn.Module):
    """x · sigmoid(fc2(silu(fc1(mean of x)))): one factor per channel (squeeze and excite)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = convolution(channels, squeezed, 1, bias=True)
        self.activation = nn.SiLU()
        self.fc2 = convolution(squeezed, channels, 1, bias=True)
        self.scale_activation = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors: torch.Tensor = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return factors * x


class InvertedResidual(nn.Module):
    """project(gate(depthwise(expand(x)))), added to x where the shape stays; a normalizer after every convolution."""

    def __init__(self, inputs: int, stage: Stage, stride: int, normalizer: str) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        layers: list[nn.Module] = [_unit(inputs, hidden, 1, normalizer=normalizer)] if stage.expansion > 1 else []
        layers.append(_unit(hidden, hidden, stage.kernel, stride, hidden, normalizer))
        layers.append(Gate(hidden, max(1, inputs // SQUEEZE)))
        layers.append(_unit(hidden, stage.width, 1, normalizer=normalizer, activation=False))
        self.block = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == stage.width

    @property
    def branch_end(self) -> nn.Module:
        end = self.block[-1]
        assert isinstance(end, nn.Sequential)
        return end[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return x + y if self.residual else y


def efficientnet_b3(classes: int = 1000, normalizer: str = "batch", generator: torch.Generator | None = None) -> nn.Module:
    """EfficientNet-B3 for RGB images: 78 normalizers; without its dropout and stochastic depth, so that training is reproducible.

    generator: of the weights (He-normal, fan-out); without one they are the same every time.
    """
    features: list[nn.Module] = [_unit(3, STEM, 3, 2, normalizer=normalizer)]
    before = STEM
    for stage in STAGES:
        blocks = []
        for index in range(stage.blocks):
            blocks.append(InvertedResidual(before, stage, stage.stride if index == 0 else 1, normalizer))
            before = stage.width
        features.append(nn.Sequential(*blocks))
    features.append(_unit(before, HEAD, 1, normalizer=normalizer))
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*features))
    model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", nn.Sequential(nn.Identity(), linear(HEAD, classes)))  # torchvision has dropout first
    initialize(model, normalizer, generator)
    return model


def _unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, normalizer: str = "batch", activation: bool = True
) -> nn.Sequential:
    """Convolution, normalizer and SiLU."""
    first = convolution(inputs, outputs, kernel, stride, groups, bias=follows_bias(normalizer))
    return nn.Sequential(first, normalizer_of(normalizer, outputs, 2), *([nn.SiLU()] if activation else []))
