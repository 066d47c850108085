"""Than 2025, Figures 1 to 3 and what the slides say about data: small measured versions on digits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from math import log10

import torch
from torch import Tensor, nn

from normscope.claims.calculus import EPSILON
from normscope.claims.ledger import THAN, claim
from normscope.claims.training import accuracy, batches, digits_mlp, flat_digits, train
from normscope.claims.verdicts import Outcome, measured
from normscope.lab.models.resnet18 import resnet18

Numbers = dict[str, float]
Says = Callable[[Numbers], bool]  # whether what is measured is what the paper says

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
SETTINGS = "Adam 1e-3, weight decay 1e-4, batch 128, He-normal, digits with ‖x‖ ≤ 1"


def weight_matrices(model: nn.Module) -> list[Tensor]:
    """Weights of linear maps and convolutions, the latter as (out, in·kh·kw)."""
    return [layer.weight.detach().flatten(1) for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]


def input_variances(model: nn.Module, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(σ² + ε, γ) per channel before each BN layer, else before each ReLU with γ = 1; σ² over batch and positions, in training."""
    seen: list[tuple[Tensor, Tensor]] = []
    copied = copy.deepcopy(model).train()  # a training pass moves the running statistics
    normalized = any(isinstance(layer, BATCH_NORMS) for layer in copied.modules())

    def keep(layer: nn.Module, arguments: tuple[Tensor]) -> None:
        variance = arguments[0].transpose(0, 1).flatten(1).var(1, correction=0) + EPSILON
        seen.append((variance, layer.weight.detach() if normalized else torch.ones_like(variance)))

    for layer in copied.modules():
        if isinstance(layer, BATCH_NORMS if normalized else nn.ReLU):
            layer.register_forward_pre_hook(keep)
    with torch.no_grad():
        copied(inputs)
    return seen


def snapshot(model: nn.Module, inputs: Tensor) -> Numbers:
    """The products of the paper's figures under each definition, as log10."""
    weights = weight_matrices(model)
    norms = [torch.linalg.matrix_norm(weight, 2) for weight in weights]
    layers = input_variances(model, inputs)

    def log_product(factors: list[Tensor]) -> float:
        return sum(log10(float(factor)) for factor in factors)

    return {
        "layers with norm above 1": float(torch.stack(norms).gt(1).double().mean()),
        "log10 of spectral norms": log_product(norms),
        "log10 of Frobenius norms": log_product([weight.norm() for weight in weights]),
        "log10 of 1/σ, one σ a layer": log_product([variance.mean().rsqrt() for variance, _ in layers]),
        "log10 of ‖1/σ‖": log_product([variance.rsqrt().norm() for variance, _ in layers]),
        "log10 of ‖γ/σ‖": log_product([(gamma * variance.rsqrt()).norm() for variance, gamma in layers]),
        "log10 of max |γ|/σ": log_product([(gamma.abs() * variance.rsqrt()).max() for variance, gamma in layers]),
        "mean input variance": float(torch.stack([variance.mean() for variance, _ in layers]).mean()),
    }


def before_and_after(model: nn.Module, data: tuple[Tensor, ...], steps: int, generator: torch.Generator) -> Numbers:
    """Train as the paper does; every number of the snapshot before (`start: …`) and after, and the training accuracy."""
    inputs, classes = data[0], data[1]
    start = snapshot(model, inputs[:256])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    train(model, batches(inputs, classes, 128, steps, generator), optimizer)
    end = snapshot(model, inputs[:256])
    return {f"start: {name}": value for name, value in start.items()} | end | {"accuracy": accuracy(model, inputs, classes)}


@lru_cache
def relu_network(seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    return before_and_after(digits_mlp(10, 64, "none", generator), flat_digits(unit_ball=True), 300, generator)


@lru_cache
def residual_network(seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    return before_and_after(resnet18(10, stem="small", generator=generator), _images(), 22, generator)


@lru_cache
def inverted_network(seed: int) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    return before_and_after(inverted_residuals(generator), _images(), 66, generator)


def norms_grow(numbers: Numbers) -> bool:
    """Most norms exceed 1 and their product grows in training."""
    return (
        numbers["layers with norm above 1"] > 0.5 and numbers["log10 of spectral norms"] > numbers["start: log10 of spectral norms"]
    )


def variances_reduce(numbers: Numbers) -> bool:
    """Input variances grow in training and the product of 1/σ ends below 1."""
    return numbers["mean input variance"] > numbers["start: mean input variance"] and numbers["log10 of 1/σ, one σ a layer"] < 0


def norms_and_variances(numbers: Numbers) -> bool:
    return norms_grow(numbers) and variances_reduce(numbers)


def _figure(theirs: str, numbers: Numbers, stated: Says, settings: str, *names: str) -> Outcome:
    ours = {name: value for name, value in numbers.items() if any(part in name for part in (*names, "accuracy"))}
    return measured(theirs, stated(numbers), f"{settings}; {SETTINGS}", **ours)


@claim(
    "T-F1",
    THAN,
    "Figure 1, 10-layer ReLU network",
    "Norms of the weights exceed 1 and their product grows by orders of magnitude in training.",
)
def weight_norms(generator: torch.Generator, stated: Says = norms_grow) -> Outcome:
    """∏‖W_k‖ (spectral, and Frobenius beside it) of a 10-layer ReLU network before and after training."""
    numbers = relu_network(generator.initial_seed())
    return _figure("norms well above 1, product rising; ResNet-18 up to 10^50", numbers, stated, "10 × 64, 300 steps", "norm")


@claim(
    "T-F2",
    THAN,
    "Figure 2, 10-layer ReLU network",
    "Input variances grow past 1 in training, so that ∏1/σ_k becomes exponentially small.",
)
def input_variance(generator: torch.Generator, stated: Says = variances_reduce) -> Outcome:
    """Variances before each activation; ∏ of one 1/σ a layer (the figure), of ‖1/σ‖ (Lemma 1) and of max |γ|/σ (sharp)."""
    numbers = relu_network(generator.initial_seed())
    return _figure("variances past 1, ∏1/σ falling; ResNet-18 10^-25", numbers, stated, "10 × 64, 300 steps", "σ", "variance")


@claim("T-F1-resnet18", THAN, "Figure 1, ResNet-18", "The product of ResNet-18's weight norms reaches 10^50.", long=True)
def weight_norms_resnet18(generator: torch.Generator, stated: Says = norms_grow) -> Outcome:
    """As T-F1 for ResNet-18 with a small stem; convolutions as matrices (out, in·kh·kw)."""
    numbers = residual_network(generator.initial_seed())
    return _figure("product up to 10^50", numbers, stated, "ResNet-18, small stem, 22 steps", "norm")


@claim(
    "T-F2-resnet18",
    THAN,
    "Figure 2 and slides, ResNet-18",
    "∏1/σ_k of ResNet-18's 20 BN layers is about 10^-25; the slides give 1.35·10^-8 for ∏‖γ/σ‖.",
    long=True,
)
def input_variance_resnet18(generator: torch.Generator, stated: Says = variances_reduce) -> Outcome:
    """As T-F2 for ResNet-18: the definitions differ by tens of orders of magnitude, so each is named."""
    numbers = residual_network(generator.initial_seed())
    return _figure("10^-25; slides 1.35·10^-8", numbers, stated, "ResNet-18, small stem, 22 steps", "σ", "variance")


class InvertedResidual(nn.Module):
    """x + project(gate · depthwise(expand(x))) with BN after every convolution: EfficientNet's block."""

    def __init__(self, channels: int, expansion: int = 4) -> None:
        super().__init__()
        hidden = channels * expansion
        self.expand = nn.Sequential(
            nn.utils.skip_init(nn.Conv2d, channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU()
        )
        depthwise = nn.utils.skip_init(nn.Conv2d, hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(hidden), nn.SiLU())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.utils.skip_init(nn.Conv2d, hidden, hidden, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.utils.skip_init(nn.Conv2d, hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(self.expand(x))
        result: Tensor = x + self.project(hidden * self.gate(hidden))
        return result


def inverted_residuals(generator: torch.Generator, channels: int = 16, blocks: int = 3) -> nn.Sequential:
    """A small stack of EfficientNet's blocks; He-normal weights."""
    stem = [nn.utils.skip_init(nn.Conv2d, 3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.SiLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.utils.skip_init(nn.Linear, channels, 10)]
    model = nn.Sequential(*stem, *(InvertedResidual(channels) for _ in range(blocks)), *head)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


@claim(
    "T-F3", THAN, "Figure 3, EfficientNet-B3", "Weight norms and input variances of EfficientNet-B3 grow in training and end large."
)
def efficientnet(generator: torch.Generator, stated: Says = norms_and_variances) -> Outcome:
    """As T-F1 and T-F2 for a stack of three of EfficientNet's inverted residual blocks, 10 BN layers: not B3 itself."""
    numbers = inverted_network(generator.initial_seed())
    return _figure(
        "norms and variances grow, huge products",
        numbers,
        stated,
        "3 inverted residual blocks of 16 channels, 66 steps",
        "norm",
        "σ",
        "variance",
    )


@lru_cache
def data_needed(seed: int, target: float = 0.85) -> Numbers:
    """How many digits each network needs for the target accuracy on test data; infinity where all that are tried are too few."""
    inputs, classes, test_inputs, test_classes = flat_digits(unit_ball=True)
    needed = {}
    for depth in (2, 6):
        for normalizer in ("none", "batch"):
            needed[f"{normalizer}, depth {depth}"] = float("inf")
            for size in (50, 100, 200, 400, 800):
                generator = torch.Generator().manual_seed(seed)
                model = digits_mlp(depth, 48, normalizer, generator)
                data = batches(inputs[:size], classes[:size], 50, 120, generator)
                train(model, data, torch.optim.Adam(model.parameters(), lr=3e-3))
                if accuracy(model, test_inputs, test_classes) >= target:
                    needed[f"{normalizer}, depth {depth}"] = float(size)
                    break
    return needed


def saves_more_when_deeper(needed: Numbers) -> bool:
    """The plain network needs at least twice the data, and the factor grows with depth."""
    shallow, deep = (needed[f"none, depth {depth}"] / needed[f"batch, depth {depth}"] for depth in (2, 6))
    return deep >= 2 and deep > shallow


@claim(
    "T-S-data", THAN, "Slides", "A normalized network may need exponentially less training data, and a deeper one saves more.",
    "It follows only from the value of the bound, which is vacuous here; what networks need is measured.",
)  # fmt: skip
def less_data(generator: torch.Generator, stated: Says = saves_more_when_deeper) -> Outcome:
    """The least of 50, 100, …, 800 digits with which a network of depth 2 or 6 reaches 85 % on test data, with and without BN."""
    needed = data_needed(generator.initial_seed())
    return measured("exponentially less", stated(needed), "width 48, Adam 3e-3, 120 steps, batch 50, 85 % of test digits", **needed)


@lru_cache(1)
def _images() -> tuple[Tensor, Tensor]:
    """Digits as RGB images with ‖x‖ ≤ 1."""
    inputs, classes, _, _ = flat_digits(unit_ball=True)
    return inputs.reshape(-1, 1, 8, 8).expand(-1, 3, -1, -1) / 3**0.5, classes
