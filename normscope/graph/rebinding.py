"""One name for memory: what a model holds as a parameter or buffer and keeps elsewhere too is one tensor of its program.

torch.export swaps what is registered for stand-ins, and takes the same tensor in a list, a closure or a hidden module for a
constant of its own: a write to one would be lost in the other, and the parameter would be read in fewer places than it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node as FxNode

from normscope.core.errors import Refusal
from normscope.graph.running import is_same_view, memory, share_entries

HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def rebind(program: ExportedProgram) -> None:
    """Let whatever reads a tensor read it by its first name; a second one of a buffer, or of a constant, is dropped."""
    module, signature = program.graph_module, program.graph_signature
    dropped: list[Any] = []
    with module._set_replace_hook(signature.get_replace_hook()):
        for node, spec, first in list(same_tensors(program)):
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
            dropped.append(spec)
    if dropped:
        signature.input_specs[:] = [spec for spec in signature.input_specs if spec not in dropped]
        module.recompile()


def same_tensors(program: ExportedProgram) -> Iterator[tuple[FxNode, Any, FxNode]]:
    """Buffers and constants that are the same tensor as something registered, which is the last of the three."""
    registered: dict[int, list[tuple[FxNode, Any, torch.Tensor]]] = {}  # by its memory
    for node, spec, tensor in sorted(_held(program), key=lambda one: HELD.index(one[1].kind)):
        sharing = registered.setdefault(memory(tensor), [])
        same = next((other for other, _, its in sharing if is_same_view(tensor, its)), None)
        if spec.kind != InputKind.PARAMETER and same is not None:
            yield node, spec, same
        elif spec.kind != InputKind.CONSTANT_TENSOR:
            sharing.append((node, spec, tensor))


def check_views(program: ExportedProgram, named: bool) -> None:
    """Refuse what is a view of a parameter, where parameters are variables: a program holds it as a tensor of its own.

    named: those too that have a name in the model, which some look for there.
    """
    held = list(_held(program))
    parameters = [(spec.target, tensor) for _, spec, tensor in held if spec.kind == InputKind.PARAMETER]
    for node, spec, tensor in held:
        others = parameters if node.users and (named or str(spec.target).startswith("lifted_tensor")) else ()
        names = [name for name, its in others if not is_same_view(tensor, its) and share_entries(tensor, its)]
        if names:
            what = "reads one" if spec.kind == InputKind.CONSTANT_TENSOR else f"reads it as '{spec.target}',"
            raise Refusal(
                f"the model also keeps a view of its parameter '{names[0]}', which a graph takes for a tensor of its own",
                [f"its forward {what} of shape {tuple(tensor.shape)}"],
                f"Make the view from '{names[0]}' in the forward.",
            )


def _held(program: ExportedProgram) -> Iterator[tuple[FxNode, Any, torch.Tensor]]:
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        store = program.state_dict if spec.target in program.state_dict else program.constants
        value = store.get(str(spec.target))
        if isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
            raise Refusal(
                "torch.export keeps a tensor from inside a transform, such as torch.func.grad, that is over",
                [str(spec.target)],
                "Write the derivative as a formula.",
            )
        if spec.kind in HELD and isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel():
            yield node, spec, value
