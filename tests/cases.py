"""A case for every rule, small and tight: whoever weakens the rule by a tenth is caught on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tests.networks import Function, network, randn

__all__ = ["CONSTANT", "INFINITE", "RULE_CASES", "UNREACHABLE", "VARIANTS", "Case", "Function", "network", "randn"]


@dataclass(frozen=True)
class Case:
    """A module and the example it is traced on; upper ≤ slack · lower."""

    module: nn.Module
    example: Tensor
    mode: str = "eval"
    slack: float = 1.1
    effort: float = 1.0


attention = functional.scaled_dot_product_attention
aten = torch.ops.aten  # what no public function of torch calls, but an exported program may hold
Maker = Callable[[Tensor], Tensor] | nn.Module


def on(shape: tuple[int, ...], table: Mapping[str, Maker], mode: str = "eval") -> dict[str, Case]:
    """Cases that share the shape of their input."""
    return {
        op: Case(made if isinstance(made, nn.Module) else Function(made), randn(*shape, seed=i), mode)
        for i, (op, made) in enumerate(table.items())
    }


def within(low: float, high: float, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of values that are bounded first, with slope 1 inside."""
    return lambda x: function(functional.hardtanh(x, low, high))


MATRIX, VECTOR, BATCHED, FORM = randn(5, 4), randn(4), randn(1, 4, 2), randn(2, 4, 3)
LINE, PLANE, SPACE = randn(3, 2, 3), randn(3, 2, 3, 3), randn(3, 2, 2, 2, 2)
TURNED = torch.tensor([[[0.9, 0.3, 0.1], [0.1, 0.7, -0.2]]])
GRID = functional.affine_grid(TURNED, [1, 1, 4, 4], align_corners=False)
VOLUME_GRID = torch.linspace(-0.9, 0.8, 24).reshape(1, 2, 2, 2, 3)
MASK, POSITIONS = torch.tensor([True, False, True, True]), torch.tensor([0, 2, 3, 1])

ZEROS = torch.zeros(3, dtype=torch.long)


def affine(normalizer: nn.Module) -> nn.Module:
    """A normalizer with γ and β of its own."""
    nn.init.normal_(normalizer.weight, generator=torch.Generator().manual_seed(0))
    return normalizer


def running(normalizer: nn.Module) -> nn.Module:
    """A normalizer with running statistics of its own."""
    normalizer.running_var.copy_(torch.linspace(0.2, 3, len(normalizer.running_var)))
    return normalizer


# Attention with one operand that varies: each law is reached where the others are as bad as they can be.
KEYS, VALUES, QUERIES = torch.tensor([[[3.0], [-3.0]]]), torch.tensor([[[2.0], [-2.0]]]), torch.full((1, 3, 1), 5.0)
ANGLES = torch.linspace(0, 3, 8).reshape(2, 4)


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding: x cos + (−x₂, x₁) sin, the angles those of the position and the plane."""
    left, right = x.chunk(2, -1)
    angles = ANGLES[:, :2].repeat(1, 2)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def tripled(tensors: list[Tensor]) -> list[Tensor]:
    torch._foreach_mul_(tensors, 3.0)
    return tensors


ENTRYWISE: dict[str, Maker] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "mish": functional.mish,
    "hardsigmoid": functional.hardsigmoid,
    "log_sigmoid": functional.logsigmoid,
    "softsign": functional.softsign,
    "tanhshrink": functional.tanhshrink,
    "abs": torch.abs,
    "neg": torch.neg,
    "erf": torch.erf,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "erfc": torch.erfc,
    "special_expit": torch.special.expit,
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "sinh": within(-1, 1, torch.sinh),
    "cosh": within(-1, 1, torch.cosh),
    "exp2": within(-1, 1, torch.exp2),
    "log2": within(0.5, 2, torch.log2),
    "log10": within(0.5, 2, torch.log10),
    "exp": within(-1, 1, torch.exp),
    "expm1": within(-1, 1, torch.expm1),
    "log": within(0.5, 2, torch.log),
    "log1p": within(-0.5, 1, torch.log1p),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": within(-1, 1, torch.tan),
    "asin": within(-0.8, 0.8, torch.asin),
    "acos": within(-0.8, 0.8, torch.acos),
    "acosh": within(1.5, 3, torch.acosh),
    "atanh": within(-0.8, 0.8, torch.atanh),
    "logit": lambda x: torch.logit(x, 0.3),
    "special_logit": within(0.2, 0.9, torch.special.logit),
    "leaky_relu": lambda x: functional.leaky_relu(x, -3.0),
    "elu": nn.ELU(2.0),
    "selu": nn.SELU(),
    "celu": nn.CELU(2.0),
    "gelu": nn.GELU(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": nn.Softplus(beta=2.0),
    "hardtanh": nn.Hardtanh(-0.5, 2.0),
    "hardswish": nn.Hardswish(),
    "clamp": lambda x: x.clamp(-0.5, 2.0),
    "clamp_min": lambda x: torch.clamp_min(x, 0.5),
    "clamp_max": lambda x: torch.clamp_max(x, 0.5),
    "softshrink": nn.Softshrink(0.7),
    "pow": within(-2, 2, lambda x: x**3),
    "square": within(-2, 2, torch.square),
    "prod": within(-1, 1, lambda x: x[:, :2].prod(1)),
    "cumprod": within(-1, 1, lambda x: x[:, :2].cumprod(1)),
    "quantile": lambda x: x.quantile(0.5, 1),
    "nanquantile": lambda x: x.nanquantile(torch.tensor([0.5, 0.5]), 1).T,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "cosine_similarity": lambda x: functional.cosine_similarity(x, VECTOR[None, :3], eps=1.0),
    "cdist": lambda x: torch.cdist(x[:, None], torch.stack([VECTOR[:3], VECTOR[:3] + 0.01])[None]),
    "pairwise_distance": lambda x: functional.pairwise_distance(x, VECTOR[None, :3], p=1.0),
    "sqrt": within(0.25, 1, torch.sqrt),
    "rsqrt": within(0.25, 1, torch.rsqrt),
    "reciprocal": within(0.5, 1, torch.reciprocal),
    "prelu": nn.PReLU(3, init=-2.0),
    "threshold": nn.Threshold(1.0, 1.0),
    "softmax": nn.Softmax(1),
    "_softmax": lambda x: torch._softmax(x, 1, False),
    "special_softmax": lambda x: torch.special.softmax(x, 1),
    "log_softmax": nn.LogSoftmax(1),
    "_log_softmax": lambda x: torch._log_softmax(x, 1, False),
    "special_log_softmax": lambda x: torch.special.log_softmax(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "add": lambda x: x[:, None] + torch.ones(2, 1),
    "sub": lambda x: torch.sub(torch.ones(3), x, alpha=2.0),
    "subtract": lambda x: torch.subtract(torch.ones(3), x, alpha=2.0),
    "rsub": lambda x: torch.rsub(x, 1.0, alpha=3.0),
    "mul": lambda x: x * VECTOR[:3],
    "multiply": lambda x: torch.multiply(x, VECTOR[:3]),
    "div": lambda x: x / VECTOR[:3],
    "lerp": lambda x: torch.lerp(x, torch.ones(3), VECTOR[:3]),
    "addcmul": lambda x: torch.addcmul(torch.ones(3), x, VECTOR[:3], value=-2.0),
    "addcdiv": lambda x: torch.addcdiv(torch.ones(3), x, VECTOR[:3], value=-2.0),
    "hypot": lambda x: torch.hypot(x, torch.ones(3)),
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros(3)),
    "logaddexp2": lambda x: torch.logaddexp2(x, torch.zeros(3)),
    "true_divide": lambda x: torch.true_divide(x, VECTOR[:3]),
}

ROWS: dict[str, Maker] = {  # on (1, 4)
    "glu": within(-12, 12, functional.glu),
    "t": lambda x: x.t().t(),
    "ravel": lambda x: torch.ravel(x[0])[None],
    "fliplr": torch.fliplr,
    "flipud": lambda x: torch.flipud(x[0])[None],
    "atleast_1d": lambda x: torch.atleast_1d(x[0])[None],
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x.unsqueeze(1), torch.zeros(1, 3, 4))[0],
    "diff": lambda x: x.diff(dim=1),
    "scatter": lambda x: torch.zeros(len(x), 4).scatter(1, POSITIONS.expand(len(x), 4), x),
    "scatter_add": lambda x: torch.zeros(len(x), 4).scatter_add(1, ZEROS[:1].expand(len(x), 4), x),
    "index_add": lambda x: torch.zeros(1, 4).index_add(1, torch.zeros(4, dtype=torch.long), x, alpha=-2),
    "index_fill": lambda x: x.index_fill(1, POSITIONS[:1], 2.0),
    "diag_embed": lambda x: x.diag_embed(),
    "diag": lambda x: torch.diag(x[0])[None],
    "take": lambda x: torch.take(x, torch.tensor([[0, 0]])),
    "nansum": lambda x: x.nansum(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1).max,
    "logcumsumexp": lambda x: x[:, :1].logcumsumexp(1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "slice": lambda x: x[:, 1:],
    "select": lambda x: x[:, 1],
    "narrow": lambda x: x.narrow(1, 0, 2),
    "index": lambda x: x[:, POSITIONS],
    "index_select": lambda x: x.index_select(1, POSITIONS[:2]),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 0, 0]])),
    "getitem": lambda x: x.topk(2, 1).values,
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1),
    "broadcast_to": lambda x: torch.broadcast_to(x.unsqueeze(1), (len(x), 3, 4)),
    "repeat": lambda x: x.repeat(1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "tile": lambda x: x.tile(1, 3),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x[:, :1].cumsum(1),
    "as_strided": lambda x: x.as_strided((1, 2), (4, 2)),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 1), 2.0),
    "cat": lambda x: torch.cat([x, x], 1),
    "concat": lambda x: torch.concat([x, x], 1),
    "concatenate": lambda x: torch.concatenate([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "hstack": lambda x: torch.hstack([x, x]),
    "vstack": lambda x: torch.vstack([x[0], x[0]])[None],
    "dstack": lambda x: torch.dstack([x, x]),
    "column_stack": lambda x: torch.column_stack([x, x]),
    "select_scatter": lambda x: torch.zeros(1, 4, 1).select_scatter(x, 2, 0),
    "slice_scatter": lambda x: torch.zeros(1, 4).slice_scatter(x, 1, 0, 4),
    "index_put": lambda x: torch.zeros(1, 4).index_put((torch.tensor([0]), POSITIONS), x[0]),
    "index_copy": lambda x: torch.zeros(1, 4).index_copy(1, POSITIONS, x),
    "masked_fill": lambda x: x.masked_fill(MASK, 7.0),
    "masked_scatter": lambda x: torch.zeros(1, 4).masked_scatter(torch.ones(1, 4, dtype=torch.bool), x),
    "where": lambda x: torch.where(MASK, x, 7.0),
    "fill": lambda x: torch.fill(torch.zeros(1, 4), x[0, 0]),
    "linear": nn.Linear(4, 3),
    "mm": lambda x: torch.mm(x, MATRIX.T),
    "matmul": lambda x: x @ MATRIX.T,
    "addmm": lambda x: torch.addmm(torch.ones(5), x, MATRIX.T, alpha=-2.0),
    "dot": lambda x: torch.dot(x[0], VECTOR)[None],
    "mv": lambda x: torch.mv(MATRIX, x[0])[None],
    "addmv": lambda x: torch.addmv(torch.ones(5), MATRIX, x[0])[None],
    "inner": lambda x: torch.inner(x, MATRIX),
    "tensordot": lambda x: torch.tensordot(x, MATRIX, dims=([1], [1])),
    "einsum": lambda x: torch.einsum("bi,oi->bo", x, MATRIX),
    "outer": lambda x: torch.outer(x[0], VECTOR)[None],
    "kron": lambda x: torch.kron(x, VECTOR[None]),
    "bilinear": lambda x: functional.bilinear(x, VECTOR[None, :3], FORM),
    "center": lambda x: x - x.mean(1, keepdim=True),
    "layer_norm": nn.LayerNorm(4, eps=0.1),
    "rms_norm": nn.RMSNorm(4, eps=0.1),
    "standardize": lambda x: x / (x.norm(dim=1, keepdim=True) + 0.1),
    "max": lambda x: x.max(1).values,
    "min": lambda x: x.min(1).values,
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "sort": lambda x: x.sort(1).values,
    "msort": lambda x: torch.msort(x[0])[None],
    "topk": lambda x: x.topk(2, 1).values,
    "median": lambda x: x.median(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1).values,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "minimum": lambda x: torch.minimum(x, x.flip(1)),
    "fmax": lambda x: torch.fmax(x, x.flip(1)),
    "fmin": lambda x: torch.fmin(x, x.flip(1)),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "norm": lambda x: aten.norm(x, 2, [1]),
    "std": lambda x: x.std(1),
}

PLANES: dict[str, Maker] = {  # on (1, 2, 3)
    "reshape": lambda x: x.reshape(1, 6),
    "flatten": lambda x: x.flatten(1),
    "permute": lambda x: x.permute(0, 2, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "movedim": lambda x: x.movedim(1, 2),
    "moveaxis": lambda x: x.moveaxis(1, 2),
    "swapdims": lambda x: x.swapdims(1, 2),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "numpy_T": lambda x: x[0].T[None],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "trace": lambda x: torch.trace(x[0])[None],
    "rot90": lambda x: x.rot90(1, (1, 2)),
    "diagonal_scatter": lambda x: torch.zeros(1, 3, 3).diagonal_scatter(x[:, 0], 0, 1, 2),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(1, 2, 2, dtype=torch.long), 2),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(),
    "scaled_dot_product_attention": lambda x: attention(x[:, :1, :1], KEYS, VALUES),
    "var": within(-1, 1, lambda x: x[:, 0, :2].var(1)),
}

LINES: dict[str, Maker] = {  # on (1, 2, 4)
    "rotary": rotated,
    "bmm": lambda x: torch.bmm(x, BATCHED),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1, 2, 2), x, BATCHED, alpha=-2.0),
    "pad": lambda x: functional.pad(x, (1, 2), mode="circular"),
    "reflection_pad1d": lambda x: aten.reflection_pad1d(x, [2, 2]),
    "replication_pad1d": lambda x: aten.replication_pad1d(x, [2, 2]),
    "avg_pool1d": nn.AvgPool1d(2),
    "adaptive_avg_pool1d": nn.AdaptiveAvgPool1d(2),
    "max_pool1d": nn.MaxPool1d(3, 1, 1),
    "adaptive_max_pool1d": nn.AdaptiveMaxPool1d(3),
    "upsample_nearest1d": nn.Upsample(scale_factor=3),
    "upsample_linear1d": nn.Upsample(scale_factor=3, mode="linear"),
    "_upsample_nearest_exact1d": nn.Upsample(scale_factor=3, mode="nearest-exact"),
    "conv1d": nn.Conv1d(2, 3, 3, padding=1),
    "conv_transpose1d": nn.ConvTranspose1d(2, 3, 3, stride=2),
    "convolution": lambda x: torch.convolution(x, LINE, None, [1], [1], [1], False, [0], 1),
    "group_norm": nn.GroupNorm(2, 2, eps=0.1),
    "instance_norm": nn.InstanceNorm1d(2, eps=0.1),
    "col2im": lambda x: functional.fold(x.reshape(1, 4, 2), (3, 2), 2),
}

IMAGES: dict[str, Maker] = {  # on (1, 4, 4, 4)
    "pixel_shuffle": nn.PixelShuffle(2),
    "pixel_unshuffle": nn.PixelUnshuffle(2),
    "channel_shuffle": nn.ChannelShuffle(2),
    "im2col": nn.Unfold(2),
    "reflection_pad2d": lambda x: aten.reflection_pad2d(x, [1, 1, 1, 1]),
    "replication_pad2d": lambda x: aten.replication_pad2d(x, [1, 1, 1, 1]),
    "grid_sampler": lambda x: functional.grid_sample(x, GRID, align_corners=False),
    "grid_sampler_2d": lambda x: aten.grid_sampler_2d(x, 0.83 * GRID + 0.013, 1, 0, False),
    "avg_pool2d": nn.AvgPool2d(2),
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d(2),
    "_adaptive_avg_pool2d": lambda x: aten._adaptive_avg_pool2d(x, [2, 2]),
    "max_pool2d": nn.MaxPool2d(3, 1, 1),
    "max_pool2d_with_indices": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d(3),
    "upsample_nearest2d": nn.Upsample(scale_factor=2),
    "upsample_bilinear2d": nn.Upsample(scale_factor=2, mode="bilinear"),
    "upsample_bicubic2d": nn.Upsample(scale_factor=2, mode="bicubic"),
    "_upsample_bilinear2d_aa": lambda x: functional.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": lambda x: functional.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
    "_upsample_nearest_exact2d": nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "conv2d": nn.Conv2d(4, 3, 3, padding=1),
    "conv_transpose2d": nn.ConvTranspose2d(4, 2, 3, stride=2),
}

VOLUMES: dict[str, Maker] = {  # on (1, 2, 4, 4, 4)
    "reflection_pad3d": lambda x: aten.reflection_pad3d(x, [1, 1, 1, 1, 1, 1]),
    "replication_pad3d": lambda x: aten.replication_pad3d(x, [1, 1, 1, 1, 1, 1]),
    "grid_sampler_3d": lambda x: aten.grid_sampler_3d(x, VOLUME_GRID, 0, 1, True),
    "avg_pool3d": nn.AvgPool3d(2),
    "adaptive_avg_pool3d": nn.AdaptiveAvgPool3d(2),
    "_adaptive_avg_pool3d": lambda x: aten._adaptive_avg_pool3d(x, [2, 2, 2]),
    "max_pool3d": nn.MaxPool3d(3, 2, 1),
    "max_pool3d_with_indices": lambda x: functional.max_pool3d(x, 2, return_indices=True)[0],
    "adaptive_max_pool3d": nn.AdaptiveMaxPool3d(2),
    "upsample_nearest3d": nn.Upsample(scale_factor=2),
    "upsample_trilinear3d": nn.Upsample(scale_factor=2, mode="trilinear"),
    "_upsample_nearest_exact3d": nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "conv3d": nn.Conv3d(2, 3, 2),
    "conv_transpose3d": nn.ConvTranspose3d(2, 3, 2),
}

RULE_CASES: dict[str, Case] = {
    **on((1, 3), ENTRYWISE), **on((1, 4), ROWS), **on((1, 2, 3), PLANES), **on((1, 2, 4), LINES),
    **on((1, 4, 4, 4), IMAGES), **on((1, 2, 4, 4, 4), VOLUMES), **on((6, 3), {"batch_norm": nn.BatchNorm1d(3, eps=0.1)}, "batch"),
}  # fmt: skip

for _op in (
    "bilinear", "column_stack", "masked_scatter", "fill",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
):  # fmt: skip
    RULE_CASES[_op] = replace(RULE_CASES[_op], effort=0.1)  # torch has no batching rule: the search goes sample by sample

# More than one case for rules with more than one law; the part before the colon names the rule.
VARIANTS: dict[str, Case] = {
    **on(
        (1, 3),
        {
            "gelu: tanh": nn.GELU("tanh"),
            "add: branches": lambda x: x + 2 * x.flip(1),
            "std: std_mean": lambda x: torch.std_mean(x, 1, keepdim=True)[0],
            "mean: std_mean": lambda x: torch.std_mean(x[0], correction=0)[1][None],
            "var: var_mean": within(-1, 1, lambda x: torch.var_mean(x[:, :2], 1, unbiased=False)[0]),
            "mean: var_mean": lambda x: torch.var_mean(x, 1)[1],
            "matmul: multi_dot": lambda x: torch.linalg.multi_dot([x, MATRIX[:3, :2], MATRIX[:2, :3]]),
            "mul: of lists": lambda x: torch.cat(torch._foreach_mul([x, 2 * x], 3.0), 1),
            "mul: of lists in place": lambda x: torch.cat(tripled([x + 1, x.flip(1)]), 1),
            "add: of lists": lambda x: torch.cat(torch._foreach_add([x, x.flip(1)], [x, x.flip(1)], alpha=2), 1),
            "sub: of lists": lambda x: torch.cat(torch._foreach_sub([x], [1.0]), 1),
            "tanh: of lists": lambda x: torch.cat(torch._foreach_tanh([x, x]), 1),
            "clamp_min: of lists": lambda x: torch.cat(torch._foreach_maximum([x, x], 0.5), 1),
            "addcmul: of lists": lambda x: torch.cat(torch._foreach_addcmul([x], [x], [VECTOR[None, :3].abs()], 2.0), 1),
            "lerp: of lists": lambda x: torch.cat(torch._foreach_lerp([x], [x], 0.3), 1),
            "pow: of lists": within(-1, 1, lambda x: torch.cat(torch._foreach_pow([x], 2), 1)),
            "cdist: of order 1": lambda x: torch.cdist(x[:, None], VECTOR[None, None, :3], p=1.0),
            "cosine_similarity: of two": lambda x: functional.cosine_similarity(x, x.flip(1), eps=1.0),
            "mul: branches": within(-2, 2, lambda x: x * x.abs()),
            "div: branches": within(1, 2, lambda x: (3 - x) / x),
            "div: numerator": within(0.5, 2, lambda x: torch.div(torch.ones(3), x)),
            "dot: branches": within(-1, 1, lambda x: torch.dot(x[0], x[0])[None]),
            "matmul: branches": within(-1, 1, lambda x: x.unsqueeze(1) @ x.unsqueeze(2)),
            "einsum: branches": within(-1, 1, lambda x: torch.einsum("bi,bi->b", x, x)),
            "clamp: tensors": lambda x: x.clamp(-torch.ones(3), torch.tensor([1.0, 2.0, 3.0])),
            "pow: base": within(-1, 2, lambda x: 2.0**x),
            "linear: one output": nn.Linear(3, 1),
            "linalg_vector_norm: 2": lambda x: torch.linalg.vector_norm(x, dim=1),
            "linalg_vector_norm: 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
            "std: population": lambda x: x.std(1, correction=0),
            "standardize: rms": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 0.1),
            "standardize: layer": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1),
            "standardize: floor": lambda x: functional.normalize(x, dim=1, eps=0.1),
            "batch_norm: running": running(nn.BatchNorm1d(3)),
            "layer_norm: affine": affine(nn.LayerNorm(3, eps=0.1)),
            "rms_norm: affine": affine(nn.RMSNorm(3, eps=0.1)),
            "scaled_dot_product_attention: values": lambda x: attention(QUERIES, KEYS, x[:, :2, None]),
            "index_put: accumulate": lambda x: torch.zeros(1, 2).index_put((ZEROS, ZEROS), x[0], accumulate=True),
        },
    ),
    **on(
        (1, 4, 4, 4),
        {
            "group_norm: affine": affine(nn.GroupNorm(2, 4, eps=0.1)),
            "instance_norm: affine": affine(nn.InstanceNorm2d(4, eps=0.1, affine=True)),
            "instance_norm: running": running(nn.InstanceNorm2d(4, track_running_stats=True)),
            "max_pool2d: disjoint": nn.MaxPool2d(2),
            "avg_pool2d: borders": nn.AvgPool2d(2, padding=1, count_include_pad=False),
            "conv2d: grouped": nn.Conv2d(4, 4, 3, groups=2),
            "grid_sampler: border": lambda x: functional.grid_sample(x, GRID, padding_mode="border", align_corners=True),
            "grid_sampler: cubic": lambda x: functional.grid_sample(x, GRID, mode="bicubic", align_corners=False),
            "conv2d: reflect": nn.Conv2d(4, 4, 3, padding=2, padding_mode="reflect"),
            "conv2d: same": nn.Conv2d(4, 4, 2, padding="same"),
            "pad: constant": lambda x: functional.pad(x, (1, 1), value=3.0),
            "pad: replicate": lambda x: functional.pad(x, (2, 2, 2, 2), mode="replicate"),
        },
    ),
}

# In its keys attention's bound is a factor √2 above what two keys can reach, and one query cannot do worse.
VARIANTS.update(
    on(
        (1, 2, 4),
        {
            "slice: split": lambda x: x.split(3, 2)[1],
            "slice: split_with_sizes": lambda x: x.split([1, 3], 2)[-1],
            "slice: chunk": lambda x: x.chunk(3, -1)[1],
            "slice: tensor_split": lambda x: x.tensor_split(3, 2)[0],
            "slice: tensor_split at": lambda x: x.tensor_split([1, 3], 2)[1],
            "slice: hsplit": lambda x: x.hsplit(2)[0],
            "slice: vsplit": lambda x: x[0].vsplit(2)[0][None],
            "slice: dsplit": lambda x: x.dsplit(2)[0],
            "select: unbind": lambda x: x.unbind(-1)[-2],
        },
    )
)
VARIANTS["scaled_dot_product_attention: keys"] = Case(
    Function(lambda x: attention(QUERIES[:, :1], functional.hardtanh(x)[:, :2, None], VALUES)), torch.zeros(1, 3)
)

# Rules that give the gain 0, with something tight around them.
CONSTANT: dict[str, Case] = on(
    (1, 4),
    {
        "zeros_like": lambda x: x + torch.zeros_like(x),
        "ones_like": lambda x: x * torch.ones_like(x),
        "full_like": lambda x: x * torch.full_like(x, 2.0),
        "new_zeros": lambda x: x + x.new_zeros(4),
        "new_ones": lambda x: x * x.new_ones(4),
        "new_full": lambda x: x + x.new_full((4,), 2.0),
    },
)

# Rules that give no finite gain: the function jumps.
INFINITE: dict[str, Case] = on(
    (1, 3),
    {
        "sign": torch.sign, "sgn": torch.sgn, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
        "trunc": torch.trunc, "frac": torch.frac, "hardshrink": functional.hardshrink,
        "heaviside": lambda x: torch.heaviside(x, torch.ones(3)),
        "rounded_div": lambda x: torch.div(x, 2, rounding_mode="floor"),
        "remainder": lambda x: x % 2, "fmod": lambda x: torch.fmod(x, 2), "floor_divide": lambda x: torch.floor_divide(x, 2),
        "to": lambda x: x.to(torch.int64).to(x.dtype), "type_as": lambda x: x.type_as(POSITIONS).to(x.dtype),
        "_to_copy": lambda x: aten._to_copy(x, dtype=torch.int32) * x,
        "eq": lambda x: torch.where(x == 0, 1.0, x), "ne": lambda x: torch.where(x != 0, 1.0, x),
        "lt": lambda x: torch.where(x < 0, 1.0, x), "le": lambda x: torch.where(x <= 0, 1.0, x),
        "gt": lambda x: torch.where(x > 0, 1.0, x), "ge": lambda x: torch.where(x >= 0, 1.0, x),
        "logical_and": lambda x: torch.where(torch.logical_and(x > 0, x > 1), 1.0, x),
        "logical_or": lambda x: torch.where(torch.logical_or(x > 0, x > 1), 1.0, x),
        "logical_xor": lambda x: torch.where(torch.logical_xor(x > 0, x > 1), 1.0, x),
        "logical_not": lambda x: torch.where(torch.logical_not(x > 0), 1.0, x),
        "__and__": lambda x: torch.where((x > 0) & (x > 1), 1.0, x), "__or__": lambda x: torch.where((x > 0) | (x > 1), 1.0, x),
        "__xor__": lambda x: torch.where((x > 0) ^ (x > 1), 1.0, x),
        "bitwise_and": lambda x: torch.where(torch.bitwise_and(x > 0, x > 1), 1.0, x),
        "bitwise_or": lambda x: torch.where(torch.bitwise_or(x > 0, x > 1), 1.0, x),
        "bitwise_xor": lambda x: torch.where(torch.bitwise_xor(x > 0, x > 1), 1.0, x), "bitwise_not": lambda x: torch.where(~(x > 0), 1.0, x),
        "argmax": lambda x: torch.where(x.argmax(1, keepdim=True) > 0, 1.0, x),
        "argmin": lambda x: torch.where(x.argmin(1, keepdim=True) > 0, 1.0, x),
        "isnan": lambda x: torch.where(torch.isnan(x), 1.0, x), "isinf": lambda x: torch.where(torch.isinf(x), 1.0, x),
        "isfinite": lambda x: torch.where(torch.isfinite(x), 1.0, x), "signbit": lambda x: torch.where(torch.signbit(x), 1.0, x),
        "isposinf": lambda x: torch.where(torch.isposinf(x), 1.0, x), "isneginf": lambda x: torch.where(torch.isneginf(x), 1.0, x),
        "all": lambda x: torch.where((x > 0).all(1, keepdim=True), 1.0, x), "any": lambda x: torch.where((x > 0).any(1, keepdim=True), 1.0, x),
        "count_nonzero": lambda x: x * torch.count_nonzero(x > 0, 1)[:, None], "isin": lambda x: torch.where(torch.isin(x, torch.arange(3.0)), 1.0, x),
        "argsort": lambda x: x.gather(1, x.argsort(1)), "embedding": lambda x: functional.embedding(x.argmax(1), torch.eye(3)),
        "searchsorted": lambda x: torch.where(torch.searchsorted(torch.arange(3.0), x) > 1, 1.0, x),
        "one_hot": lambda x: x * functional.one_hot(x.argmax(1), 3),
        "bucketize": lambda x: torch.where(torch.bucketize(x, torch.arange(3.0)) > 1, 1.0, x),
    },
)  # fmt: skip

# Rules that no traced graph reaches, with the reason.
UNREACHABLE: dict[str, str] = {
    **dict.fromkeys(("grouped_mm", "histc"), "of routers, whose samples are told apart elsewhere; tests/test_wild.py reaches them"),
    "copy": "tracing rewrites a copy as the expansion that it is; what is left copies integers",
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), "a form only: acts on parameters, which are folded"),
    **dict.fromkeys(("dropout", "feature_dropout", "native_dropout", "rrelu_with_noise"), "a form only: random, so not certified"),
}
