"""Statistics of what enters a layer, as one small tensor that stays on the device."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normscope._watch.columns import GAIN_METRICS, INPUT_METRICS
from normscope._watch.layers import NORMALIZING, PLAIN, RECTIFYING
from normscope.rules.normalizers import Normalizer, gains

UNKNOWN = float("nan")
ENTRIES, MASSIVE = 4096, 1000.0  # Sun et al. 2024: a massive activation is about a thousand times the median
RUNNING = ("running_mean", "running_var")


def input_statistics(module: nn.Module, value: torch.Tensor, channel_axis: int, known: Normalizer | None = None) -> torch.Tensor:
    """INPUT_METRICS of `value` on its way into a normalizer or an activation.

    Variances are those that the layer divides by: one per channel over batch and positions for BN and for an activation,
    one per normalized set (a sample, a token, a group) for LN, GN, IN and RMSNorm. known: a normalizer written by hand.
    """
    value = value.detach()
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    normalizer = known if known is not None else as_normalizer(module, value.dim())
    axis = 1 if isinstance(module, (_BatchNorm, _InstanceNorm, nn.GroupNorm)) else channel_axis
    if normalizer is None or normalizer.kind == "batch":
        mean, variance = moments(channels_second(value, axis))
    else:
        mean, variance = moments(sets_second(normalizer, value))
        if normalizer.kind in ("rms", "l2"):
            variance = variance + mean.square()
        if normalizer.kind == "l2":
            variance = variance * (value.numel() // len(variance))
    spread = [variance.mean(), variance.min(), variance.median(), variance.max()]
    running = [value.new_full((), UNKNOWN)] * 2
    measured = value.new_full((len(GAIN_METRICS),), UNKNOWN)
    if normalizer is not None:
        if isinstance(module, _BatchNorm) and module._buffers.get("running_var") is not None:
            running = running_mismatch(module, normalizer.epsilon, mean, variance)
        measured = normalizer_gains(normalizer, value, variance, "parametrizations" in module._modules)
    rest = [dead_fraction(module, value, axis), *running, value.new_full((), batch_size(module, normalizer, len(value)))]
    return torch.cat([torch.stack([*spread, *magnitudes(value, axis), *rest]).to(value.dtype), measured.to(value.dtype)])


assert INPUT_METRICS[-len(GAIN_METRICS) :] == GAIN_METRICS


def as_normalizer(module: nn.Module, rank: int) -> Normalizer | None:
    """A normalizing module in the form that the rules use, for inputs of `rank` axes; None where a class of the user's computes
    what torch's has as an attribute. Nothing of it is run: not a property, not a parametrization.
    """
    own, weight, bias = vars(module), *(module._parameters.get(name) for name in ("weight", "bias"))
    if not isinstance(module, NORMALIZING) or not own.keys() >= _attributes(module):
        return None
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        kind, axes = ("batch", (0, *range(2, rank))) if isinstance(module, _BatchNorm) else ("instance", tuple(range(2, rank)))
        normalizer = Normalizer(kind, own["eps"], weight, bias, axes)
        running_mean, running_variance = (module._buffers.get(name) for name in RUNNING)
        if own["training"] or running_variance is None:
            return normalizer
        return replace(normalizer, running_mean=running_mean, running_variance=running_variance.clone())
    if isinstance(module, nn.GroupNorm):
        return Normalizer("group", own["eps"], weight, bias, tuple(range(2, rank)), own["num_groups"])
    axes = tuple(range(rank - len(own["normalized_shape"]), rank))
    if isinstance(module, nn.LayerNorm):
        return Normalizer("layer", own["eps"], weight, bias, axes)
    default = torch.finfo(torch.float32 if weight is None or weight.dtype != torch.float64 else torch.float64).eps
    return Normalizer("rms", default if own["eps"] is None else own["eps"], weight, None, axes)


def _attributes(module: nn.Module) -> set[str]:
    shape = {"num_groups"} if isinstance(module, nn.GroupNorm) else {"normalized_shape"}
    return {"eps", "training"} | (set() if isinstance(module, (_BatchNorm, _InstanceNorm)) else shape)


def channels_second(value: torch.Tensor, axis: int) -> torch.Tensor:
    """(rows, channels, positions)."""
    if value.dim() < 2:
        return value.reshape(1, 1, -1)
    if axis % value.dim() == value.dim() - 1:
        return value.reshape(-1, value.shape[-1], 1)
    return value.flatten(2) if value.dim() > 2 else value[:, :, None]


def sets_second(normalizer: Normalizer, value: torch.Tensor) -> torch.Tensor:
    """(1, sets, entries): the sets in the order (samples, groups), so that a reshape gives them back."""
    if normalizer.kind == "group":
        return value.reshape(1, value.shape[0] * normalizer.groups, -1)
    if normalizer.axes != tuple(range(value.dim() - len(normalizer.axes), value.dim())):
        value = value.movedim(normalizer.axes, tuple(range(-len(normalizer.axes), 0)))
    return value.flatten(-len(normalizer.axes)).reshape(1, -1, value.shape[-len(normalizer.axes) :].numel())


def moments(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population variance over axes 0 and 2, in two passes over the data."""
    if value.device.type in ("cpu", "cuda") and value.numel():
        mean, variance = torch.batch_norm_update_stats(value, None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(value, (0, 2), correction=0)
    return mean, variance


def normalizer_gains(
    normalizer: Normalizer, value: torch.Tensor, variance: torch.Tensor, is_computed: bool = False
) -> torch.Tensor:
    """GAIN_METRICS; for sets, the smallest variance of each channel or group, and the mean of all.

    NaN where γ is in shards, or is_computed by a parametrization, which would have to run again.
    """
    if is_computed or (normalizer.weight is not None and type(normalizer.weight) not in PLAIN):
        return value.new_full((len(GAIN_METRICS),), UNKNOWN)
    if normalizer.running_variance is not None:
        fixed = normalizer.running_variance.to(value)
        return gains(normalizer, fixed, fixed.mean())
    if normalizer.kind == "batch":
        return gains(normalizer, variance, variance.mean())
    columns = {"group": normalizer.groups, "instance": value.shape[1]}.get(normalizer.kind, 1)
    smallest = variance.reshape(-1, columns).amin(0)
    return gains(normalizer, smallest, variance.mean(), value.numel() // len(variance))


def running_mismatch(module: _BatchNorm, epsilon: float, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
    """How far the running statistics are from this batch: √mean((μ_b − μ_r)²/(v_r + ε)) and mean|ln((v_b + ε)/(v_r + ε))|."""
    running_mean, running_variance = (module._buffers[name] for name in RUNNING)
    assert running_mean is not None and running_variance is not None
    scale = running_variance.to(mean) + epsilon
    shift = ((mean - running_mean.to(mean)).square() / scale).mean().sqrt()
    return [shift, ((variance + epsilon) / scale).log().abs().mean()]


def batch_size(module: nn.Module, normalizer: Normalizer | None, samples: int) -> float:
    """Samples that batch statistics are made of; NaN for other normalizers, and for those that share them between processes."""
    own = normalizer is not None and normalizer.kind == "batch" and normalizer.running_variance is None
    return float(samples) if own and not isinstance(module, nn.SyncBatchNorm) else UNKNOWN


def magnitudes(value: torch.Tensor, axis: int) -> list[torch.Tensor]:
    """MAGNITUDES: max |x| (NaN if there is one), the 99th percentile of |x|, the share of channels that reach MASSIVE × its median.

    Percentile and median are of some thousand entries, evenly chosen from all channels.
    """
    channels = channels_second(value, axis)
    high = torch.maximum(channels.amax((0, 2)), -channels.amin((0, 2)))
    stride = max(1, value.numel() // ENTRIES)
    while math.gcd(stride, math.prod(value.shape[1:])) > 1:
        stride += 1
    chosen = value.reshape(-1)[::stride].abs()
    p99 = chosen.kthvalue(math.ceil(0.99 * len(chosen))).values
    return [high.max(), p99, (high > MASSIVE * chosen.median()).to(value.dtype).mean()]


def dead_fraction(module: nn.Module, value: torch.Tensor, axis: int) -> torch.Tensor:
    """The part of a rectifier's units (channels) that no entry of the batch activates."""
    if not isinstance(module, RECTIFYING):
        return value.new_full((), UNKNOWN)
    threshold = vars(module).get("threshold", UNKNOWN) if isinstance(module, nn.Threshold) else 0.0
    return (channels_second(value, axis).amax((0, 2)) <= threshold).to(value.dtype).mean()
