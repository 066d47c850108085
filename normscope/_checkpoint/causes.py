"""Which parameter makes two models differ, and which layer is the first to add an error to what it inherits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normscope._checkpoint.running import INPUTS, Outputs, inputs_like, plain_attention, ran
from normscope.core.data import Call
from normscope.core.rounding import euclidean_norm
from normscope.core.twins import twin_of

MOST_INPUTS = 40  # random ones beside the example
STEPS, ENOUGH = 30, 1e-3  # of conjugate gradients
HOPELESS = (8, 0.7)  # steps after which a cause must explain so much
MOST_SOLVED = 2_000_000  # entries of a parameter that is tried as the cause
ADDS = 1e-7


def enough_inputs(
    one: nn.Module, other: nn.Module, call: Call, outputs: tuple[list[Outputs], list[Outputs]], moved: list[str]
) -> tuple[list[Call], tuple[list[Outputs], list[Outputs]]]:
    """So many inputs that outputs outnumber the entries of every parameter that may be the cause, as far as that is cheap."""
    sizes = [value.numel() for name, value in other.named_parameters() if name in moved and value.numel() <= MOST_SOLVED]
    each = sum(out.numel() for out in outputs[0][0])
    calls = inputs_like(call, min(MOST_INPUTS, max(INPUTS, 3 * max(sizes, default=0) // max(each, 1))))
    with torch.no_grad(), plain_attention():
        return calls, ([ran(one, one_call) for one_call in calls], [ran(other, one_call) for one_call in calls])


def cause_of(
    model: nn.Module,
    calls: list[Call],
    outputs: tuple[list[Outputs], list[Outputs]],
    candidates: list[str],
) -> str | None:
    """The parameter of B whose change alone explains the difference of outputs best.

    min ‖J δ − d‖ over changes δ of each candidate, d the difference of outputs and J their derivative, by conjugate gradients; of
    those that explain it, the one that moves least.
    """
    own = dict(model.named_parameters())
    listed = [name for name in candidates if name in own]
    if len(listed) == 1:
        return listed[0]
    wanted = torch.cat([(x - y).flatten() for one, other in zip(*outputs, strict=True) for x, y in zip(one, other, strict=True)])
    if not bool(wanted.isfinite().all()) or not len(wanted):
        return None
    scored = []
    for name in listed:
        if own[name].numel() <= MOST_SOLVED:
            residual, size = _explained(model, calls, name, wanted)
            scored.append((residual, size, name))
    if not scored:
        return None
    best = min(scored)[0]
    return min((size, name) for residual, size, name in scored if residual <= max(1.5 * best, 0.02))[1]


def _explained(model: nn.Module, calls: list[Call], name: str, wanted: torch.Tensor) -> tuple[float, float]:
    """(‖J δ − d‖/‖d‖, ‖δ‖/‖θ‖) of the best δ that was found."""
    value = dict(model.named_parameters())[name].detach()
    scale = float(euclidean_norm(value)) or 1.0

    def forward(at: torch.Tensor) -> torch.Tensor:
        return torch.cat([out.flatten() for call in calls for out in ran(model, call, {name: at})])

    def product(step: torch.Tensor) -> torch.Tensor:
        size = float(euclidean_norm(step))
        width = 1e-5 * scale / size
        with torch.no_grad():
            return (forward(value + width * step) - forward(value - width * step)) / (2 * width)

    with plain_attention():
        point = value.clone().requires_grad_(True)
        graph = forward(point)

        def adjoint(vector: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(graph, point, vector, retain_graph=True, allow_unused=True)
            return torch.zeros_like(value) if grad is None else grad

        step, residual = torch.zeros_like(value), wanted.clone()
        gradient = adjoint(residual)
        direction, square = gradient.clone(), float(gradient.double().square().sum())
        for done in range(STEPS):
            left = float(euclidean_norm(residual) / euclidean_norm(wanted))
            if square == 0 or left <= ENOUGH or (done >= HOPELESS[0] and left > HOPELESS[1]):
                break
            image = product(direction)
            length = square / float(image.double().square().sum())
            step, residual = step + length * direction, residual - length * image
            gradient = adjoint(residual)
            new = float(gradient.double().square().sum())
            direction, square = gradient + new / square * direction, new
    return float(euclidean_norm(residual) / euclidean_norm(wanted)), float(euclidean_norm(step)) / scale


def layer_note(one: nn.Module, other: nn.Module, call: Call) -> tuple[str, ...]:
    found = adding(one, other, call)
    return (f"the first layer that adds an error of its own to the one it inherits: {found}",) if found else ()


def adding(one: nn.Module, other: nn.Module, call: Call) -> str | None:
    """The first layer whose output differs more than the difference of its input explains: B's own against A's on B's input."""
    mine = {path: module for path, module in one.named_modules() if path and not list(module.children())}
    theirs = {path: module for path, module in other.named_modules() if path and not list(module.children())}
    if mine.keys() != theirs.keys():
        return None
    found: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if found or not isinstance(output, torch.Tensor) or not output.is_floating_point():
                return
            again = twin_of(mine[path])(*args, **kwargs)
            if float(euclidean_norm(again - output)) > ADDS * float(euclidean_norm(output)):
                found.append(path)

        return hook

    handles = [module.register_forward_hook(watch(path), with_kwargs=True) for path, module in theirs.items()]
    try:
        with torch.no_grad():
            ran(other, call)
    except Exception:  # a layer of A that takes something else
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
