"""Operations that return memory of their arguments without saying so, as dropout in eval mode returns its input itself.

torch takes their results for new tensors where it makes a program functional: a write to one is then lost in the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Interpreter
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves

from normscope.core.data import Call
from normscope.core.errors import Refusal, first_line
from normscope.core.randomness import preserved_random_state
from normscope.graph.naming import is_view, label, operation_name
from normscope.graph.running import is_same_view, memory, tensors_in, written_by

ADVICE = "Write a new tensor instead of changing one in place."


def undeclared_views(program: ExportedProgram, call: Call) -> tuple[dict[str, str], set[Any]]:
    """Where memory that is written is shared unsaid: nodes that return an argument itself, with that argument by name, and other
    operations, which torch can write as operations that say so. Refuses those that it cannot.
    """
    found = _Memory(program.graph_module)
    try:
        with torch.no_grad(), preserved_random_state():
            found.run(*_given(program, call))
    except Exception as error:  # torch raises for some writes to memory that is read, and the model's own operations for anything
        raise Refusal("what the model does with its memory cannot be seen on one sample", [first_line(error)]) from error
    risky = [node for node, shared in found.sharing.items() if shared & found.written]
    same = {node.name: found.same[node] for node in risky if node in found.same}
    risky = [node for node in risky if node not in found.same]
    unsaid = [_named(node) for node in risky if not _is_composite(node.target) or "unsafe" in str(node.target)]
    if unsaid:
        raise Refusal(
            "the model writes to memory that an operation shares without saying so, which a graph of values cannot show",
            unsaid,
            ADVICE,
        )
    return same, {node.target for node in risky}


class _Memory(Interpreter):
    """A program on numbers. written: memory that is written; sharing: what memory of its arguments each operation returns unsaid;
    same: where that is an argument itself.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)  # no memory is given to another tensor
        self.sharing: dict[FxNode, set[int]] = {}
        self.same: dict[FxNode, str] = {}
        self.written: set[int] = set()

    def run_node(self, node: FxNode) -> Any:
        outside = self._outside() if is_transform(node) or functorch.get_dynamic_layer_stack_depth() else set()
        result = super().run_node(node)
        if operation_name(node.target) == "_remove_batch_dim":  # what leaves a mapped function may be what is outside of it
            self.sharing[node] = outside & set(map(memory, _unwrapped(result)))
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            written = set(map(memory, _unwrapped(written_by(node.target, args, kwargs))))
            self.written |= written
            shared = set(map(memory, _unwrapped((args, kwargs)))) & set(map(memory, _unwrapped(result)))
            if written & outside:
                self.sharing[node] = written
            elif shared and not node.target._schema.is_mutable and not is_view(node.target):
                self.sharing[node] = shared
                for source in node.all_input_nodes if isinstance(result, torch.Tensor) else ():
                    if isinstance(self.env[source], torch.Tensor) and is_same_view(*_unwrapped((result, self.env[source]))):
                        self.same[node] = source.name
        return result

    def _outside(self) -> set[int]:
        """The memory of what no transform wraps."""
        return set(map(memory, filter(_is_plain, tensors_in([*self.env.values()]))))


def _given(program: ExportedProgram, call: Call) -> list[Any]:
    """What the program is called with: copies of what it holds and of the call."""
    inputs = iter(tree_leaves((call.args, call.kwargs)))
    held = {**program.constants, **program.state_dict}
    specs = program.graph_signature.input_specs
    values = [next(inputs, None) if spec.kind == InputKind.USER_INPUT else held.get(str(spec.target)) for spec in specs]
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]


def is_transform(node: FxNode) -> bool:
    """Whether a node begins or ends a transform such as torch.vmap, under which all others mean something else."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _is_plain(tensor: torch.Tensor) -> bool:
    return not functorch.is_functorch_wrapped_tensor(tensor)


def _unwrapped(values: Any) -> list[torch.Tensor]:
    """The tensors of which transforms show a part each."""
    found = tensors_in(values)
    while not all(map(_is_plain, found)):
        found = [tensor if _is_plain(tensor) else functorch.get_unwrapped(tensor) for tensor in found]
    return found


def _named(node: FxNode) -> str:
    return label(node).replace(operation_name(node.target), "torch.vmap", 1) if is_transform(node) else label(node)


def _is_composite(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))
