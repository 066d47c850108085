"""Random networks: every way in which people put layers together, at every scale."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Network = tuple[nn.Module, Tensor, str]  # a module, an example, the mode to trace it in


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(seed: int) -> Network:
    """The network of one seed; consecutive seeds go through all families."""
    draw = Draw(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, shape, mode = FAMILIES[seed % len(FAMILIES)](draw)
        randomize(module, draw)
    exact = any(hasattr(part, "parametrizations") for part in module.modules()) or draw.chance(0.3)
    dtype = torch.float64 if exact else torch.float32
    return module.to(dtype).eval(), torch.randn(shape, generator=draw.generator).to(dtype), mode


def double(module: nn.Module, mode: str) -> nn.Module:
    """A copy that computes the same function in float64, in the mode in which it was traced."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None:  # torch's default depends on the dtype
            part.eps = torch.finfo(next(module.parameters()).dtype).eps
    return twin.double().train(mode != "eval")


class Draw:
    """The random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def __call__(self, *options):
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """Log-uniform: small numbers as likely as large ones."""
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def power_of_ten(self, low: float, high: float) -> float:
        return 10 ** self.random.uniform(low, high)


def randomize(module: nn.Module, draw: Draw) -> None:
    """Weights at scales from 1e-6 to 1e6, running statistics and affine parameters far from their initial values."""
    wild = draw.chance(0.25)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd)) and not hasattr(part, "parametrizations"):
                part.weight.mul_(draw.power_of_ten(-6, 6) if wild else draw.power_of_ten(-0.3, 0.5))
            elif isinstance(weight := getattr(part, "weight", None), Tensor) and weight.dim() == 1:
                weight.normal_(generator=draw.generator)
            for name, buffer in part.named_buffers(recurse=False):
                if name == "running_var":
                    buffer.uniform_(-2, 1, generator=draw.generator).copy_(10**buffer)
                elif name == "running_mean":
                    buffer.normal_(generator=draw.generator)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.function(*args, **kwargs)


class Joined(nn.Module):
    """Branches on one input, joined by a function of their outputs."""

    def __init__(self, join: Callable[..., Tensor], *branches: nn.Module) -> None:
        super().__init__()
        self.join, self.branches = join, nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*(branch(x) for branch in self.branches))


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder transposed."""

    def __init__(self, features: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.encoder, self.activation = nn.Linear(features, width), activation

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.activation(self.encoder(x)), self.encoder.weight.T)


class BatchRenorm(nn.Module):
    """Ioffe 2017, in eval mode: a normalizer with running statistics that is no subclass of torch's."""

    def __init__(self, features: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = eps, nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        scale = (self.weight / (self.running_var + self.eps).sqrt()).view(shape)
        return (x - self.running_mean.view(shape)) * scale + self.bias.view(shape)


def hand_written_rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


def hand_written_layer_norm(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-3)


def hand_written_standardization(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-2) if x.shape[-1] > 1 else x


def unit_vectors(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1, eps=1e-2)


ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU,
    nn.Mish, nn.Sigmoid, nn.Tanh, lambda: nn.Softplus(threshold=40),  # at 20 it jumps in float64
    nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Tanhshrink, nn.Softshrink, lambda: Function(torch.sin), lambda: Function(lambda x: x * torch.sigmoid(1.702 * x)),
    lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True), lambda: Function(torch.abs), nn.Identity, nn.Dropout,
)  # fmt: skip


def activation(draw: Draw) -> nn.Module:
    return draw(*ACTIVATIONS)()


def feature_normalizer(draw: Draw, features: int, flat: bool = True) -> nn.Module:
    """On (…, features); batch norms only where the channel axis is the last one."""
    eps = draw(1e-5, 1e-3, 0.1)
    anywhere = [
        lambda: nn.LayerNorm(features, eps), lambda: nn.RMSNorm(features, draw(eps, None)), nn.Identity,
        lambda: Function(hand_written_rms_norm), lambda: Function(hand_written_layer_norm),
        lambda: Function(hand_written_standardization), lambda: Function(unit_vectors),
    ]  # fmt: skip
    batch = [lambda: nn.BatchNorm1d(features, eps), lambda: BatchRenorm(features, eps)] * 2
    return draw(*anywhere, *(batch if flat else ()))()


def image_normalizer(draw: Draw, shape: torch.Size) -> nn.Module:
    """On (batch, channels, …)."""
    channels, axes, eps = shape[1], len(shape) - 2, draw(1e-5, 1e-3, 0.1)
    groups = draw(*(g for g in range(1, channels + 1) if channels % g == 0))
    batch, instance = (getattr(nn, f"{name}{axes}d") for name in ("BatchNorm", "InstanceNorm"))
    single = math.prod(shape[2:]) == 1  # torch refuses the variance of one value
    if math.prod(shape[1:]) == 1:
        return batch(channels, eps)
    return draw(
        lambda: batch(channels, eps), lambda: nn.GroupNorm(groups if not single else 1, channels, eps),
        lambda: nn.LayerNorm(shape[1:], eps), lambda: instance(channels, eps, track_running_stats=True),
        lambda: nn.Identity() if single else instance(channels, eps, affine=draw(True, False)),
        lambda: BatchRenorm(channels, eps), nn.Identity,
    )()  # fmt: skip


def dense(draw: Draw, widths: list[int], flat: bool = True) -> nn.Sequential:
    """Linear layers, most of them with a normalizer and an activation."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=draw(True, False))]
        if draw.chance(0.6):
            layers += [feature_normalizer(draw, after, flat)]
        layers += [activation(draw)]
    return nn.Sequential(*(layers[:-1] if draw(True, False) else layers))


def convolution(draw: Draw, shape: torch.Size) -> nn.Module:
    """Any convolution that fits the shape, or its transpose."""
    channels, axes = shape[1], len(shape) - 2
    smallest = min(shape[2:])
    groups = draw(*(g for g in range(1, channels + 1) if channels % g == 0))
    out, dilation, stride = groups * draw.integer(1, 4), draw(1, 1, 2), draw(1, 1, 2)
    kernel = draw.integer(1, max(1, min(3, (smallest - 1) // dilation + 1)))
    padding = draw(0, min(kernel // 2, smallest - 1))
    common = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw(True, False)}
    if draw.chance(0.25):
        extra = {"padding": padding, "output_padding": draw(0, stride - 1)}
        return getattr(nn, f"ConvTranspose{axes}d")(channels, out, kernel, **common, **extra)
    extra = {"padding": padding, "padding_mode": draw("zeros", "reflect", "replicate", "circular")}
    if stride == 1 and draw.chance(0.2):
        extra = {"padding": "same"}
    return getattr(nn, f"Conv{axes}d")(channels, out, kernel, **common, **extra)


def pooling(draw: Draw, shape: torch.Size) -> nn.Module:
    axes = len(shape) - 2
    if min(shape[2:]) < 3:
        return nn.Identity()
    average, largest, whole = (getattr(nn, f"{name}{axes}d") for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool"))
    return draw(
        lambda: average(2), lambda: largest(2), lambda: largest(3, 2, 1), lambda: average(3, 2, 1), lambda: whole(2), nn.Identity
    )()


def convolutional(draw: Draw, axes: int, size: int, layers: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Convolutions, normalizers, activations, pooling, and a dense head."""
    start = (1, draw.integer(1, 6), *(draw.integer(3, size) for _ in range(axes)))
    x, parts = torch.zeros(start), []
    for _ in range(layers):
        for make in (convolution, image_normalizer, lambda d, s: activation(d), pooling):
            part = make(draw, x.shape).eval()
            x = part(x)
            parts.append(part)
    parts += [nn.Flatten(), nn.Linear(x[0].numel(), draw.integer(1, 10))] if draw.chance(0.5) else []
    return nn.Sequential(*parts), start


# families ------------------------------------------------------------------------------------------------------------


def chain(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    widths = [draw.integer(1, 512) for _ in range(draw.integer(2, 6))]
    return dense(draw, widths), (draw(1, 3), widths[0]), "eval"


def narrow_chain(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    widths = [draw.integer(1, 6) for _ in range(draw.integer(2, 6))]
    return dense(draw, widths), (1, widths[0]), "eval"


def plain_chain(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    widths, kind = [draw.integer(1, 40) for _ in range(draw.integer(2, 12))], draw(*ACTIVATIONS)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), kind())]
    return nn.Sequential(*layers[:-1]), (1, widths[0]), "eval"


def deep_chain(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width = draw.integer(1, 4)
    return dense(draw, [width] * draw.integer(50, 300)), (1, width), "eval"


def residual(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width, weight = draw.integer(1, 64), draw(1.0, 0.1, -2.0)
    blocks = [
        Joined(lambda x, y: torch.add(x, y, alpha=weight), nn.Identity(), dense(draw, [width, draw.integer(1, 64), width]))
        for _ in range(draw.integer(1, 8))
    ]
    return nn.Sequential(*blocks, nn.Linear(width, 3)), (1, width), "eval"


def branching(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width, out = draw.integer(2, 32), draw.integer(1, 16)
    join = draw(
        lambda *parts: sum(parts), lambda *parts: torch.cat(parts, -1), lambda *parts: torch.stack(parts, 1),
        lambda a, b, *_: torch.maximum(a, b), lambda a, b, *_: a - 2 * b, lambda *parts: torch.cat(parts, -1).sort(-1).values,
    )  # fmt: skip
    branches = [dense(draw, [width, draw.integer(1, 32), out]) for _ in range(draw(2, 3))]
    return nn.Sequential(dense(draw, [width, width]), Joined(join, *branches)), (1, width), "eval"


def shared(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width = draw.integer(1, 32)
    block = dense(draw, [width, width])
    return nn.Sequential(block, activation(draw), block, nn.Linear(width, 2), nn.ReLU()), (1, width), "eval"


def tied(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    features = draw.integer(1, 32)
    return Tied(features, draw.integer(1, 32), activation(draw)), (2, features), "eval"


def parametrized(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    widths = [draw.integer(2, 32) for _ in range(4)]
    wrap = [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
    layers = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (draw(*wrap)(nn.Linear(a, b)), feature_normalizer(draw, b), activation(draw))
    ]
    return nn.Sequential(*layers), (1, widths[0]), "eval"


def line(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    return *convolutional(draw, 1, 40, draw.integer(1, 4)), "eval"


def image(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    return *convolutional(draw, 2, 14, draw.integer(1, 3)), "eval"


def volume(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    return *convolutional(draw, 3, 6, draw.integer(1, 2)), "eval"


def residual_image(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    channels, size = draw.integer(1, 6), draw.integer(3, 12)
    shape = torch.Size((1, channels, size, size))
    mode = draw("zeros", "circular", "reflect")
    blocks = [
        Joined(
            torch.add,
            nn.Identity(),
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, padding_mode=mode), image_normalizer(draw, shape), activation(draw)
            ),
        )
        for _ in range(draw.integer(1, 3))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), tuple(shape), "eval"


def tokens(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    length, width = draw.integer(1, 8), draw.integer(2, 32)
    mix = nn.Sequential(Function(lambda x: x.mT), nn.Linear(length, length), activation(draw), Function(lambda x: x.mT))
    blocks = [mix, dense(draw, [width, 2 * width, width], flat=False)]
    return nn.Sequential(*(Joined(torch.add, nn.Identity(), block) for block in blocks)), (2, length, width), "eval"


def batch_statistics(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width, eps = draw.integer(1, 8), draw(1e-5, 1e-2)
    running = draw(True, False)
    layers = [nn.Linear(width, 4), nn.BatchNorm1d(4, eps, track_running_stats=running), nn.ReLU(), nn.Linear(4, 2)]
    return nn.Sequential(*layers), (draw.integer(2, 8), width), "batch"


def batch_statistics_image(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    channels, size = draw.integer(1, 3), draw.integer(2, 6)
    layers = [nn.Conv2d(channels, 3, 2), nn.BatchNorm2d(3, draw(1e-5, 1e-2), track_running_stats=False), activation(draw)]
    layers[-1] = nn.Tanh() if isinstance(layers[-1], (nn.Dropout, nn.RReLU)) else layers[-1]
    return nn.Sequential(*layers), (draw.integer(2, 4), channels, size, size), "batch"


def gate(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    """Products of two values: finite only where a normalizer or a bounded activation comes before."""
    width = draw.integer(2, 16)
    before = draw(nn.Identity, nn.Tanh, lambda: nn.LayerNorm(width, 0.1), lambda: nn.RMSNorm(width, 0.1))()
    gated = draw(
        lambda: nn.Sequential(nn.Linear(width, 4), nn.GLU()),
        lambda: Joined(torch.mul, nn.Linear(width, 3), nn.Sequential(nn.Linear(width, 3), nn.Sigmoid())),
        lambda: Joined(torch.mul, nn.Linear(width, 3), nn.Linear(width, 1)),
        lambda: Joined(lambda a, b: a / (1 + b.abs()), nn.Linear(width, 3), nn.Linear(width, 3)),
        lambda: Function(lambda x: x.unsqueeze(-1) @ x.unsqueeze(-2)),
    )()
    return nn.Sequential(before, gated), (1, width), "eval"


class Attention(nn.Module):
    """Self-attention with heads that may share keys and values, on tokens that a normalizer bounds."""

    def __init__(self, draw: Draw, width: int) -> None:
        super().__init__()
        self.heads, self.causal = draw((1, 1), (2, 1), (2, 2)), draw(True, False)
        self.normalizer = draw(nn.LayerNorm, nn.RMSNorm)(width, eps=0.1)
        self.query, self.key, self.value = (nn.Linear(width, heads * 4) for heads in (self.heads[0], *[self.heads[1]] * 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalizer(x)
        parts = [make(x).unflatten(-1, (-1, 4)).transpose(1, 2) for make in (self.query, self.key, self.value)]
        grouped = self.heads[0] != self.heads[1]
        return functional.scaled_dot_product_attention(*parts, is_causal=self.causal, enable_gqa=grouped).transpose(1, 2).flatten(2)


def attention(draw: Draw) -> tuple[nn.Module, tuple[int, ...], str]:
    width = draw.integer(2, 8)
    return Attention(draw, width), (1, draw.integer(1, 5), width), "eval"


FAMILIES = (
    chain, narrow_chain, plain_chain, deep_chain, residual, branching, shared, tied, parametrized, line, image, volume,
    residual_image, tokens, batch_statistics, batch_statistics_image, gate, attention,
)  # fmt: skip


def is_deep(seed: int) -> bool:
    return FAMILIES[seed % len(FAMILIES)] is deep_chain
