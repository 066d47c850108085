"""Slow measurements, only when asked for and on a schedule of their own: sharpness, gradient predictiveness, Jacobian norm."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.core.randomness import preserved_random_state, seed_generators
from normscope.graph.exporting import in_mode

PROBED = "a probe runs the model's own forward between steps: what counts calls or draws from its own generators goes on"
Tensors = tuple[torch.Tensor, ...]


class Probe:
    """A fixed batch to measure the loss's landscape on, every so many steps.

        ns.watch(model, optimizer, run="runs/name", probe=ns.Probe(x, y, torch.nn.functional.cross_entropy, every=500))

    sharpness: the largest eigenvalue, in size, of the Hessian in train mode, by `iterations` of the power method, followed
    from one measurement to the next. gradient_predictiveness: ‖∇L(w) − ∇L(w − η∇L(w))‖/‖∇L(w)‖ with η the learning rate
    (Santurkar et al. 2018). jacobian_norm: the largest ‖∂output/∂input‖ of the batch's samples, in eval mode.
    It runs the live model, hooks included, which nothing else of `ns.watch` does: parameters, buffers, gradients and global random
    state stay as they are, but what counts calls or draws from a generator of its own goes on. `cost`: seconds spent so far.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        every: int = 500,
        iterations: int = 10,
    ) -> None:
        if every < 1 or iterations < 1:
            raise InputError(f"every and iterations must be at least 1, got {every} and {iterations}")
        self.inputs, self.targets, self.loss, self.every, self.iterations = inputs, targets, loss, every, iterations
        self.cost = 0.0
        self._direction: Tensors | None = None

    def measure(self, model: nn.Module, learning_rate: float) -> dict[str, float]:
        """All three numbers, of the model as it is now."""
        start = time.perf_counter()
        with preserved_random_state(), in_mode(model, "train"):
            sharpness, predictiveness = self._landscape(model, learning_rate)
        with preserved_random_state(), in_mode(model, "eval"):
            jacobian = self._jacobian_norm(model)
        self.cost += time.perf_counter() - start
        return {"sharpness": sharpness, "gradient_predictiveness": predictiveness, "jacobian_norm": jacobian}

    def _landscape(self, model: nn.Module, learning_rate: float) -> tuple[float, float]:
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        weights = tuple(dict(model.named_parameters())[name].detach().clone().requires_grad_() for name in names)

        def gradient(at: Tensors, graph: bool = False) -> Tensors:
            seed_generators(0)  # the same dropout masks at every point; the caller restores the generator
            state = _state(model, dict(zip(names, at, strict=True)))
            value = self.loss(torch.func.functional_call(model, state, (self.inputs,)), self.targets)
            found = torch.autograd.grad(value, at, create_graph=graph, allow_unused=True)
            return tuple(torch.zeros_like(w) if g is None else g for w, g in zip(at, found, strict=True))

        with torch.enable_grad():
            slope = gradient(weights, graph=True)
            flat = tuple(g.detach() for g in slope)
            moved = tuple((w - learning_rate * g).detach().requires_grad_() for w, g in zip(weights, flat, strict=True))
            change = tuple(a - b for a, b in zip(gradient(moved), flat, strict=True))
            sharpness = self._largest_curvature(slope, weights)
        return sharpness, float(_norm(change) / _norm(flat))

    def _largest_curvature(self, slope: Tensors, weights: Tensors) -> float:
        generator = torch.Generator().manual_seed(0)
        vector = self._direction or tuple(torch.randn(w.shape, generator=generator).to(w) for w in weights)
        for _ in range(self.iterations):
            length = _norm(vector)
            vector = tuple(v / length for v in vector)
            image = torch.autograd.grad(slope, weights, vector, retain_graph=True, allow_unused=True)
            turned = tuple(torch.zeros_like(v) if h is None else h for v, h in zip(vector, image, strict=True))
            curvature = sum(float((v * h).sum()) for v, h in zip(vector, turned, strict=True))
            if not float(_norm(turned)) > 0:
                return curvature
            vector = turned
        self._direction = vector
        return curvature

    def _jacobian_norm(self, model: nn.Module) -> float:
        """Power iteration on JᵀJ for all samples at once: in eval mode they do not meet."""
        inputs = self.inputs.detach().clone().requires_grad_()
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(inputs.shape, generator=generator).to(inputs)
        with torch.enable_grad():
            outputs = torch.func.functional_call(model, _state(model, {}), (inputs,))
            dual = torch.zeros_like(outputs, requires_grad=True)
            pulled = torch.autograd.grad(outputs, inputs, dual, create_graph=True)[0]  # Jᵀu, linear in u
            for _ in range(self.iterations):
                vector = vector / _per_sample(vector).clamp(min=torch.finfo(vector.dtype).tiny)
                image = torch.autograd.grad(pulled, dual, vector, retain_graph=True)[0]  # Jv
                vector = torch.autograd.grad(outputs, inputs, image, retain_graph=True)[0]  # JᵀJv
        return float(_per_sample(image).max())


def _state(model: nn.Module, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and copies of buffers for a call that leaves the model's own alone."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {**own, **parameters, **{name: buffer.detach().clone() for name, buffer in model.named_buffers()}}


def _norm(tensors: Tensors) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).norm()


def _per_sample(value: torch.Tensor) -> torch.Tensor:
    """‖v‖ of each sample, shaped to divide by."""
    return torch.linalg.vector_norm(value.flatten(1), dim=1).reshape(-1, *[1] * (value.dim() - 1))
