"""What a random program may do: torch functions with rare arguments, in-place writes and aliases among them.

Each maker takes the random choices, the tensor at hand and a source of parameters, and returns a function of one tensor (or
of two of one shape). A maker may return what does not run on that tensor: the program then tries another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.networks import Draw

Step = Callable[[Tensor], Tensor]
Joint = Callable[[Tensor, Tensor], Tensor]
Parameter = Callable[..., Callable[[], Tensor]]  # a shape → the accessor of a parameter of that shape
Maker = Callable[[Draw, Tensor, Parameter], Step]


def _axis(draw: Draw, x: Tensor) -> int:
    """An axis that is not the batch, counted from the front or from the back."""
    axis = draw(*range(1, x.dim()))
    return axis if draw.chance(0.5) else axis - x.dim()


def _number(draw: Draw) -> float:
    """A factor: mostly ordinary, at times zero, one, tiny or huge."""
    return draw(0.5, -2.0, 3.0, 1.0, -1.0, 0.0, draw.power_of_ten(-2, 2), -draw.power_of_ten(-12, 12), draw.power_of_ten(-170, 170))


def _indices(draw: Draw, size: int, count: int | None = None) -> Tensor:
    count = draw.integer(1, 2 * size) if count is None else count
    return torch.randint(0, size, (count,), generator=draw.generator)


def _mask(draw: Draw, x: Tensor) -> Tensor:
    return torch.rand(x.shape[1:], generator=draw.generator) < draw(0.2, 0.5, 0.9)


def _slice(draw: Draw, size: int) -> slice:
    start = draw(*range(size))
    return slice(start, draw(*range(start + 1, size + 1)), draw(1, 1, 1, 2, 3))


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
    axis = _axis(draw, x)
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
    axis, epsilon = _axis(draw, x), draw(1e-5, 1e-2, 1e-8)
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
    a, b = sorted((_number(draw), _number(draw)))
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
    a, b = _number(draw), _number(draw)
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
    axis, keep = _axis(draw, x), draw(True, False)
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
    axis, other = _axis(draw, x), _axis(draw, x)
    size = x.shape[axis]
    indices, permutation = _indices(draw, size), draw.random.sample(range(1, x.dim()), x.dim() - 1)
    window, span = draw(*range(1, size + 1)), _slice(draw, size)
    mask, lines = _mask(draw, x), torch.rand(size, generator=draw.generator) < 0.6
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


# writes ----------------------------------------------------------------------------------------------------------------


def write(draw, x, parameter):
    axis, a = _axis(draw, x), draw(100.0, -3.0, 0.0, 0.5)
    span, row = _slice(draw, x.shape[1]), parameter(*x.shape[2:]) if x.dim() > 2 else parameter(1)
    mask, index = _mask(draw, x), _indices(draw, x.shape[1], 1)

    def halves(x):
        y = x * 1
        first, _ = y.chunk(2, axis)
        first.mul_(a)
        return y

    def rows(x):
        y = x + 0
        for place, part in enumerate(y.unbind(1)):
            part.mul_(1 + place)
        return y

    def table(x):
        scale = torch.ones(x.shape[1:], dtype=x.dtype)
        for place, part in enumerate(scale):
            part.add_(place)
        return x * scale

    def slices(x):
        y = x.clone()
        y[:, span] *= a
        y[:, 0] = row()
        return y

    def quietly(x):
        y = x * 2
        with torch.no_grad():
            y[:, span] *= a
        return y

    def onto(x):
        y = x * 1
        torch.mul(x[:, :1], 50.0, out=y[:, :1])
        return y

    def through_views(x):
        y = x.clone()
        y.view(y.shape[0], -1)[:, ::2].add_(y.flatten(1)[:, :1])
        return y

    def transposed(x):
        y = x * 1
        y.transpose(1, -1).relu_()
        return y

    def saved(x):
        y = x * 1
        z = y * 3
        y.add_(1).mul_(a)
        return y + z

    def together(x):
        y = x * 1
        torch._foreach_mul_([y], a)
        return y

    def copied(x):
        y = torch.empty_like(x)
        y.copy_(x.flip(1))
        y[:, 0].fill_(1.0)
        return y

    def masked(x):
        y = x.clone()
        y[:, mask] = 0.0
        return y.masked_fill_(mask, a)

    def placed(x):
        y = torch.zeros_like(x)
        y[:, index] = x[:, index]
        y.index_add_(1, index, x[:, :1])
        return y

    def relu_in_place(x):
        y = x * 1
        z = y[:, :1]
        F.relu(y, inplace=True)
        return y + z

    def expanded(x):
        y = x.unsqueeze(1).repeat(1, 2, *[1] * (x.dim() - 1))
        y[:, 1] -= y[:, 0] * a
        return y

    return draw(
        halves, rows, table, slices, quietly, onto, through_views, transposed, saved, together, copied, masked, placed, relu_in_place, expanded
    )  # fmt: skip


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
