"""A graph as a function of one of its inputs, the others held at the values of the example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.data import Call
from normscope.core.errors import InputError
from normscope.graph.expansion import grouped_product
from normscope.graph.graph import Constant, Graph, Node, cast


@dataclass(frozen=True)
class Parts:
    """What a node was taken apart to."""

    inner: tuple[Node, ...]
    result: Node


def of_one_input(graph: Graph, call: Call, name: str) -> tuple[Graph, Call]:
    """The graph, and a call of it, in the input called `name` alone.

    Every other input is the constant that the example's first sample has, and what depends on these alone is folded in float64.
    """
    names = [node.name for node in graph.inputs]
    if name not in names:
        raise InputError(f'no input "{name}": wrt="input:NAME" takes one of {", ".join(names)}')
    given = dict(zip(names, call.floats(), strict=True))
    first = given if graph.whole_batch else {key: value[:1] for key, value in given.items()}
    values = specialised(
        graph, {node: Constant(cast(first[node.name].detach(), torch.float64)) for node in graph.inputs if node.name != name}
    )
    output = values[graph.output]
    if isinstance(output, Constant):
        raise InputError(f"the output does not depend on {name}: its constant is 0")
    inputs = tuple(node for node in graph.inputs if node.name == name)
    nodes = tuple(value for value in values.values() if isinstance(value, Node))
    held = ", ".join(other for other in names if other != name)
    kept = (note for note in graph.notes if not note.startswith("the constant is with respect to"))
    notes = (*kept, f"the constant is with respect to {name} alone; held at the example's first sample: {held}")
    return replace(graph, nodes=nodes, inputs=inputs, output=output, notes=notes).replace({}), Call((given[name],), {})


def specialised(graph: Graph, constants: Mapping[Node, Constant]) -> dict[Node, Any]:
    """For every node what it becomes where some nodes are constants: itself, one that reads them, or a constant (or several)."""
    values: dict[Node, Any] = {}
    places = {node.input: known for node, known in constants.items() if node.op == "getitem" and node.args[1] == 1}
    for node in graph:
        found = constants[node] if node in constants else node if node.is_input else _renewed(node, values, places)
        if isinstance(found, Parts):
            values.update((part, part) for part in found.inner)
            found = found.result
        values[node] = found
    return values


def _renewed(node: Node, values: dict[Node, Any], places: Mapping[Node, Constant]) -> Any:
    """The node that reads what its inputs have become; a constant, or several, where all of them are constants.

    places: of operations that return values and their places along an axis, the places.
    """
    if node.op == "getitem" and node.args[1] == 0 and node.input.op in ("topk", "sort") and node.input in places:
        ranked = values[node.input]
        axis = ranked.args[2] if ranked.op == "topk" else ranked.argument(1 if isinstance(ranked.args[1], int) else 2, "dim", -1)
        args = (ranked.input, axis % len(node.shape), places[node.input])
        return Node(node.name, "gather", torch.ops.aten.gather.default, args, {}, node.path, node.source, node.shape, node.dtype)
    if all(values[source] is source for source in node.inputs):
        return node
    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    if any(isinstance(values[source], Node) for source in node.inputs):
        node = Node(node.name, node.op, node.target, args, kwargs, node.path, node.source, node.shape, node.dtype)
        parts = grouped_product(node)
        return node if parts is None else Parts(tuple(parts[:-1]), parts[-1])
    constants = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Constant)]
    names = tuple(dict.fromkeys(name for constant in constants for name in constant.sources))
    learned = any(constant.learned for constant in constants)
    rank = max(max(constant.rank, constant.value.dim()) for constant in constants)
    held = {source: tree_map_only(Constant, lambda constant: constant.value, values[source]) for source in node.inputs}
    with torch.no_grad():
        result = node.evaluate(held, torch.float64)
    return tree_map_only(torch.Tensor, lambda value: Constant(value, names, learned, rank), result)
