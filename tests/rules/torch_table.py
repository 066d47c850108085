"""Every module of torch.nn and function of torch.nn.functional that acts on floating-point tensors, with what normscope says of it.

A case is (model, shape of one sample). NO_FUNCTION: names that are no function of floating-point tensors, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import Function, randn

Case = tuple[nn.Module, tuple[int, ...]]


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Repeated(nn.Module):
    """A module of several inputs, given the same one for all."""

    def __init__(self, inner: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(*[x] * self.times)
        return found


class LogProbabilities(nn.AdaptiveLogSoftmaxWithLoss):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.log_prob(x)


class WithClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LinearCrossEntropyLoss(6, 4, reduction="none")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, CLASSES.expand(len(x)))
        return found


class Against(nn.Module):
    """A loss per sample against a fixed target."""

    def __init__(self, loss: Callable[..., Tensor], *others: Tensor) -> None:
        super().__init__()
        self.loss, self.others = loss, others

    def forward(self, x: Tensor) -> Tensor:
        others = (other.expand(len(x), *other.shape[1:]) for other in self.others)
        return self.loss(x, *(other.to(x.dtype) if other.is_floating_point() else other for other in others))


def of(function: Callable[[Tensor], Tensor], *shape: int) -> Case:
    return Function(function), shape


VECTOR, LINE, IMAGE, VOLUME = (6,), (4, 8), (4, 8, 8), (4, 4, 4, 4)
SIDES = {1: LINE, 2: IMAGE, 3: VOLUME}


def _by_dimension(name: str, make: Callable[[int], nn.Module], only: tuple[int, ...] = (1, 2, 3)) -> dict[str, Case]:
    return {name.format(d): (make(d), SIDES[d]) for d in only}


def _module(name: str) -> Callable[..., nn.Module]:
    found: Callable[..., nn.Module] = getattr(nn, name)
    return found


ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish", "RReLU", "ReLU",
    "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Identity", "Flatten", "PReLU",
)  # fmt: skip
CLASSES = torch.tensor([2])
SIGNS = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, 1.0]])
OTHER = randn(1, 6)

MODULES: dict[str, Case] = {
    **{name: (_module(name)(), VECTOR) for name in ACTIVATIONS},
    **_by_dimension("AdaptiveAvgPool{}d", lambda d: _module(f"AdaptiveAvgPool{d}d")(2)),
    **_by_dimension("AdaptiveMaxPool{}d", lambda d: _module(f"AdaptiveMaxPool{d}d")(2)),
    **_by_dimension("AvgPool{}d", lambda d: _module(f"AvgPool{d}d")(2)),
    **_by_dimension("MaxPool{}d", lambda d: _module(f"MaxPool{d}d")(2)),
    **_by_dimension("LPPool{}d", lambda d: _module(f"LPPool{d}d")(2, 2)),
    **_by_dimension("MaxUnpool{}d", lambda d: Function(lambda x: _unpooled(x, d))),
    **_by_dimension("BatchNorm{}d", lambda d: _module(f"BatchNorm{d}d")(4)),
    **_by_dimension("InstanceNorm{}d", lambda d: _module(f"InstanceNorm{d}d")(4)),
    **_by_dimension("Conv{}d", lambda d: _module(f"Conv{d}d")(4, 3, 3)),
    **_by_dimension("ConvTranspose{}d", lambda d: _module(f"ConvTranspose{d}d")(4, 3, 3)),
    **_by_dimension("Dropout{}d", lambda d: _module(f"Dropout{d}d")()),
    **_by_dimension("FractionalMaxPool{}d", lambda d: _module(f"FractionalMaxPool{d}d")(2, output_size=2), (2, 3)),
    **{
        name: case
        for pad in ("CircularPad{}d", "ReflectionPad{}d", "ReplicationPad{}d", "ZeroPad{}d")
        for name, case in _by_dimension(pad, lambda d, pad=pad: _module(pad.format(d))(1)).items()
    },
    **_by_dimension("ConstantPad{}d", lambda d: _module(f"ConstantPad{d}d")(1, 0.5)),
    "AlphaDropout": (nn.AlphaDropout(), VECTOR),
    "Dropout": (nn.Dropout(), VECTOR),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(), LINE),
    "Bilinear": (Repeated(nn.Bilinear(6, 6, 2)), VECTOR),
    "ChannelShuffle": (nn.ChannelShuffle(2), IMAGE),
    "CosineSimilarity": (Against(nn.CosineSimilarity(), OTHER), VECTOR),
    "CrossMapLRN2d": (nn.CrossMapLRN2d(2), IMAGE),
    "Fold": (nn.Fold(4, 2), (8, 9)),
    "Unfold": (nn.Unfold(2), IMAGE),
    "GLU": (nn.GLU(), VECTOR),
    "GroupNorm": (nn.GroupNorm(2, 4), IMAGE),
    "LayerNorm": (nn.LayerNorm(6), VECTOR),
    "RMSNorm": (nn.RMSNorm(6), VECTOR),
    "SyncBatchNorm": (nn.SyncBatchNorm(4), IMAGE),
    "LocalResponseNorm": (nn.LocalResponseNorm(2), IMAGE),
    "Linear": (nn.Linear(6, 3), VECTOR),
    "LogSoftmax": (nn.LogSoftmax(-1), VECTOR),
    "Softmax": (nn.Softmax(-1), VECTOR),
    "Softmin": (nn.Softmin(-1), VECTOR),
    "Softmax2d": (nn.Softmax2d(), IMAGE),
    "PairwiseDistance": (Against(nn.PairwiseDistance(), OTHER), VECTOR),
    "PixelShuffle": (nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": (nn.PixelUnshuffle(2), IMAGE),
    "Threshold": (nn.Threshold(0.1, 0.1), VECTOR),
    "Unflatten": (nn.Unflatten(1, (2, 3)), VECTOR),
    "Upsample": (nn.Upsample(scale_factor=2), IMAGE),
    "UpsamplingBilinear2d": (nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "UpsamplingNearest2d": (nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    "GRU": (First(nn.GRU(6, 3, batch_first=True)), (4, 6)),
    "LSTM": (First(nn.LSTM(6, 3, batch_first=True)), (4, 6)),
    "RNN": (First(nn.RNN(6, 3, batch_first=True)), (4, 6)),
    "GRUCell": (nn.GRUCell(6, 3), VECTOR),
    "LSTMCell": (First(nn.LSTMCell(6, 3)), VECTOR),
    "RNNCell": (nn.RNNCell(6, 3), VECTOR),
    "MultiheadAttention": (First(Repeated(nn.MultiheadAttention(6, 2, batch_first=True), 3)), (4, 6)),
    "Transformer": (Repeated(nn.Transformer(6, 2, 1, 1, 8, batch_first=True)), (4, 6)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (4, 6)),
    "TransformerEncoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1), (4, 6)),
    "TransformerDecoderLayer": (Repeated(nn.TransformerDecoderLayer(6, 2, 8, batch_first=True)), (4, 6)),
    "TransformerDecoder": (Repeated(nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8, batch_first=True), 1)), (4, 6)),
    "BCELoss": (Against(lambda x, y: nn.BCELoss(reduction="none")(x.sigmoid(), y), SIGNS.clamp(0, 1)), VECTOR),
    "BCEWithLogitsLoss": (Against(nn.BCEWithLogitsLoss(reduction="none"), SIGNS.clamp(0, 1)), VECTOR),
    "CosineEmbeddingLoss": (Against(nn.CosineEmbeddingLoss(reduction="none"), OTHER, torch.ones(1)), VECTOR),
    "CrossEntropyLoss": (Against(nn.CrossEntropyLoss(reduction="none"), CLASSES), VECTOR),
    "GaussianNLLLoss": (Against(nn.GaussianNLLLoss(reduction="none"), OTHER, torch.ones(1, 6)), VECTOR),
    "HingeEmbeddingLoss": (Against(nn.HingeEmbeddingLoss(reduction="none"), SIGNS), VECTOR),
    "HuberLoss": (Against(nn.HuberLoss(reduction="none"), OTHER), VECTOR),
    "KLDivLoss": (Against(nn.KLDivLoss(reduction="none"), OTHER.softmax(-1)), VECTOR),
    "L1Loss": (Against(nn.L1Loss(reduction="none"), OTHER), VECTOR),
    "MSELoss": (Against(nn.MSELoss(reduction="none"), OTHER), VECTOR),
    "MarginRankingLoss": (Against(nn.MarginRankingLoss(reduction="none"), OTHER, SIGNS), VECTOR),
    "MultiLabelMarginLoss": (Against(nn.MultiLabelMarginLoss(reduction="none"), torch.tensor([[1, 3, -1, 0, 0, 0]])), VECTOR),
    "MultiLabelSoftMarginLoss": (Against(nn.MultiLabelSoftMarginLoss(reduction="none"), SIGNS.clamp(0, 1)), VECTOR),
    "MultiMarginLoss": (Against(nn.MultiMarginLoss(reduction="none"), CLASSES), VECTOR),
    "NLLLoss": (Against(nn.NLLLoss(reduction="none"), CLASSES), VECTOR),
    "PoissonNLLLoss": (Against(nn.PoissonNLLLoss(reduction="none"), OTHER.abs()), VECTOR),
    "SmoothL1Loss": (Against(nn.SmoothL1Loss(reduction="none"), OTHER), VECTOR),
    "SoftMarginLoss": (Against(nn.SoftMarginLoss(reduction="none"), SIGNS), VECTOR),
    "TripletMarginLoss": (Against(nn.TripletMarginLoss(reduction="none"), OTHER, -OTHER), VECTOR),
    "TripletMarginWithDistanceLoss": (Against(nn.TripletMarginWithDistanceLoss(reduction="none"), OTHER, -OTHER), VECTOR),
    "AdaptiveLogSoftmaxWithLoss": (LogProbabilities(6, 8, [4]), VECTOR),
    "CTCLoss": (
        Function(lambda x: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), torch.tensor([[1, 2]]), *torch.tensor([[5], [2]]), reduction="none")),
        (5, 4),
    ),
    "LinearCrossEntropyLoss": (WithClasses(), VECTOR),
}  # fmt: skip


def _unpooled(x: Tensor, d: int) -> Tensor:
    pooled, places = getattr(F, f"max_pool{d}d")(x, 2, return_indices=True)
    found: Tensor = getattr(F, f"max_unpool{d}d")(pooled, places, 2)
    return found


NO_FUNCTION = {
    **dict.fromkeys(
        ("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"), "a container"
    ),
    **dict.fromkeys(("RNNBase", "RNNCellBase"), "a base class"),
    **{name: "takes its shape at the first call, and then is another class" for name in dir(nn) if name.startswith("Lazy")},
    "DataParallel": "a wrapper, audited as what it wraps",
    **dict.fromkeys(("Embedding", "EmbeddingBag", "embedding", "embedding_bag"), "takes ids, which are no metric space"),
    "one_hot": "takes integers",
    "NLLLoss2d": "an old name of NLLLoss",
    **dict.fromkeys(("upsample", "upsample_bilinear", "upsample_nearest"), "old names of interpolate"),
    **dict.fromkeys(("scaled_mm", "scaled_grouped_mm"), "takes float8, which no graph of float64 values shows"),
    "grouped_mm": "torch runs it in bfloat16 on some devices alone; tests/certify/test_settling.py has one with experts",
    "multi_head_attention_forward": "what MultiheadAttention calls",
    "conv_tbc": "its batch is axis 1, so that samples are not along axis 0",
    "pdist": "distances between the samples of a batch",
    "affine_grid": "makes a grid, which grid_sample takes as a constant",
    "gumbel_softmax": "draws random numbers",
}

# refused: what the error or the reason must say
REFUSED = {
    "CrossMapLRN2d": "could not be turned into a graph",  # a Python autograd function
    "GaussianNLLLoss": "could not be traced",  # it looks at the values of the variance
    "CTCLoss": "could not be traced",  # the lengths of targets decide on shapes
    "FractionalMaxPool2d": "draws random numbers",
    "FractionalMaxPool3d": "draws random numbers",
    "MultiLabelMarginLoss": "multilabel_margin_loss",  # no rule: -1 ends a list of classes
}

# no finite constant on any ball, with a reason that says why
NOWHERE = {"Hardshrink": "jumps", **dict.fromkeys(("MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"), "order")}

POOLS = {"adaptive_avg": "AdaptiveAvg", "adaptive_max": "AdaptiveMax", "avg": "Avg", "max": "Max", "lp": "LP"}

# functions that a module of the table calls, by the module's name; the others have a case of their own
CALLED_BY = {
    "binary_cross_entropy": "BCELoss", "binary_cross_entropy_with_logits": "BCEWithLogitsLoss", "cross_entropy": "CrossEntropyLoss",
    "cosine_embedding_loss": "CosineEmbeddingLoss", "ctc_loss": "CTCLoss", "gaussian_nll_loss": "GaussianNLLLoss",
    "hinge_embedding_loss": "HingeEmbeddingLoss", "huber_loss": "HuberLoss", "kl_div": "KLDivLoss", "l1_loss": "L1Loss",
    "mse_loss": "MSELoss", "margin_ranking_loss": "MarginRankingLoss", "multi_margin_loss": "MultiMarginLoss",
    "multilabel_margin_loss": "MultiLabelMarginLoss", "multilabel_soft_margin_loss": "MultiLabelSoftMarginLoss", "nll_loss": "NLLLoss",
    "poisson_nll_loss": "PoissonNLLLoss", "smooth_l1_loss": "SmoothL1Loss", "soft_margin_loss": "SoftMarginLoss",
    "triplet_margin_loss": "TripletMarginLoss", "triplet_margin_with_distance_loss": "TripletMarginWithDistanceLoss",
    "linear_cross_entropy": "LinearCrossEntropyLoss", "alpha_dropout": "AlphaDropout", "feature_alpha_dropout": "FeatureAlphaDropout",
    "batch_norm": "BatchNorm2d", "instance_norm": "InstanceNorm2d", "interpolate": "Upsample", "logsigmoid": "LogSigmoid",
    "native_channel_shuffle": "ChannelShuffle", "local_response_norm": "LocalResponseNorm", "pad": "ConstantPad2d",
    "pairwise_distance": "PairwiseDistance", "cosine_similarity": "CosineSimilarity", "scaled_dot_product_attention": "MultiheadAttention",
    "channel_shuffle": "ChannelShuffle", "pixel_shuffle": "PixelShuffle", "pixel_unshuffle": "PixelUnshuffle",
    "group_norm": "GroupNorm", "layer_norm": "LayerNorm", "log_softmax": "LogSoftmax", "rms_norm": "RMSNorm", "leaky_relu": "LeakyReLU",
    **{f"{name}_pool{d}d": f"{module}Pool{d}d" for d in (1, 2, 3) for name, module in POOLS.items()},
    **{f"{name}_with_indices": module for name, module in (
        *((f"{kind}max_pool{d}d", f"MaxUnpool{d}d") for kind in ("", "adaptive_") for d in (1, 2, 3)),
        *((f"fractional_max_pool{d}d", f"FractionalMaxPool{d}d") for d in (2, 3)),
    )},
    **{f"max_unpool{d}d": f"MaxUnpool{d}d" for d in (1, 2, 3)},
    **{f"fractional_max_pool{d}d": f"FractionalMaxPool{d}d" for d in (2, 3)},
    **{f"{name}{d}d": f"{module}{d}d" for d in (1, 2, 3) for name, module in (("conv", "Conv"), ("conv_transpose", "ConvTranspose"), ("dropout", "Dropout"))},
}  # fmt: skip

FUNCTIONS: dict[str, Case] = {
    "normalize": of(F.normalize, 6),
    "grid_sample": of(lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2, dtype=x.dtype) + 0.3, align_corners=False), 4, 8, 8),
}
