"""Than 2025, Figures 1 to 3 and what the slides say about data: small measured versions on digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import nn

from normscope.claims.claim import claim
from normscope.claims.observed import Changes, directory, observe
from normscope.claims.verdicts import Ruling, measured
from normscope.lab.experiment import Results
from normscope.lab.measurements import LayerMeter
from normscope.lab.models.efficientnet import InvertedResidual, Stage
from normscope.lab.models.layers import convolution, initialize, linear
from normscope.lab.training import Training, ends, fit, prepare, prepared_data, shuffled
from normscope.lab.workspace import Workspace

Numbers = dict[str, float]
Judgement = Callable[[Numbers], bool]  # whether what is measured is what the paper says

RELU_NETWORK: Changes = {"networks": '{"mlp":{"width":64,"depth":10,"epochs":25}}', "normalizers": '["none"]'}
RESNET18: Changes = {"networks": '{"resnet18":{"stem":"small","epochs":2}}', "normalizers": '["batch"]'}
BLOCKS = Stage(expansion=4, kernel=3, stride=1, width=16, blocks=3)
PRODUCTS = {
    "weights_matrix": "log10 of spectral norms",
    "weights_frobenius": "log10 of Frobenius norms",
    "normalizers_layer": "log10 of 1/σ, one σ per layer",
    "normalizers_paper": "log10 of ‖1/σ‖",
    "normalizers_paper_affine": "log10 of ‖γ/σ‖",
    "normalizers_tight": "log10 of max |γ|/σ",
}


observe(__name__, {
    "T-F1": (
        "weight-norms", RELU_NETWORK,
        ": ∏‖W_k‖ (spectral, and Frobenius beside it) of a 10-layer ReLU network before and after training.",
    ),
    "T-F2": ("input-variance", RELU_NETWORK, ": variances before each activation, and the product of one 1/σ per layer."),
})  # fmt: skip
observe(__name__, {
    "T-F1-resnet18": (
        "weight-norms", RESNET18,
        ", as T-F1, for ResNet-18 with a small stem, two epochs; convolutions as matrices (out, in·kh·kw).",
    ),
    "T-F2-resnet18": (
        "input-variance", RESNET18,
        ", as T-F2, for ResNet-18: the definitions differ by tens of orders of magnitude, so each is named.",
    ),
}, long=True)  # fmt: skip


def inverted_residuals(generator: torch.Generator) -> nn.Sequential:
    """A stem, three of EfficientNet's blocks and a classifier; He-normal weights."""
    width = BLOCKS.width
    stem = [convolution(3, width, 3), nn.BatchNorm2d(width), nn.SiLU()]
    blocks = [InvertedResidual(width, BLOCKS, BLOCKS.stride, "batch") for _ in range(BLOCKS.blocks)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(width, 10))
    initialize(model, "batch", generator)
    return model


@lru_cache
def inverted_network(seed: int) -> Numbers:
    """Products before (`start: …`) and after training as the paper does, mean input variances, and the training accuracy."""
    training = Training("efficientnet-b3", "batch", epochs=6, seed=seed)
    workspace = Workspace(directory() / f"inverted-residuals-{seed}", seed)
    split = prepared_data(training, workspace).as_rgb()
    trained = fit(inverted_residuals(workspace.generator("weights")), split, training, workspace, LayerMeter)
    numbers = {"accuracy": float(ends(trained)["train_accuracy"])}
    for name, record in (("start: ", trained.history[0]), ("", trained.history[-1])):
        norms = [row["spectral_norm"] for row in record["weights"].values()]
        variances = [row["input_variance"] for row in record["normalizers"].values()]
        numbers[f"{name}layers with norm above 1"] = sum(norm > 1 for norm in norms) / len(norms)
        numbers[f"{name}mean input variance"] = sum(variances) / len(variances)
        numbers |= {f"{name}{title}": float(record["products"][product]) for product, title in PRODUCTS.items()}
    return numbers


def norms_and_variances(numbers: Numbers) -> bool:
    """Most norms exceed 1 and their product grows; variances grow, and the product of one 1/σ per layer ends below 1."""
    grown = all(numbers[name] > numbers[f"start: {name}"] for name in ("log10 of spectral norms", "mean input variance"))
    return grown and numbers["layers with norm above 1"] > 0.5 and numbers["log10 of 1/σ, one σ per layer"] < 0


@claim("T-F3")
def efficientnet(generator: torch.Generator, stated: Judgement = norms_and_variances) -> Ruling:
    """As T-F1 and T-F2 for a stack of three of EfficientNet's inverted residual blocks, 10 BN layers: not B3 itself.

    `normscope lab run efficientnet` trains B3.
    """
    numbers = inverted_network(generator.initial_seed())
    settings = "3 inverted residual blocks of 16 channels, 6 epochs; Adam 1e-3, weight decay 1e-4, batch 128, digits with ‖x‖ ≤ 1"
    return measured("norms and variances grow, huge products", stated(numbers), settings, **numbers)


@lru_cache
def data_needed(seed: int, target: float = 0.85) -> Numbers:
    """How many digits each network needs for the target accuracy on test data; infinity where all that are tried are too few."""
    needed = {}
    for depth in (2, 6):
        for normalizer in ("none", "batch"):
            needed[f"{normalizer}, depth {depth}"] = float("inf")
            for size in (50, 100, 200, 400, 800):
                training = Training(
                    "mlp", normalizer, {"width": 48, "depth": depth}, images=size, epochs=1, batch_size=50,
                    learning_rate=3e-3, weight_decay=0.0, seed=seed,
                )  # fmt: skip
                workspace = Workspace(directory() / f"data-{normalizer}-{depth}-{size}-{seed}", seed)
                trained = fit(*prepare(training, workspace), training, workspace, batches=partial(_passes, 6000 // size))
                if ends(trained)["test_accuracy"] >= target:
                    needed[f"{normalizer}, depth {depth}"] = float(size)
                    break
    return needed


def _passes(number: int, classes: torch.Tensor, size: int, order: torch.Generator) -> Iterator[torch.Tensor]:
    """Batches of several passes as one epoch: the end counts, and what an epoch evaluates and saves takes longer than its steps."""
    for _ in range(number):
        yield from shuffled(classes, size, order)


def saves_more_when_deeper(needed: Numbers) -> bool:
    """The plain network needs at least twice the data, and the factor grows with depth."""
    shallow, deep = (needed[f"none, depth {depth}"] / needed[f"batch, depth {depth}"] for depth in (2, 6))
    return deep >= 2 and deep > shallow


@claim("T-S-data")
def less_data(generator: torch.Generator, stated: Judgement = saves_more_when_deeper) -> Ruling:
    """The least of 50, 100, …, 800 digits with which a network of depth 2 or 6 reaches 85 % on test data, with and without BN."""
    needed = data_needed(generator.initial_seed())
    return measured("exponentially less", stated(needed), "width 48, Adam 3e-3, 120 steps, batch 50, 85 % of test digits", **needed)


observe(__name__, {
    "T-S5.2-guide": (
        "capacity-penalty", {"epochs": "40", "penalties": "[0.0,0.01,0.1]"},
        ": a multiple of Σ log ‖W_l‖ and Σ log gains in the loss, with BN and without; the best of two factors.",
    ),
})  # fmt: skip


# Statements to be refuted: what the claims above must tell from what was measured.


def backwards(results: Results) -> Results:
    """Training is said to have gone the other way."""
    turned = [[{**record, "epoch": epoch} for epoch, record in enumerate(t.numbers["history"][::-1])] for t in results]
    return Results([replace(t, numbers={**t.numbers, "history": history}) for t, history in zip(results, turned, strict=True)])


def unpenalized(results: Results) -> Results:
    """What was trained with the first penalty is said to have been trained without, and the other way round."""
    first = next(t.parameters["penalty"] for t in results if t.parameters["penalty"])
    other = {first: 0.0, 0.0: first}

    def said(penalty: float) -> float:
        return other.get(penalty, penalty)

    return Results([replace(t, parameters={**t.parameters, "penalty": said(t.parameters["penalty"])}) for t in results])


def inflated(results: Results) -> Results:
    """The product of spectral norms is said to have reached the paper's 10^50."""
    changed = deepcopy(list(results))
    for trial in changed:
        trial.numbers["history"][-1]["products"]["weights_matrix"] = 50.0
    return Results(changed)


def grow_but_amplify(numbers: Numbers) -> bool:
    """Norms and variances grow, and the product of 1/σ is above 1: Figure 3's statement with a sign changed."""
    name = "log10 of 1/σ, one σ per layer"
    return norms_and_variances({**numbers, name: -numbers[name]})


def saves_no_more_when_deeper(needed: Numbers) -> bool:
    shallow, deep = (needed[f"none, depth {depth}"] / needed[f"batch, depth {depth}"] for depth in (2, 6))
    return deep <= shallow
