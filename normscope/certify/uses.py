"""Where a model's parameters enter what it computes on its input, and whether they enter as they stand.

The model is traced once more, with its parameters as nodes. Every place where something made of parameters alone meets
something that depends on the input is one use; no other path leads from a parameter to the output, so that a parameter without
a use does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from normscope.core.data import Call
from normscope.graph.graph import Constant, Graph, Node
from normscope.graph.parametric import trace_parameters
from normscope.graph.running import span
from normscope.rules.registry import registry

NEAR = 1e-3  # how far from its present value a parameter is moved, relative to its largest entry
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class Use:
    """The node called `reader` reads something made of `parameters`, as its argument at `position` (None inside a list).

    copies: how often it holds one entry of its only parameter, at most; None unless every entry is one of the parameter's or fixed.
    """

    reader: str
    position: int | None
    parameters: tuple[str, ...]
    copies: int | None
    value: torch.Tensor | None


def uses_of_parameters(model: torch.nn.Module, call: Call, output: str) -> Iterator[Use]:
    """Every use of a parameter before the node called `output`, or in the whole model if the trace has no such node."""
    graph = trace_parameters(model, call, named_views=True)  # see `sharing_memory`
    last = next((node for node in graph if node.name == output), None)
    graph = graph if last is None else graph.up_to(last)
    reads = _Reads(graph, model, call)
    for node in graph:
        if node not in reads.varies:
            continue
        placed = [*enumerate(node.args), *((None, value) for value in node.kwargs.values())]
        for position, argument in placed:
            for leaf in tree_leaves(argument):
                if isinstance(leaf, Node) and leaf not in reads.varies and reads.made_of[leaf]:
                    yield reads.use(node, position if leaf is argument else None, leaf)


class _Reads:
    """What each node is made of: whether it depends on the input, and on which parameters."""

    def __init__(self, graph: Graph, model: torch.nn.Module, call: Call) -> None:
        self.graph = graph
        self.stored = dict(model.named_parameters(remove_duplicate=False))
        self.given = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = [node for node in graph.inputs if not node.is_parameter]
        self.varies = {node for node in inputs if node.is_drawn or (_is_float(node) and node.shape)}
        self.made_of: dict[Node, frozenset[str]] = {}
        for node in graph:
            own = {node.path} if node.is_parameter else set()
            self.made_of[node] = frozenset(own.union(*(self.made_of[source] for source in node.inputs)))
            if any(source in self.varies for source in node.inputs):
                self.varies.add(node)

    def use(self, reader: Node, position: int | None, leaf: Node) -> Use:
        names = tuple(sorted(self.made_of[leaf]))
        made = [node for node in self.graph.up_to(leaf) if self.made_of[node] and not node.is_parameter]
        if len(names) != 1 or position is None or not _is_float(leaf) or not all(map(_is_linear, made)):
            return Use(reader.name, position, names, None, None)
        parameter = self.stored[names[0]].detach().to(torch.float64)
        generator = torch.Generator().manual_seed(0)
        size = NEAR * max(float(parameter.abs().max()) if parameter.numel() else 0.0, 1e-3)
        moved = [
            parameter + size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            for _ in range(2)
        ]
        try:
            value, *results = (self._evaluate(leaf, names[0], point) for point in (parameter, *moved))
        except RuntimeError:  # an operation that does not run in float64 tells nothing
            return Use(reader.name, position, names, None, None)
        return Use(reader.name, position, names, _copies([parameter, *moved], [value, *results]), value)

    def _evaluate(self, leaf: Node, name: str, parameter: torch.Tensor) -> torch.Tensor:
        given = iter(self.given)
        values = [
            (parameter if node.path == name else self.stored[node.path].detach())
            if node.is_parameter
            else next(given, torch.zeros(node.shape)).reshape(node.shape)
            for node in self.graph.inputs
        ]
        with torch.no_grad():
            return self.graph.up_to(leaf).run(values, torch.float64)[0]


def _copies(points: list[torch.Tensor], results: list[torch.Tensor]) -> int | None:
    """The largest number of entries of a result that are one and the same entry of the point, the same ones for all points.

    At random points, numbers that were computed coincide with entries of the point with probability zero. The first point is the
    parameter as it is, where entries may be equal, and where something may happen that random points miss: `int(1.0)` is 1.
    """
    places = []
    for point, result in zip(points[1:], results[1:], strict=True):
        entries, order = point.reshape(-1).sort()
        if not len(entries) or bool((entries[1:] == entries[:-1]).any()):
            return None
        flat = result.reshape(-1)
        if flat.dtype != entries.dtype:
            return None
        nearest = torch.searchsorted(entries, flat).clamp(max=len(entries) - 1)
        places.append(torch.where(entries[nearest] == flat, order[nearest], -1))
    stored, first, second = (result.reshape(-1) for result in results)
    fixed = (first == second) & (first == stored)
    at_first = points[0].reshape(-1)[places[0].clamp(min=0)] == stored
    if not torch.equal(*places) or not bool(torch.where(places[0] >= 0, at_first, fixed).all()):
        return None
    read = places[0][places[0] >= 0]
    return int(torch.bincount(read).max()) if len(read) else 0


def _is_linear(node: Node) -> bool:
    """What is linear is told by a few random points; maxima, steps and the like may bend at the stored numbers alone."""
    rule = registry.find(node)
    return rule is not None and rule.linear(node)


def _is_float(node: Node) -> bool:
    return node.dtype is not None and node.dtype.is_floating_point


def sharing_memory(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that overlap another tensor of the model in memory, and which: to move the one is to move the other.

    One parameter under several names is not meant; one that repeats its own entries, as an expanded one does, is.
    """
    found: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    own = {id(parameter) for parameter in parameters.values()}
    others = [(name, tensor) for name, tensor in _tensors(model) if id(tensor) not in own]
    stored = ((name, part) for name, tensor in (*parameters.items(), *others) for part in _stored(tensor) if part.numel())
    spans = sorted((*span(part), name, part.numel() * part.element_size()) for name, part in stored)
    end, holder = -1, ""
    for start, stop, name, size in spans:
        if start < end:
            found[name], found[holder] = holder, name
        if stop - start < size:
            found[name] = "itself"
        if stop > end:
            end, holder = stop, name
    return {name: other for name, other in found.items() if name in parameters}


def _stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The numbers of a tensor where they lie in memory with strides: of a sparse one, those that it stores."""
    if tensor.layout == torch.sparse_coo:
        return [tensor.detach()._values()]
    if tensor.layout in COMPRESSED:
        return [tensor.detach().values()]
    return [] if tensor.layout != torch.strided or tensor.is_nested else [tensor]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


def enters_as_it_stands(use: Use, constant: Constant) -> bool:
    """Whether a use is the constant of the traced function, made of the entries of one parameter."""
    if use.copies is None or use.value is None or tuple(use.value.shape) != constant.shape:
        return False
    value = constant.double()
    size = float(value.abs().max()) if value.numel() else 0.0
    return math.isfinite(size) and torch.allclose(use.value, value, rtol=1e-5, atol=1e-5 * size)
