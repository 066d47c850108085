"""One factory for every normalizer, so that networks can differ in nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from normscope.core.errors import InputError

LAYERS = ("batch", "layer", "group", "instance", "rms", "renorm")  # of their own, after a linear map
NORMALIZERS = ("none", *LAYERS, "weight", "spectral", "scaled")
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


class BatchRenorm(_BatchNorm):
    """Batch renormalization (Ioffe 2017): in training γ((x − μ_B)/σ_B · r + d) + β, in eval mode BN with running statistics.

    r = σ_B/σ within [1/3, 3] and d = (μ_B − μ)/σ within [−5, 5] are constants to the gradient, with μ, σ the running
    statistics. Both limits open linearly over the first `warm_up` batches, in which it starts as BN.
    """

    largest_r, largest_d, warm_up = 3.0, 5.0, 1000

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InputError(f"batch renormalization takes (batch, channels, …), got {input.dim()} axes")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        if not self.training:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        axes = (0, *range(2, input.dim()))
        shape = (1, -1, *[1] * (input.dim() - 2))
        variance, mean = torch.var_mean(input, axes, correction=0)
        deviation = (variance + self.eps).sqrt()
        with torch.no_grad():
            opened = min(float(self.num_batches_tracked) / self.warm_up, 1.0)
            r_limit, d_limit = 1 + (self.largest_r - 1) * opened, self.largest_d * opened
            running = (self.running_var + self.eps).sqrt()
            r = (deviation / running).clamp(1 / r_limit, r_limit)
            d = ((mean - self.running_mean) / running).clamp(-d_limit, d_limit)
            share = 0.1 if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance, share)
            self.num_batches_tracked.add_(1)
        scale = self.weight * r / deviation
        shift = self.weight * (d - mean * r / deviation) + self.bias
        return input * scale.reshape(shape) + shift.reshape(shape)


def has_layer(name: str) -> bool:
    """Whether the normalizer is a layer of its own, and not a change of the weights or nothing."""
    return name in LAYERS


def token_normalizer(name: str, channels: int) -> nn.Module:
    """The normalizer `name` for (batch, tokens, channels): over a token's channels; batch and renorm over batch and tokens."""
    if name in ("batch", "renorm"):
        return AlongTokens(normalizer(name, channels, 1))
    if name == "group":
        return EachToken(normalizer(name, channels))
    return normalizer(name, channels)


class AlongTokens(nn.Module):
    """A normalizer of (batch, channels, positions) on (batch, tokens, channels)."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.normalizer(x.transpose(1, 2)).transpose(1, 2)
        return y


class EachToken(nn.Module):
    """A normalizer of (batch, channels) on every token of (batch, tokens, channels)."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.normalizer(x.flatten(0, 1)).reshape(x.shape)
        return y


def normalizer(name: str, channels: int, spatial_axes: int = 0) -> nn.Module:
    """The normalizer `name` for features of shape (batch, channels, and `spatial_axes` more), with γ = 1 and β = 0.

    >>> type(normalizer("batch", 64, spatial_axes=2)).__name__
    'BatchNorm2d'

    layer: over all entries of a sample, γ one number per channel. rms: over the channels at each position. renorm: batch
    renormalization. none, weight, spectral and scaled have no layer: the last three change weights, see `initialize`.
    """
    if name not in NORMALIZERS:
        raise InputError(f"no normalizer {name!r}: choose from {', '.join(NORMALIZERS)}")
    if not 0 <= spatial_axes <= 3:
        raise InputError(f"features must have 0 to 3 spatial axes, got {spatial_axes}")
    if not has_layer(name):
        return nn.Identity()
    if name == "batch":
        return (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[spatial_axes](channels, eps=EPSILON)
    if name == "renorm":
        return BatchRenorm(channels, eps=EPSILON)
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
