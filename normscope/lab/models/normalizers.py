"""One factory for every normalizer, so that networks can differ in nothing else."""

from __future__ import annotations

import torch
from torch import nn

from normscope.core.errors import InputError

NORMALIZERS = ("none", "batch", "layer", "group", "instance", "rms")
GROUPS = 32  # of GroupNorm, at most
EPSILON = 1e-5


class ChannelRMSNorm(nn.Module):
    """γ_c · x_c / √(mean_c x_c² + ε) at every position of (batch, channels, …)."""

    def __init__(self, channels: int, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(1, keepdim=True) + self.epsilon)
        return x * scale * self.weight.reshape(-1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, epsilon={self.epsilon}"


def normalizer(name: str, channels: int, spatial_axes: int = 0) -> nn.Module:
    """The normalizer `name` for features of shape (batch, channels, and `spatial_axes` more), with γ = 1 and β = 0.

    >>> type(normalizer("batch", 64, spatial_axes=2)).__name__
    'BatchNorm2d'

    layer: over all entries of a sample, γ one number a channel. rms: over the channels at each position.
    """
    if name not in NORMALIZERS:
        raise InputError(f"no normalizer {name!r}: choose from {', '.join(NORMALIZERS)}")
    if not 0 <= spatial_axes <= 3:
        raise InputError(f"features have 0 to 3 spatial axes, not {spatial_axes}")
    if name == "none":
        return nn.Identity()
    if name == "batch":
        return (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[spatial_axes](channels, eps=EPSILON)
    if name == "layer":
        return nn.GroupNorm(1, channels, eps=EPSILON) if spatial_axes else nn.LayerNorm(channels, eps=EPSILON)
    if name == "group":
        return nn.GroupNorm(_groups(channels, 2 if spatial_axes else 16), channels, eps=EPSILON)
    if name == "rms":
        return ChannelRMSNorm(channels) if spatial_axes else nn.RMSNorm(channels, eps=EPSILON)
    if spatial_axes == 0:
        others = ", ".join(other for other in NORMALIZERS if other != "instance")
        raise InputError(f"instance normalization needs spatial axes, which these features lack: choose from {others}")
    return (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[spatial_axes - 1](channels, eps=EPSILON, affine=True)


def _groups(channels: int, smallest: int) -> int:
    """The most groups of equal size, each of at least `smallest` channels: too few entries have no spread."""
    return max(
        groups for groups in range(1, GROUPS + 1) if groups == 1 or (channels % groups == 0 and channels // groups >= smallest)
    )
