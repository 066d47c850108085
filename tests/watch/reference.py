"""What every column of a run should hold, computed in float64 from a copy of the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope._watch.columns import METRICS
from tests.watch.loops import Loop, Transformer


class Double(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.double())


class Reference:
    """The step that follows, done again on a copy in float64: what entered each module, gradients, weights before and after."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.model = copy.deepcopy(loop.model).double()
        self.before = {name: p.detach().double().clone() for name, p in loop.model.named_parameters()}
        self.buffers = {name: b.clone() for name, b in loop.model.named_buffers()}
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.data, self.random = loop.data.get_state(), torch.get_rng_state()

    def run(self) -> None:
        """The forward and backward passes, in float64, on the batches that the loop is going to use."""
        calls: dict[str, int] = {}
        first = True

        def enter(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                if first and args and isinstance(args[0], Tensor):
                    calls[path] = calls.get(path, 0) + 1
                    self.inputs[path, calls[path]] = args[0].detach().double().clone()

            return hook

        for path, module in self.model.named_modules():
            module.register_forward_pre_hook(enter(path))
            if isinstance(module, Transformer):
                module.reentrant = None
        after_data, after_random = self.loop.data.get_state(), torch.get_rng_state()
        torch.set_rng_state(self.random)
        self.loop.data.set_state(self.data)
        for _ in range(self.loop.accumulate):
            x, y = self.loop.batch()
            (nn.functional.cross_entropy(self.model(x.double()), y) / self.loop.accumulate).backward()
            first = False
        torch.set_rng_state(after_random)
        self.loop.data.set_state(after_data)

    def row(self, layers: list[dict[str, Any]], learning_rate: float) -> dict[str, np.ndarray]:
        after = {name: p.detach().double() for name, p in self.loop.model.named_parameters()}
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        found = {name: np.full(len(layers), np.nan) for name in METRICS if name != "spectral_residual"}
        for index, layer in enumerate(layers):
            values = {}
            if layer["parameter"]:
                values |= self.motion(self.before[layer["parameter"]], after[layer["parameter"]], gradients[layer["parameter"]])
            if layer["role"] == "weight" and layer["kind"] != "Embedding":
                matrix = self.before[layer["parameter"]].flatten(1)
                values["spectral_norm"] = torch.linalg.matrix_norm(matrix, 2)
                inputs = (
                    matrix * (matrix.shape[1] / matrix.square().sum(1)).sqrt()[:, None]
                )  # of root mean square 1, one per output
                values["rms_to_max_norm"] = (matrix * inputs).sum(1).max()
            if layer["scale_free"]:
                group = self.loop.optimizer.param_groups[0]
                alpha, beta = group.get("momentum", 0.0), group.get("betas", (0.0,))[0]
                turning = 2 * group["lr"] * group["weight_decay"] * (1 - beta) / (1 + beta) / (1 + alpha)
                values["equilibrium_angle"] = math.sqrt(turning)
                norm = torch.linalg.vector_norm(self.before[layer["parameter"]])
                values["effective_lr"] = learning_rate / (norm if layer["effective_power"] == 1 else norm**2)
            if layer["role"] in ("normalizer", "activation"):  # of blocks and attention: test_blocks.py
                module = self.model.get_submodule(layer["module"])
                values |= self.entering(module, layer["module"], self.inputs[layer["module"], layer["call"]])
            for name, value in values.items():
                found[name][index] = float(value)
        return found

    @staticmethod
    def motion(before: Tensor, after: Tensor, gradient: Tensor) -> dict[str, Any]:
        w, d, g = before.flatten(), (after - before).flatten(), gradient.flatten()
        cosine = (w / w.norm()) @ (after.flatten() / after.norm())
        return {
            "frobenius_norm": w.norm(), "gradient_norm": g.norm(), "update_norm": d.norm(), "gradient_dot_weight": g @ w,
            "update_dot_weight": d @ w, "update_ratio": d.norm() / w.norm(), "angle": torch.arccos(cosine.clamp(-1, 1)),
            "radial_gradient": (g @ w) / (g.norm() * w.norm()), "update_rms": d.square().mean().sqrt(),
        }  # fmt: skip

    def entering(self, module: nn.Module, path: str, x: Tensor) -> dict[str, Any]:
        last = x.dim() == 2 or isinstance(self.loop.model, Transformer)
        channels = x.movedim(-1 if last else 1, 0).flatten(1)
        sizes = x.abs().flatten().sort().values
        v, values = (
            channels.var(1, correction=0),
            {"largest_input": sizes[-1], "input_p99": sizes[math.ceil(0.99 * len(sizes)) - 1]},
        )
        values["massive_channels"] = (channels.abs().amax(1) > 1000 * sizes.median()).double().mean()
        if isinstance(module, nn.ReLU):
            values["dead_fraction"] = (channels.amax(1) <= 0).double().mean()
        name = type(module).__name__
        if name.startswith(("LayerNorm", "RMSNorm")):
            v = x.var(-1, correction=0) if name == "LayerNorm" else x.square().mean(-1)
        elif name == "GroupNorm":
            v = x.unflatten(1, (module.num_groups, -1)).flatten(2).var(2, correction=0)
        elif name.startswith("InstanceNorm"):
            v = x.flatten(2).var(2, correction=0)
        values |= {"input_variance": v.mean(), "input_variance_min": v.min(), "input_variance_max": v.max()}
        values["input_variance_median"] = v.flatten().median()
        if name.startswith("BatchNorm"):
            mean, variance = self.buffers[f"{path}.running_mean"].double(), self.buffers[f"{path}.running_var"].double()
            values["running_shift"] = ((channels.mean(1) - mean).square() / (variance + module.eps)).mean().sqrt()
            values["batch_size"] = len(x)
            values["running_divergence"] = ((v + module.eps) / (variance + module.eps)).log().abs().mean()
        return values | self.affine(module, name, path, v)

    def affine(self, module: nn.Module, name: str, path: str, v: Tensor) -> dict[str, Any]:
        if "Norm" not in name:
            return {}
        values = {"gamma_moved": 1.0, "gamma_moved_from_start": 1.0}
        for parameter, metric in (("weight", "gamma"), ("bias", "beta")):
            if f"{path}.{parameter}" in self.before:
                tensor = self.before[f"{path}.{parameter}"]
                values |= {f"{metric}_min": tensor.min(), f"{metric}_max": tensor.max()}
        gamma, epsilon = self.before[f"{path}.weight"], torch.finfo(torch.float32).eps if module.eps is None else module.eps
        smallest = v if name.startswith("BatchNorm") else v.amin(0) if name.startswith(("Group", "Instance")) else v.min()
        inverse = 1 / (smallest + epsilon).sqrt()
        scaled = gamma * (inverse.repeat_interleave(len(gamma) // len(inverse)) if inverse.dim() else inverse)
        paper = inverse.sum() if name.startswith(("Group", "Instance")) else inverse.norm()
        layer = 1 / math.sqrt(v.mean() + epsilon)
        return values | {
            "gain_tight": scaled.abs().max(),
            "gain_paper": paper,
            "gain_paper_affine": scaled.norm(),
            "gain_layer": layer,
        }
