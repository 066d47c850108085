"""What is measured of a network between two epochs: norms of its weights, variances of what enters its layers, their products."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from normscope._watch.columns import GAIN_METRICS, INPUT_METRICS
from normscope._watch.forward import ForwardView
from normscope._watch.layers import Handwritten, is_observable
from normscope._watch.pairing import handwritten_in
from normscope._watch.statistics import as_normalizer
from normscope.auditing import audit
from normscope.core.data import Call
from normscope.core.errors import NormscopeError
from normscope.core.randomness import preserved_random_state
from normscope.graph.parametric import trace_parameters
from normscope.lab.experiment import Numbers

PRODUCTS = {  # log10 of a product over layers ← whose rows, and what of them
    "weights_matrix": ("weights", "spectral_norm"),
    "weights_frobenius": ("weights", "frobenius_norm"),
    "normalizers_tight": ("normalizers", "gain_tight"),
    "normalizers_paper": ("normalizers", "gain_paper"),
    "normalizers_paper_affine": ("normalizers", "gain_paper_affine"),
    "normalizers_layer": ("normalizers", "gain_layer"),
    "activations_layer": ("activations", "inverse_deviation"),
}

Rows = dict[str, dict[str, float]]  # layer → quantity → value


class LayerMeter:
    """Weights, normalizers and activations of one model, looked at on one fixed batch with batch statistics."""

    def __init__(self, model: nn.Module, batch: torch.Tensor) -> None:
        self.batch = batch
        self.handwritten: Mapping[str, Handwritten] = {}
        with preserved_random_state(), suppress(NormscopeError):  # a model that cannot be traced has its modules all the same
            self.handwritten = handwritten_in(trace_parameters(copy.deepcopy(model), Call((batch[:2],), {})), model)

    def __call__(self, model: nn.Module) -> Numbers:
        """Rows of `weights`, `normalizers` and `activations`, and `products`, the log10 over the layers of each quantity."""
        rows: dict[str, Rows] = {"weights": weight_norms(model), **self._inputs(model)}
        return {**rows, "products": products(rows)}

    def _inputs(self, model: nn.Module) -> dict[str, Rows]:
        copied = copy.deepcopy(model).train()  # a training pass moves running statistics
        view = ForwardView(copied, lambda what, look, *arguments: look(*arguments))
        view.handwritten = self.handwritten
        view.start(lambda hook: hook)
        try:
            copied(self.batch)
        finally:
            view.stop()
        rows: dict[str, Rows] = {"normalizers": {}, "activations": {}}
        for (path, call), values in view.inputs.items():
            name = path if call == 1 else f"{path}#{call}"
            found = dict(zip(INPUT_METRICS, values.tolist(), strict=True))
            variance = found["input_variance"]
            if self._normalizes(copied.get_submodule(path), path):
                rows["normalizers"][name] = {"input_variance": variance, **{metric: found[metric] for metric in GAIN_METRICS}}
            else:
                deviation = math.sqrt(variance) if variance > 0 else variance
                inverse = 1 / deviation if deviation else math.inf
                rows["activations"][name] = {"input_variance": variance, "inverse_deviation": inverse}
        return rows

    def _normalizes(self, module: nn.Module, path: str) -> bool:
        if is_observable(module):
            return as_normalizer(module, self.batch.dim()) is not None
        return self.handwritten[path].normalizer is not None


def weight_norms(model: nn.Module) -> Rows:
    """Spectral and Frobenius norm of every linear map and convolution, as a matrix (out, everything else), in float64."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, _ConvNd))}
    with torch.no_grad():
        matrices = {name: layer.weight.detach().double().flatten(1) for name, layer in layers.items()}
    return {
        name: {"spectral_norm": spectral_norm(matrix), "frobenius_norm": float(matrix.norm())} for name, matrix in matrices.items()
    }


def spectral_norm(matrix: torch.Tensor) -> float:
    """√λ_max of the smaller Gram matrix; NaN where an entry is not finite."""
    if not matrix.isfinite().all():
        return math.nan
    gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())


def products(rows: Mapping[str, Rows]) -> dict[str, float]:
    """log10 of the product over layers of each quantity; 0 where no layer has it."""
    return {name: sum(_log10(row[quantity]) for row in rows[part].values()) for name, (part, quantity) in PRODUCTS.items()}


def audited(model: nn.Module, batch: torch.Tensor, generator: torch.Generator) -> Numbers:
    """The bracket and `audit.products` of a trained model in eval mode, or why it has none."""
    try:
        found = audit(copy.deepcopy(model), batch[:2], data=batch, effort=0.2, generator=generator, local=False)
        bracket: dict[str, Any] = {"lower_log10": found.bracket.lower.log10, "upper_log10": found.bracket.proved.log10}
    except NormscopeError as refusal:
        return {"refused": str(refusal)}
    return {"bracket": bracket, "products": dict(found.products)}


def _log10(value: float) -> float:
    if math.isnan(value):
        return value
    return math.log10(value) if value > 0 else -math.inf
