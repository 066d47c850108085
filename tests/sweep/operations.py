"""What a random program may do: torch functions with rare arguments, in-place writes and aliases among them.

Each maker takes the random choices, the tensor at hand and a source of parameters, and returns a function of one tensor (or
of two of one shape). A maker may return what does not run on that tensor: the program then tries another.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sweep.choices import Joint, Maker, Step, any_axis, any_indices, any_mask, any_number, any_slice
from tests.sweep.layers import (
    batch_norm,
    convolution,
    convolution_module,
    group_norm,
    handmade_norm,
    layer_norm,
    linear,
    mix_other_axis,
    transposed_convolution,
)
from tests.sweep.writes import write

# entrywise -------------------------------------------------------------------------------------------------------------

ENTRYWISE: list[Step] = [
    torch.relu, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.abs, torch.atan, F.silu, F.mish, F.gelu, F.softsign, F.selu,
    F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.logsigmoid, F.tanhshrink, torch.erf, torch.asinh, torch.exp, torch.square,
    torch.expm1, torch.sinc, torch.neg, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.erfc, torch.sinh, torch.frac,
    torch.round, torch.sign, torch.floor, lambda x: F.gelu(x, approximate="tanh"), lambda x: x.pow(3), lambda x: x**2, lambda x: 1 / (1 + x * x),
    lambda x: torch.log(1 + x.abs()), lambda x: x.clamp(min=0).sqrt(), lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x * (x > 0),
    lambda x: torch.maximum(x, torch.zeros_like(x)), lambda x: x * torch.ones_like(x), lambda x: torch.nan_to_num(x), lambda x: torch.atan2(x, 1 + x * x),
    lambda x: x + x.detach(), lambda x: 2 ** x, lambda x: torch.logaddexp(x, -x), lambda x: torch.heaviside(x, x), lambda x: x.abs().pow(1.5),
]  # fmt: skip


def entrywise(draw, x, parameter):
    return draw(*ENTRYWISE)


def entrywise_with_arguments(draw, x, parameter):
    a, b = sorted((any_number(draw), any_number(draw)))
    limits = parameter(*x.shape[draw(*range(1, x.dim())) :])
    slope = parameter(draw(1, x.shape[1]))
    beta, threshold, exponent = draw(1, 1, 0.5, 5.0), draw(20, 20, 40), draw(0.5, 1, 0, 4, -1)
    return draw(
        lambda x: x.clamp(a, b), lambda x: x.clamp(min=limits()), lambda x: torch.clamp(x, max=limits()), lambda x: F.leaky_relu(x, a),
        lambda x: F.elu(x, abs(a)), lambda x: F.celu(x, 0.5 + abs(b)), lambda x: F.softplus(x, beta, threshold), lambda x: F.threshold(x, a, a),
        lambda x: F.threshold(x, a, b), lambda x: F.hardshrink(x, abs(a)), lambda x: F.softshrink(x, abs(a)), lambda x: F.hardtanh(x, a, b + 1),
        lambda x: F.prelu(x, slope()), lambda x: torch.fmod(x, 1 + abs(b)), lambda x: x.lerp(torch.ones_like(x), a), lambda x: x.pow(exponent),
        lambda x: torch.minimum(x, limits()), lambda x: F.rrelu(x, 0.1, 0.3), lambda x: F.alpha_dropout(x, 0.5, False),
    )  # fmt: skip


def arithmetic(draw, x, parameter):
    a, b = any_number(draw), any_number(draw)
    other = parameter(*x.shape[draw(*range(1, x.dim())) :])
    rounding = draw(None, None, "floor")
    wider = parameter(draw(1, 3), *x.shape[1:]) if x.dim() < 4 else other
    return draw(
        lambda x: x * a, lambda x: a - x, lambda x: x + b, lambda x: (x + 1e8) - 1e8, lambda x: x * a * (1 / a if a else 1), lambda x: x / (a or 1),
        lambda x: x * other(), lambda x: other() * x + other(), lambda x: x - other(), lambda x: x / (other().abs() + 0.5), lambda x: torch.rsub(x, a),
        lambda x: torch.add(x, other(), alpha=a), lambda x: torch.addcmul(x, other(), x, value=b), lambda x: torch.addcdiv(x, x, 1 + other().abs(), value=a),
        lambda x: x.unsqueeze(1) * wider(), lambda x: x.true_divide(3), lambda x: torch.div(x, 2.0, rounding_mode=rounding),
        lambda x: torch.ldexp(x, torch.tensor(3)), lambda x: x + torch.arange(x.shape[-1], dtype=x.dtype), lambda x: x * x.shape[-1] ** -0.5,
    )  # fmt: skip


# reductions and pools --------------------------------------------------------------------------------------------------


def reduction(draw, x, parameter):
    axis, keep = any_axis(draw, x), draw(True, False)
    several = tuple(draw.random.sample(range(1, x.dim()), draw(*range(1, x.dim()))))
    k = draw(*range(1, x.shape[axis] + 1))
    p = draw(2, 1, math.inf, -math.inf, 0.5, 3.0, 0)
    return draw(
        lambda x: x.sum(several, keepdim=keep), lambda x: x.mean(several, keepdim=keep), lambda x: x.amax(several, keepdim=keep),
        lambda x: x.amin(several, keepdim=keep), lambda x: x.max(axis, keepdim=keep)[0], lambda x: x.min(axis, keepdim=keep).values,
        lambda x: x.logsumexp(several, keepdim=keep), lambda x: torch.linalg.vector_norm(x, p, several, keepdim=keep), lambda x: x.norm(p, axis, keepdim=keep),
        lambda x: x.cumsum(axis), lambda x: x.cumprod(axis), lambda x: x.cummax(axis)[0], lambda x: x.prod(axis, keepdim=keep),
        lambda x: x.var(several, keepdim=keep), lambda x: x.std(axis, unbiased=False, keepdim=keep), lambda x: x.median(axis, keepdim=keep)[0],
        lambda x: x.sort(axis, descending=keep)[0], lambda x: x.topk(k, axis)[0], lambda x: x.kthvalue(k, axis, keepdim=keep)[0],
        lambda x: x.aminmax(dim=axis, keepdim=keep)[0], lambda x: torch.diff(x, dim=axis), lambda x: x.softmax(axis), lambda x: x.log_softmax(axis),
        lambda x: F.softmin(x, axis), lambda x: F.softmax(x, axis, dtype=x.dtype), lambda x: x.sum(several, keepdim=keep, dtype=x.dtype),
        lambda x: F.glu(x, axis), lambda x: torch.logcumsumexp(x, axis), lambda x: x.mean(dim=several, keepdim=True) + x, lambda x: x.flatten(1).mean(1, keepdim=True),
        lambda x: torch.var_mean(x, several, keepdim=keep)[1], lambda x: x.argmax(axis, keepdim=True).to(x.dtype) * 0 + x.sum(axis, keepdim=True),
    )  # fmt: skip


def pool(draw, x, parameter):
    n = x.dim() - 2
    if n not in (1, 2):
        raise ValueError
    kernel, stride = draw(1, 2, 3), draw(1, 2, 3)
    padding, ceil = draw(0, kernel // 2), draw(True, False)
    maximum, average = ((F.max_pool1d, F.avg_pool1d), (F.max_pool2d, F.avg_pool2d))[n - 1]
    size = draw(1, 2, 3)
    dilation = draw(1, 1, 2)
    choices = [
        lambda x: maximum(x, kernel, stride, padding, dilation, ceil), lambda x: average(x, kernel, stride, padding, ceil, include),
        lambda x: (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[n - 1](x, size), lambda x: (F.adaptive_max_pool1d, F.adaptive_max_pool2d)[n - 1](x, size),
        lambda x: (F.lp_pool1d, F.lp_pool2d)[n - 1](x, 2.0, kernel, stride, ceil),
    ]  # fmt: skip
    include, divisor = draw(True, False), draw(-1, 2, 7)
    if n == 2:
        choices.append(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, include, divisor))
    return draw(*choices)


def resample(draw, x, parameter):
    n = x.dim() - 2
    if n not in (1, 2):
        raise ValueError
    modes = [["nearest", "linear", "area", "nearest-exact"], ["nearest", "bilinear", "bicubic", "area", "nearest-exact"]][n - 1]
    mode = draw(*modes)
    corners = draw(True, False) if mode in ("linear", "bilinear", "bicubic") else None
    if draw.chance(0.5):
        factor = draw(0.5, 1.03, 1.5, 2.0, 2.7)
        return lambda x: F.interpolate(x, scale_factor=factor, mode=mode, align_corners=corners)
    size = [draw(*range(1, 2 * s + 2)) for s in x.shape[2:]]
    return lambda x: F.interpolate(x, size=size, mode=mode, align_corners=corners)


# shapes ----------------------------------------------------------------------------------------------------------------


def shape(draw, x, parameter):
    axis, other = any_axis(draw, x), any_axis(draw, x)
    size = x.shape[axis]
    indices, permutation = any_indices(draw, size), draw.random.sample(range(1, x.dim()), x.dim() - 1)
    window, span = draw(*range(1, size + 1)), any_slice(draw, size)
    mask, lines = any_mask(draw, x), torch.rand(size, generator=draw.generator) < 0.6
    repeats = torch.randint(0, 3, (size,), generator=draw.generator)
    pick = torch.randint(0, size, x.shape[1:], generator=draw.generator)
    amount = [draw(-1, 0, 1, 2) for _ in range(2 * draw(1, min(2, x.dim() - 1)))]
    count = draw(2, 3)
    value, mode = draw(0.0, 0.375, 1.5, -1e3), draw("reflect", "replicate", "circular")
    return draw(
        lambda x: x.flatten(1), lambda x: x.transpose(axis, other), lambda x: x.permute(0, *permutation), lambda x: x.flip(axis), lambda x: x.roll(window, axis),
        lambda x: x.index_select(axis, indices), lambda x: x.narrow(axis, span.start, span.stop - span.start), lambda x: x.movedim(axis, other),
        lambda x: x.take_along_dim(pick.expand(x.shape[0], *pick.shape), axis), lambda x: x.gather(axis, pick.expand(x.shape[0], *pick.shape)),
        lambda x: torch.cat([x, -x, x], axis), lambda x: torch.stack([x, 2 * x], axis), lambda x: x.unsqueeze(axis).expand(*x.unsqueeze(axis).shape).contiguous(),
        lambda x: x.unsqueeze(1).expand(-1, count, *x.shape[1:]), lambda x: x.repeat(1, *[count] * (x.dim() - 1)), lambda x: x.repeat_interleave(count, axis),
        lambda x: x.repeat_interleave(repeats, axis), lambda x: x.unfold(axis, window, 1), lambda x: F.pad(x, amount), lambda x: F.pad(x, amount, value=value),
        lambda x: F.pad(x, [abs(a) for a in amount], mode=mode), lambda x: x.tril(), lambda x: x.triu(1), lambda x: x.diagonal(0, axis, other),
        lambda x: x.masked_fill(mask, value), lambda x: torch.where(mask, x, value), lambda x: x[:, lines] if axis in (1, 1 - x.dim()) else x[..., :1],
        lambda x: x[:, span.start :: span.step], lambda x: x[..., None], lambda x: x[:, None, ..., -1], lambda x: x[:, indices[0] % x.shape[1]].reshape(x.shape[0], -1),
        lambda x: x.reshape(x.shape[0], -1, *factors(x[0].numel())), lambda x: x.chunk(2, axis)[-1], lambda x: x.split(window, axis)[0], lambda x: x.unbind(axis)[0].reshape(x.shape[0], -1),
        lambda x: x.swapaxes(axis, other).contiguous(), lambda x: x.ravel().reshape(x.shape), lambda x: torch.broadcast_tensors(x, x[:, :1])[0], lambda x: x.rot90(1, (axis, other)),
        lambda x: x.new_zeros(x.shape) + x, lambda x: torch.zeros(x.shape[0], size, *x.shape[1:], dtype=x.dtype).scatter(1, pick_for(pick, x, size), x.unsqueeze(1)),
        lambda x: torch.zeros_like(x).index_add(axis, indices[: 1].expand(size), x), lambda x: torch.zeros_like(x).index_copy(axis, torch.arange(size).flip(0), x),
        lambda x: torch.zeros_like(x).scatter_add(axis, pick.expand(x.shape[0], *pick.shape), x), lambda x: x.index_fill(axis, indices[:1], value), lambda x: x.squeeze(),
        lambda x: F.pixel_shuffle(x, 2), lambda x: F.channel_shuffle(x, 2), lambda x: F.unfold(x, 2), lambda x: torch.hstack([x, x]), lambda x: torch.tile(x, (1, count)),
        lambda x: x.clone(), lambda x: x.contiguous(), lambda x: x.view(x.shape[0], -1), lambda x: x.mT, lambda x: torch.atleast_3d(x),
    )  # fmt: skip


def factors(numbers: int) -> tuple[int, ...]:
    """Two numbers whose product divides `numbers`."""
    return next(((p,) for p in (3, 2, 5) if numbers % p == 0), (1,))


def pick_for(pick: Tensor, x: Tensor, size: int) -> Tensor:
    return (pick % size).expand(x.shape[0], *pick.shape).unsqueeze(1)


# two tensors -----------------------------------------------------------------------------------------------------------

JOINTS: list[Joint] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.hypot, torch.atan2, torch.fmax, torch.logaddexp,
    lambda x, y: x + 0.5 * y, lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, y], 1), lambda x, y: x / (1 + y.abs()),
    lambda x, y: x * torch.sigmoid(y), lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, y, y), lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.clamp(x, max=y), lambda x, y: x * torch.clamp(x, max=y), lambda x, y: F.cosine_similarity(x, y, dim=1).unsqueeze(1),
    lambda x, y: (x.flatten(1) * y.flatten(1)).sum(1, keepdim=True), lambda x, y: x.flatten(1).unsqueeze(2) * y.flatten(1).unsqueeze(1),
    lambda x, y: torch.einsum("bi,bj->bij", x.flatten(1), y.flatten(1)), lambda x, y: torch.cdist(x.flatten(1).unsqueeze(2), y.flatten(1).unsqueeze(2)),
    lambda x, y: torch.where(torch.arange(x.shape[-1]) % 2 == 0, x, y), lambda x, y: F.softmax(x, -1) * y, lambda x, y: x.tanh() * y.tanh(),
    lambda x, y: torch.bmm(x.flatten(2), y.flatten(2).mT) if x.dim() > 2 else x - y, lambda x, y: x * 1e-3 + y.detach() * 0 + y,
    lambda x, y: F.scaled_dot_product_attention(x.flatten(2), y.flatten(2), x.flatten(2)) if x.dim() > 2 else x * y,
    lambda x, y: (F.softmax(x.flatten(2) @ y.flatten(2).mT, -1) @ y.flatten(2)) if x.dim() > 2 else torch.linalg.vector_norm(x - y, dim=-1, keepdim=True),
]  # fmt: skip

MAKERS: list[tuple[float, Maker]] = [
    (3, linear), (1, mix_other_axis), (2, convolution), (0.7, transposed_convolution), (0.5, convolution_module), (1, layer_norm), (0.5, group_norm), (0.7, batch_norm),
    (1, handmade_norm), (3, entrywise), (2, entrywise_with_arguments), (2, arithmetic), (2, reduction), (0.8, pool), (0.6, resample), (3, shape), (2, write),
]  # fmt: skip

MIXING: list[Step] = [
    lambda x: x + x.roll(1, 0), lambda x: x + 1e-3 * x.roll(2, 0), lambda x: x - x.mean(0, keepdim=True), lambda x: x.flip(0), lambda x: x.cumsum(0), lambda x: x.softmax(0),
    lambda x: torch.fmax(x, x.flip(0)), lambda x: x * x.shape[0], lambda x: x.sort(0)[0], lambda x: x / x.amax(), lambda x: x + 1e-6 * x.sum(), lambda x: x.reshape(-1).roll(1).reshape(x.shape),
    lambda x: F.batch_norm(x, None, None, training=True), lambda x: x.transpose(0, 1).flatten().reshape(x.shape), lambda x: x - x[:1],
]  # fmt: skip
