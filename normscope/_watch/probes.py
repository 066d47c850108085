"""Slow measurements, only when asked for and on a schedule of their own: sharpness, gradient predictiveness, Jacobian norm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope._watch.unrecorded import unrecorded
from normscope.core.errors import InputError
from normscope.core.randomness import preserved_random_state, seed_generators
from normscope.graph.exporting import in_mode
from normscope.graph.restoring import Snapshot

PROBED = (
    "a probe runs the model and the loss between steps, and then puts back what they changed, except itertools and generators; "
    "attributes of classes other than those of modules, parameters and the loss; what functions from other files write to or draw "
    "from; hooks on all modules; objects nested deeply; what other threads share; files and prints"
)
Tensors = tuple[torch.Tensor, ...]


class Probe:
    """A fixed batch to measure the loss's landscape on, every so many steps.

        ns.watch(model, optimizer, run="runs/name", probe=ns.Probe(x, y, torch.nn.functional.cross_entropy, every=500))

    sharpness: the largest eigenvalue, in size, of the Hessian in train mode, by `iterations` of the power method, followed
    from one measurement to the next. gradient_predictiveness: ‖∇L(w) − ∇L(w − η∇L(w))‖/‖∇L(w)‖ with η the learning rate
    (Santurkar et al. 2018). jacobian_norm: the largest ‖∂output/∂input‖ of the batch's samples, in eval mode; NaN for inputs of
    integers, such as tokens, and for outputs that are not one tensor. `cost`: seconds spent so far.

    It runs the live model, hooks included, which nothing else of `ns.watch` does, and then puts back what the model and the loss
    changed: tensors, gradients, counters, containers, random generators. Not put back are (a) Python generators, `itertools`, and
    iterators that have ended; (b) attributes assigned on classes other than those of modules, parameters and the loss; (c) what
    functions from other files write to or draw from, and what hooks on all modules do; (d) objects more than four deep inside of a
    module (modules and containers do not count), or two inside of a function's variables; (e) what other threads share; (f) files
    and prints. Models with parts of TorchScript are not probed: nothing that their code changes could be put back.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        every: int = 500,
        iterations: int = 10,
    ) -> None:
        if not all(isinstance(number, Integral) and number >= 1 for number in (every, iterations)):
            raise InputError(f"every and iterations must be whole numbers, at least 1, got {every!r} and {iterations!r}")
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor) or not callable(loss):
            kinds = ", ".join(type(given).__name__ for given in (inputs, targets, loss))
            raise InputError(f"a probe needs a tensor of inputs, a tensor of targets and a loss function, got {kinds}")
        self.inputs, self.targets, self.loss, self.every, self.iterations = inputs, targets, loss, every, iterations
        self.cost = 0.0
        self._direction: Tensors | None = None

    def measure(self, model: nn.Module, learning_rate: float) -> dict[str, float]:
        """All three numbers, of the model as it is now."""
        loss = self.loss.modules() if isinstance(self.loss, nn.Module) else ()
        if any(isinstance(part, torch.jit.ScriptModule) for part in (*model.modules(), *loss)):
            raise InputError(
                "a probe cannot put back what TorchScript changes: train the nn.Module that it was made from, or pass no probe"
            )
        start = time.perf_counter()
        twice = sdpa_kernel(SDPBackend.MATH)  # the other kernels of attention have no second derivative
        with preserved_random_state(), unrecorded(), torch.inference_mode(False), twice:
            run = partial(_run, model, self._snapshot(model))
            weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
            sharpness, slope = run("train", weights, self._curvature, tuple(weights.values()))
            moved = {n: (w - learning_rate * g).detach().requires_grad_() for (n, w), g in zip(weights.items(), slope, strict=True)}
            there = run("train", moved, self._gradient, tuple(moved.values()))
            change = _norm(tuple(a - b for a, b in zip(there, slope, strict=True))) / _norm(slope)
            jacobian = run("eval", {}, self._jacobian_norm)
        self.cost += time.perf_counter() - start
        return {"sharpness": sharpness, "gradient_predictiveness": float(change), "jacobian_norm": jacobian}

    def _snapshot(self, model: nn.Module) -> Snapshot:
        """Of all that runs, and of what the methods of its classes write to."""
        modules, parts = list(model.modules()), (*model.parameters(), self.loss)
        kinds = {kind for part in (*modules, *parts) for kind in type(part).__mro__}
        classes = {kind: dict(vars(kind)) for kind in kinds if kind.__module__.partition(".")[0] not in ("builtins", "torch")}
        everything = nn.Module()
        everything.held = [list(classes.values()), *parts, *modules]  # inside of each other, modules would be too deep for it
        snapshot = Snapshot(everything)
        snapshot.kept += [partial(_restore_class, *item) for item in classes.items()]
        return snapshot

    def _gradient(self, model: nn.Module, at: Tensors, graph: bool = False) -> Tensors:
        value = self.loss(model(self.inputs.clone()), self.targets.clone())
        found = torch.autograd.grad(value, at, create_graph=graph, allow_unused=True)
        return tuple(torch.zeros_like(w) if g is None else g for w, g in zip(at, found, strict=True))

    def _curvature(self, model: nn.Module, at: Tensors) -> tuple[float, Tensors]:
        """The Hessian's largest eigenvalue, and the gradient."""
        slope = self._gradient(model, at, graph=True)
        return self._largest_curvature(slope, at), tuple(g.detach() for g in slope)

    def _largest_curvature(self, slope: Tensors, weights: Tensors) -> float:
        bent = [place for place, part in enumerate(slope) if part.requires_grad]  # the others do not depend on the weights
        if not bent:
            return 0.0
        generator, vector = torch.Generator().manual_seed(0), self._direction
        if vector is None or [v.shape for v in vector] != [w.shape for w in weights]:  # what is trained may have changed since
            vector = tuple(torch.randn(w.shape, generator=generator).to(w) for w in weights)
        for _ in range(self.iterations):
            length = _norm(vector)
            vector = tuple(v / length for v in vector)
            along = [vector[place] for place in bent]
            image = torch.autograd.grad([slope[place] for place in bent], weights, along, retain_graph=True, allow_unused=True)
            turned = tuple(torch.zeros_like(v) if h is None else h for v, h in zip(vector, image, strict=True))
            curvature = sum(float((v.conj() * h).sum().real) for v, h in zip(vector, turned, strict=True))
            if not float(_norm(turned)) > 0:
                return curvature
            vector = turned
        self._direction = vector
        return curvature

    def _jacobian_norm(self, model: nn.Module) -> float:
        """Power iteration on JᵀJ for all samples at once: in eval mode they do not meet. NaN where there is no J."""
        if not (self.inputs.is_floating_point() or self.inputs.is_complex()):
            return math.nan
        inputs = self.inputs.detach().clone().requires_grad_()
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(inputs.shape, generator=generator).to(inputs)
        outputs = model(inputs.clone())
        if not isinstance(outputs, torch.Tensor):
            return math.nan
        dual = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, inputs, dual, create_graph=True)[0]  # Jᵀu, linear in u
        for _ in range(self.iterations):
            vector = vector / _per_sample(vector).clamp(min=torch.finfo(vector.dtype).tiny)
            image = torch.autograd.grad(pulled, dual, vector, retain_graph=True)[0]  # Jv
            vector = torch.autograd.grad(outputs, inputs, image, retain_graph=True)[0]  # JᵀJv
        return float(_per_sample(image).max())


class _Given(nn.Module):
    """Calls a function with a model, so that `functional_call` covers its backward pass too: checkpointed parts run again in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


def _run(
    model: nn.Module, before: Snapshot, mode: str, weights: dict[str, torch.Tensor], function: Callable[..., Any], *args: Any
) -> Any:
    """The function of the model with other weights; each begins with the same state and dropout masks, and leaves no trace."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = {**own, **weights, **{name: buffer.detach().clone() for name, buffer in model.named_buffers()}}
    with in_mode(model, mode, before):
        seed_generators(0)
        given = {f"model.{name}": value for name, value in state.items()}
        return torch.func.functional_call(_Given(model), given, (function, *args))


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(kind, name, value)


def _norm(tensors: Tensors) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).norm()


def _per_sample(value: torch.Tensor) -> torch.Tensor:
    """‖v‖ of each sample, shaped to divide by."""
    return torch.linalg.vector_norm(value.flatten(1), dim=1).reshape(-1, *[1] * (value.dim() - 1))
