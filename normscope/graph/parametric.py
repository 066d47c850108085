"""A model as a function of its inputs and of its parameters, for what concerns the parameters: symmetries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves

from normscope.core.data import Call
from normscope.core.errors import InputError
from normscope.graph.agreement import Agreement
from normscope.graph.canonical import DROPOUTS, is_float
from normscope.graph.double import in_double
from normscope.graph.exporting import export, module_of
from normscope.graph.graph import Graph, Node
from normscope.graph.patterns import recognise
from normscope.graph.rebinding import check_views
from normscope.graph.trace import Conversion, check_flat, in_one_line, is_random


def trace_parameters(model: torch.nn.Module | ExportedProgram, call: Call, mode: str = "eval", named_views: bool = False) -> Graph:
    """Trace `model` as a function of its parameters too: each that can move is a node, named as in `named_parameters()`.

    The whole example is one input, integer tensors and random draws included; dropout is kept as a node that evaluates
    to its input. All floating-point outputs of the model are gathered in one `outputs` node.
    named_views: whether the model may keep views of its parameters under names of their own; they are constants then.
    """
    check_flat(call)
    with in_one_line(model):
        module = module_of(model)
        program = export(module, call.copied(), mode)
        check_views(program, not named_views)
        graph = ParametricConversion(program, call, "eval" if mode == "eval" else "batch").graph()
        graph.validate()

        def inputs(given: Call) -> list[torch.Tensor]:
            tensors = iter(leaf for leaf in tree_leaves((given.args, given.kwargs)) if isinstance(leaf, torch.Tensor))
            return [
                program.state_dict[node.path] if node.is_parameter else node.apply() if node.is_drawn else next(tensors)
                for node in graph.inputs
            ]

        agreement = Agreement(graph, module, mode, inputs, _gathered, dropout=False, structure=True)
        return recognise(agreement.whole(call))


class ParametricConversion(Conversion):
    """The same pass with parameters, integer inputs and random draws as nodes instead of constants."""

    def _parameter(self, placeholder: FxNode, name: str) -> Any:
        stored = self.program.state_dict
        if not stored[name].is_floating_point() and not stored[name].is_complex():
            return super()._parameter(placeholder, name)  # whole numbers cannot move
        for known in self.inputs:  # a tied parameter goes by the first of its names
            if (
                known.op == "parameter"
                and known.shape == tuple(stored[name].shape)
                and _same_storage(stored[known.path], stored[name])
            ):
                return known
        return self._leaf(placeholder, "parameter", name)

    def _user_input(self, placeholder: FxNode, given: Any) -> Any:
        return self._leaf(placeholder, "input") if isinstance(given, torch.Tensor) else given

    def _operation(self, fx: FxNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._operation(fx, args, kwargs)
        if isinstance(result, Node):
            result.target = EVALUATED_AS.get(result.op, result.target)
        return result

    def _fold(self, fx: FxNode, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_random(target) and isinstance(fx.meta.get("val"), torch.Tensor):
            node = self._leaf(fx, "random")
            node.target, (node.args, node.kwargs) = target, in_double(target, args, kwargs, fx.meta["val"])
            return node
        return super()._fold(fx, target, args, kwargs)

    def _leaf(self, fx: FxNode, op: str, name: str = "") -> Node:
        meta = fx.meta["val"]
        node = Node(fx.name, op, path=name, shape=tuple(meta.shape), dtype=meta.dtype)
        self.inputs.append(node)
        return node

    def _output(self, values: dict[FxNode, Any]) -> Any:
        names = {fx.name: fx for fx in values}
        found = [values[names[name]] for name in self.program.graph_signature.user_outputs if name in names]
        floats = [leaf for leaf in found if isinstance(leaf, Node) and is_float(leaf)]
        if not floats:
            raise InputError("the model returns no floating-point tensor that depends on its inputs or parameters")
        gathered = Node("outputs", "outputs", gather, (floats,), dtype=floats[0].dtype, shape=(sum(map(_entries, floats)),))
        self.nodes.append(gathered)
        return gathered


def _gathered(returned: Any) -> torch.Tensor:
    return gather([leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()])


def gather(outputs: list[torch.Tensor]) -> torch.Tensor:
    """All outputs of a model as one vector."""
    return torch.cat([output.reshape(-1) for output in outputs])


def _entries(node: Node) -> int:
    return math.prod(node.shape)


def _first_argument(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


def weight_norm(v: torch.Tensor, g: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """g v/‖v‖, written out: the second derivative of torch's own operation is wrong on the CPU."""
    others = [i for i in range(v.dim()) if axis == -1 or i != axis % v.dim()]
    return g * v / torch.linalg.vector_norm(v, dim=others, keepdim=True)


def _attention_without_dropout(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, *more: Any, **named: Any
) -> torch.Tensor:
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, mask, 0.0, *more, **named)


EVALUATED_AS: dict[str, Any] = {  # where a model is a function of its parameters
    **dict.fromkeys(DROPOUTS, _first_argument),
    "scaled_dot_product_attention": _attention_without_dropout,
    "_weight_norm": weight_norm,
}


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
