"""The floors of BN and LN on trained networks: how far above them the product of the layers' constants is, by depth."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from normscope.auditing import audit
from normscope.lab.experiment import Comparison, Experiment, Numbers, Plot, Results, power
from normscope.lab.recalibration import recalibrated
from normscope.lab.training import Training, TrainingSettings, ends, fit, prepare
from normscope.lab.workspace import Workspace

FROZEN = {"γ and β": (), "neither": ("scale", "shift")}  # → what is not trained


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """depths: of the networks, Linear → BN → ReLU and a head. width: of their layers."""

    depths: tuple[int, ...] = (3, 6, 12)
    width: int = 32


def trials(settings: Settings, seed: int) -> dict[str, Training]:
    training = partial(settings.training, "mlp", seed=seed, width=settings.width)
    batch = {
        f"depth {depth}, {name}": training("batch", depth=depth, frozen=frozen)
        for depth in settings.depths
        for name, frozen in FROZEN.items()
    }
    return batch | {f"LN, depth {depth}": training("layer", depth=depth, frozen=("shift",)) for depth in settings.depths}


def measure(training: Training, workspace: Workspace) -> Numbers:
    """The floor and the product up to the last normalizer. BN has the statistics of the training data, LN no biases before it."""
    model, split = prepare(training, workspace)
    if training.normalizer == "layer":
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.bias.requires_grad_(False)  # they start at 0
    trained = fit(model, split, training, workspace)
    inputs = trained.split.train[0]
    if training.normalizer == "layer":
        return {**ends(trained), **of_layer_norm(trained.model, inputs)}
    model = recalibrated(trained.model, inputs)
    found = audit(model, inputs[:2], data=inputs, effort=0.1, generator=workspace.generator("audit"), local=False).floor
    assert found is not None, "a chain with the data's statistics has a floor"
    floor, product = found.value.log10, found.product.log10
    return {**ends(trained), "floor_log10": floor, "product_log10": product, "least_log10": product - floor}


@torch.no_grad()
def of_layer_norm(model: nn.Module, inputs: Tensor) -> Numbers:
    """Means over samples of log10 ∏‖Γ_kPW_k‖/s_k(x) and of log10 ‖Γ_Kz_K(x)‖/‖x‖, and the least of their difference.

    s = √(σ² + ε) and z = (y − mean y)/s: the proof of Theorem 2 holds for any ε with them.
    """
    h = inputs.flatten(1).double()
    size, product, floor, weight = h.norm(dim=1), h.new_zeros(len(h)), h.new_zeros(len(h)), h
    for layer in copy.deepcopy(model).double().children():
        if isinstance(layer, nn.LayerNorm):
            deviation = (h.var(1, correction=0) + layer.eps).sqrt()
            scaled = layer.weight[:, None] * (weight - weight.mean(0))
            product += (torch.linalg.matrix_norm(scaled, 2) / deviation).log10()
        h = layer(h)
        if isinstance(layer, nn.Linear):
            weight = layer.weight
        elif isinstance(layer, nn.LayerNorm):
            floor = (h.norm(dim=1) / size).log10()
    least = float((product - floor).min())
    return {"floor_log10": float(floor.mean()), "product_log10": float(product.mean()), "least_log10": least}


def judge(results: Results) -> Iterator[Comparison]:
    for label, group in results.by_label().items():
        floor, made, accuracy = group.mean("floor_log10"), group.mean("product_log10"), group.mean("test_accuracy")
        ours = f"product {power(made)}, floor {power(floor)}; test accuracy {accuracy:.3f}"
        above = all(least >= 0 for least in group.values("least_log10"))
        what = "∏‖ΓPW‖/σ" if label.startswith("LN") else "∏‖ΓD⁻¹W‖"
        yield Comparison(f"{label}: {what}", "above the floor", ours, above)


def plots(results: Results) -> dict[str, Plot]:
    groups = results.by_label()
    series = {
        name: (list(groups), [group.mean(path) for group in groups.values()])
        for name, path in (("product", "product_log10"), ("floor", "floor_log10"))
    }
    return {"floors": Plot("Product of layer constants and its floor", "trial", "log10", series, kind="bars")}


EXPERIMENT = Experiment(
    name="floors",
    source="our answer to Than 2025, Section 6 (docs/open-questions.md)",
    statement="No weights bring the product of a chain with BN below ‖γ_K‖/√tr Cov x, or with LN below ‖Γ_Kz_K‖/‖x‖.",
    quick=Settings(epochs=10),
    full=Settings(epochs=60, depths=(3, 6, 12, 24), width=128, seeds=(0, 1, 2)),
    trials=trials,
    measure=measure,
    judge=judge,
    plots=plots,
)
