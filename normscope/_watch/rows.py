"""From what was fetched of a sampled step to a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normscope._watch.columns import ATTENTION_METRICS, BLOCK_METRICS, INPUT_METRICS, METRICS, MOVED_METRICS, PRODUCTS
from normscope._watch.layers import WatchedLayer
from normscope._watch.motion import derived, effective_learning_rate
from normscope._watch.stepping import StepView

SEEN = {"block": BLOCK_METRICS, "attention": ATTENTION_METRICS}  # what is measured of them; of others, INPUT_METRICS


def assemble(
    layers: Sequence[WatchedLayer], view: StepView, fetched: Mapping[Any, np.ndarray], gradient_names: Sequence[str]
) -> dict[str, Any]:
    """Every list column of a row, NaN where a metric does not apply or was not seen, and the scalars that follow from them."""
    row: dict[str, Any] = {name: np.full(len(layers), np.nan) for name in METRICS}
    rows = np.array(view.rows, dtype=int)
    for index, layer in enumerate(layers):
        metrics = SEEN.get(layer.role, INPUT_METRICS) if layer.role != "weight" else ()
        inputs = fetched.get((layer.role if layer.role in SEEN else "input", layer.module, layer.call))
        for name, value in zip(metrics, inputs if inputs is not None else (), strict=False):
            row[name][index] = value
        if layer.role == "block" and ("gain", layer.module, layer.call) in fetched:
            row["backward_gain"][index] = fetched["gain", layer.module, layer.call]
        if ("moved", index) in fetched:
            for name, value in zip(MOVED_METRICS, fetched["moved", index], strict=True):
                row[name][index] = value
        for name, metric in (("weight", "gamma"), ("bias", "beta")):
            if (name, index) in fetched:
                row[f"{metric}_min"][index], row[f"{metric}_max"][index] = fetched[name, index]
    if "frobenius_norm" in fetched:
        row["frobenius_norm"][rows] = fetched["frobenius_norm"]
    if "spectral" in fetched:
        places = list(view.spectral)
        row["spectral_norm"][places], row["spectral_residual"][places] = fetched["spectral"].T
    if "row_norms" in fetched:
        row["rms_to_max_norm"][list(view.spectral)] = fetched["row_norms"]
    if "updates" in fetched:
        row["update_norm"][rows], row["update_dot_weight"][rows] = fetched["updates"]
    if "hashes" in fetched:
        row["hashes"] = fetched["hashes"]
    row["weights_seen"] = "frobenius_norm" in fetched
    _add_gradients(row, layers, fetched, gradient_names)
    row.update(derived(row))
    sizes = np.array([float(np.prod(layer.shape)) if layer.parameter and not layer.sharded else np.nan for layer in layers])
    with np.errstate(all="ignore"):
        row["update_rms"] = row["update_norm"] / np.sqrt(sizes)
    _add_effective_rates(row, layers, rows, fetched)
    row.update(products(row, layers))
    row["loss"], row["accuracy"] = (float(fetched[name]) if name in fetched else np.nan for name in ("loss", "accuracy"))
    row["loss_given"] = "loss" in fetched
    return row


def _add_gradients(
    row: dict[str, Any], layers: Sequence[WatchedLayer], fetched: Mapping[Any, np.ndarray], names: Sequence[str]
) -> None:
    scale = float(fetched.get("loss_scale", np.array(1.0)))
    row["loss_scale"] = scale
    if "total_gradient_norm" in fetched:
        row["total_gradient_norm"] = float(fetched["total_gradient_norm"])
    row["gradient_seen"] = np.zeros(len(layers), bool)
    places = {layer.parameter: index for index, layer in enumerate(layers) if layer.parameter}
    for column, name in enumerate(names):
        index = places.get(name)
        if index is not None and "gradients" in fetched:
            row["gradient_norm"][index], row["gradient_dot_weight"][index] = fetched["gradients"][:, column] / scale
            row["gradient_seen"][index] = True


def _add_effective_rates(
    row: dict[str, Any], layers: Sequence[WatchedLayer], rows: np.ndarray, fetched: Mapping[Any, np.ndarray]
) -> None:
    if "rates" not in fetched:
        return
    row["learning_rate"] = float(fetched["learning_rate"][0])
    for place, rate, angle in zip(rows, *fetched["rates"], strict=True):
        layer = layers[place]
        if layer.scale_free:
            row["equilibrium_angle"][place] = angle
        if layer.scale_free and layer.effective_power is not None:
            row["effective_lr"][place] = effective_learning_rate(rate, row["frobenius_norm"][place], layer.effective_power)
    known = row["effective_lr"][np.isfinite(row["effective_lr"]) & (row["effective_lr"] > 0)]
    if len(known) > 1:
        row["effective_lr_spread"] = float(known.max() / known.min())


def products(row: Mapping[str, Any], layers: Sequence[WatchedLayer]) -> dict[str, float]:
    """log10 of the product over depth: of the weights that multiply, and of every normalizer; 0 where there are none."""
    found = {}
    with np.errstate(all="ignore"):
        for name, metric in PRODUCTS.items():
            role = "weight" if metric == "spectral_norm" else "normalizer"
            chosen = [i for i, layer in enumerate(layers) if layer.role == role and (layer.in_product or role == "normalizer")]
            found[name] = float(np.log10(np.asarray(row[metric], np.float64)[chosen]).sum())
    return found
