"""Makers of layers: linear maps and normalizers, as modules, as functions and by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.sweep.choices import any_axis

# linear maps -----------------------------------------------------------------------------------------------------------


def linear(draw, x, parameter):
    out = draw.integer(1, 12)
    weight, bias = parameter(out, x.shape[-1]), parameter(out) if draw.chance(0.5) else (lambda: None)
    form = draw("linear", "matmul", "einsum", "addmm", "tensordot", "unfolded")
    if form == "linear":
        return lambda x: F.linear(x, weight(), bias())
    if form == "matmul":
        return lambda x: x @ weight().T
    if form == "einsum":
        return lambda x: torch.einsum("...i,oi->...o", x, weight())
    if form == "addmm" and x.dim() == 2:
        alpha, beta = draw(1, 1, -0.5, 2), draw(1, 0, 3)
        offset = parameter(out)
        return lambda x: torch.addmm(offset(), x, weight().t(), alpha=alpha, beta=beta)
    if form == "unfolded":  # one parameter read in overlapping windows
        line = parameter(x.shape[-1] + out - 1)
        return lambda x: F.linear(x, line().unfold(0, x.shape[-1], 1))
    return lambda x: torch.tensordot(x, weight(), dims=([x.dim() - 1], [1]))


def mix_other_axis(draw, x, parameter):
    axis = any_axis(draw, x)
    weight = parameter(draw.integer(1, 8), x.shape[axis])
    return lambda x: torch.movedim(torch.movedim(x, axis, -1) @ weight().mT, -1, axis)


def convolution(draw, x, parameter):
    n = x.dim() - 2
    if n < 1 or n > 3:
        x, n = x.unsqueeze(1), x.dim() - 1
    groups = draw(*(g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0))
    out = groups * draw(1, 2, 3)
    kernel = [draw(*range(1, min(4, size) + 1)) for size in x.shape[2:]]
    weight = parameter(out, x.shape[1] // groups, *kernel)
    bias = parameter(out) if draw.chance(0.5) else (lambda: None)
    stride, dilation = draw(1, 1, 2, 3), draw(1, 1, 2)
    padding = draw(0, 1, "same", "valid", 2) if stride == 1 else draw(0, 1, 2)
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    wide = x.dim()
    return lambda x: function(x if x.dim() == wide else x.unsqueeze(1), weight(), bias(), stride, padding, dilation, groups)


def transposed_convolution(draw, x, parameter):
    n = x.dim() - 2
    if n not in (1, 2):
        raise ValueError
    groups = draw(*(g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0))
    kernel = [draw(1, 2, 3) for _ in range(n)]
    weight = parameter(x.shape[1], draw(1, 2), *kernel)
    stride = draw(1, 2, 3)
    options = (stride, draw(0, 0, 1), draw(0, stride - 1), groups, draw(1, 1, 2))
    function = (F.conv_transpose1d, F.conv_transpose2d)[n - 1]
    return lambda x: function(x, weight(), None, *options)


def convolution_module(draw, x, parameter):
    kind = (nn.Conv1d, nn.Conv2d)[x.dim() - 3] if x.dim() in (3, 4) else None
    if kind is None:
        raise ValueError
    module = kind(
        x.shape[1], draw(1, 2, 4), draw(1, 2, 3), padding=draw(0, 1), padding_mode=draw("zeros", "circular", "reflect", "replicate")
    )
    return module.to(x.dtype)


# normalizers -----------------------------------------------------------------------------------------------------------


def layer_norm(draw, x, parameter):
    shape = tuple(x.shape[draw(*range(1, x.dim())) :])
    weight = parameter(*shape) if draw.chance(0.5) else (lambda: None)
    epsilon = draw(1e-5, 1e-5, 1e-12, 1e-3, 10.0)
    if draw.chance(0.3):
        return lambda x: F.rms_norm(x, shape, weight(), epsilon)
    bias = parameter(*shape) if draw.chance(0.5) else (lambda: None)
    return lambda x: F.layer_norm(x, shape, weight(), bias(), epsilon)


def group_norm(draw, x, parameter):
    groups = draw(*(g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0))
    weight = parameter(x.shape[1]) if draw.chance(0.5) else (lambda: None)
    if draw.chance(0.3) and x.dim() > 2:
        return lambda x: F.instance_norm(x, weight=weight(), eps=1e-3)
    return lambda x: F.group_norm(x, groups, weight(), None, 1e-4)


def batch_norm(draw, x, parameter):
    mean = torch.randn(x.shape[1], generator=draw.generator, dtype=x.dtype) * draw(1, 1, 1e3)
    variance = (10 ** (4 * torch.rand(x.shape[1], generator=draw.generator) - 2)).to(x.dtype)
    weight, bias = (parameter(x.shape[1]), parameter(x.shape[1])) if draw.chance(0.6) else ((lambda: None), (lambda: None))
    return lambda x: F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), weight(), bias())


def handmade_norm(draw, x, parameter):
    axis, epsilon = any_axis(draw, x), draw(1e-5, 1e-2, 1e-8)
    form = draw("std", "sqrt", "rsqrt", "norm", "normalize", "l1", "softly", "local")
    if form == "std":
        unbiased = draw(True, False)
        return lambda x: (x - x.mean(axis, keepdim=True)) / (x.std(axis, keepdim=True, unbiased=unbiased) + epsilon)
    if form == "sqrt":
        return lambda x: (x - x.mean(axis, keepdim=True)) / (x.var(axis, keepdim=True, unbiased=False) + epsilon).sqrt()
    if form == "rsqrt":
        return lambda x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + epsilon)
    if form == "norm":
        return lambda x: x / (x.norm(dim=axis, keepdim=True) + epsilon)
    if form == "normalize":
        p = draw(2.0, 2.0, 1.0, math.inf, 3.0)
        return lambda x: F.normalize(x, p, axis, epsilon)
    if form == "l1":
        return lambda x: x / (1 + x.abs().sum(axis, keepdim=True))
    if form == "softly":
        return lambda x: x / (1 + x.abs())
    return lambda x: F.local_response_norm(x, 2)
