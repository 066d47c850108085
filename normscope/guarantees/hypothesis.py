"""What a network computes with beside its parameters: bounds on a class of networks hold if none of it comes from the data."""

from __future__ import annotations

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from normscope.core.data import Call, Example
from normscope.graph.exporting import export
from normscope.guarantees.table import NotApplicable

MOST_NAMED = 3


def check_hypothesis(model: nn.Module, initial: nn.Module | None, example: Example) -> None:
    """Refuse tensors that are no parameters, unless the model before training holds the same: they could hold the training data."""
    held = tensors_beside_parameters(model, example)
    if not held:
        return
    if initial is None:
        raise NotApplicable(
            f"the network reads {_listed(held)}, which no bound on its parameters counts: they could hold training data. "
            "Make them parameters, or pass initial=, the model before training, to show that training has not changed them"
        )
    before = tensors_beside_parameters(initial, example)
    changed = {name: value for name, value in held.items() if not _same(value, before.get(name))}
    if changed:
        raise NotApplicable(
            f"the network reads {_listed(changed)}, which training has changed and no bound on its parameters counts"
        )


def tensors_beside_parameters(model: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    """The buffers, plain attributes, closures and literals that the outputs are computed with; numbers (one entry) are code."""
    program = export(model, Call.of(example), "eval")
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    found: dict[str, torch.Tensor] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if node.users and spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            store = program.state_dict if spec.target in program.state_dict else program.constants
            kind = "buffer" if spec.kind == InputKind.BUFFER else "tensor"
            found[f"{kind} {spec.target}"] = store[spec.target]
    for path, module in program.graph_module.named_modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            value = getattr(module, node.target, None) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor):
                found[f"tensor {path}.{node.target}".replace(" .", " ")] = value
    return {name: value for name, value in found.items() if value.numel() > 1}


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.cpu(), other.to(one.dtype).cpu())


def _listed(held: dict[str, torch.Tensor]) -> str:
    shown = [f"{name} {tuple(value.shape)}" for name, value in held.items()]
    rest = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return ", ".join(shown[:MOST_NAMED]) + rest
