"""Where a graph and its model part: the first node with a value that the model does not compute.

Every tensor that the model computes is recorded. A node is confirmed by a recorded tensor of its shape and value, or by a
confirmed node that depends on it, since a graph may write one operation as several. What is not confirmed need not be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from normscope.graph.graph import Graph, Node
from normscope.graph.naming import is_view
from normscope.graph.running import memory

NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default)

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default, torch.ops.aten.dot.default)
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
RESHAPES = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)


class Computed(TorchDispatchMode):
    """Keeps a copy of every floating-point tensor that an operation returns, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.tensors.setdefault(tuple(value.shape), []).append(value.detach().to(torch.float64, copy=True))
        return result

    def has(self, value: Any, tolerance: float) -> bool:
        """Whether a tensor like this one was computed; the tolerance is relative to its largest entry."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
        return any(_close(other, value, tolerance) for other in self.tensors.get(tuple(value.shape), ()))


class Narrow(TorchDispatchMode):
    """Whether something is computed in less than float64, or cast to less, as by a scripted function.

    held: the model's parameters, buffers and inputs; then also whether it reads something in less that is none of them, and was
    not made here: a tensor kept from an earlier call.
    """

    def __init__(self, held: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.seen = False
        self.known = None if held is None else {memory(tensor): tensor for tensor in held}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = ([leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)] for part in ((args, kwargs), result))
        if self.known is not None:
            fresh = function in LITERALS
            self.seen |= not fresh and any(_is_narrow(value) and memory(value) not in self.known for value in given)
            if fresh or not is_view(function):
                self.known.update((memory(value), value) for value in made)
        if any(map(_is_narrow, made)) and not is_view(function):
            copied = function in COPIES
            self.seen |= any(value.dtype in (torch.float64, torch.complex128) if copied else _is_narrow(value) for value in given)
        return result


class Steps(TorchDispatchMode):
    """Every operation in its order, with the numbers, parameters and buffers that it is given: what a branch changes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        held = (*model.named_parameters(), *model.named_buffers())
        self.held = {memory(tensor): name for name, tensor in held if tensor.layout == torch.strided}
        self.fresh: set[int] = set()  # memory that is new here

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        told = [self._told(value) for value in (*args, *(kwargs or {}).values())]
        self.made.append((function, tuple(value for value in told if value is not None)))
        result = function(*args, **(kwargs or {}))
        if not is_view(function):
            self.fresh.update(memory(value) for value in tree_leaves(result) if _is_strided(value))
        return result

    def computed(self) -> list[tuple[Any, ...]]:
        """Those that compute, without integers, which may be sizes."""
        return [
            (step, *(value for value in told if not isinstance(value, int) or isinstance(value, bool)))
            for function, told in self.made
            if not is_view(function) and function not in (*COPIES, *RESHAPES)
            for step, told in _apart(function, told)
        ]

    def _told(self, value: Any) -> bool | int | float | str | None:
        if isinstance(value, torch.Tensor):
            place = memory(value) if _is_strided(value) else None
            if place in self.held:
                return self.held[place]
            if isinstance(value, torch.nn.Parameter) and place not in self.fresh:
                return f"a parameter of another module, {place}"
            value = float(value.detach()) if not value.dim() and not value.is_complex() else None
        if isinstance(value, float) and math.isnan(value):
            return "nan"
        return value if isinstance(value, (bool, int, float)) else None


def _apart(function: Any, told: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """A product is one step, and with a bias added two, whichever way torch takes."""
    if function in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default):
        yield torch.ops.aten.mm.default, told[1:]
        yield torch.ops.aten.add.Tensor, told[:1]
    else:
        yield torch.ops.aten.mm.default if function in PRODUCTS else function, told


class Program(TorchDispatchMode):
    """Every operation in its order with all that it is given: which earlier result, which memory of the model, which number.

    Two runs with the same steps here compute the same function, up to the shapes of what they are given.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.results: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.places = count()
        self._number(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.steps.append((function, tree_map(self._source, (args, kwargs or {}))))
        result = function(*args, **(kwargs or {}))
        self._number(value for value in tree_leaves(result) if isinstance(value, torch.Tensor))
        return result

    def _number(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.results.setdefault(tensor, next(self.places))

    def _source(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return value
        if not _is_strided(value):
            return "object", id(value)
        return self.results.get(value, ("held", memory(value), value.storage_offset(), value.stride()))


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_narrow(value: torch.Tensor) -> bool:
    return value.dtype in NARROW


@contextmanager
def module_outputs(model: torch.nn.Module) -> Iterator[dict[str, list[Any]]]:
    """What each module returns, by its path and in the order of calls."""
    outputs: dict[str, list[Any]] = {}
    handles = [
        module.register_forward_hook(lambda _, __, result, path=path: outputs.setdefault(path, []).append(result))
        for path, module in model.named_modules()
        if path
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_unconfirmed(graph: Graph, values: Mapping[Node, Any], computed: Computed, tolerance: float) -> Node | None:
    """The first node of a graph that no tensor of the model confirms; None where all of them are."""
    confirmed = set(graph.inputs)
    for node in reversed(graph.nodes):
        if node in confirmed or computed.has(values[node], tolerance):
            confirmed |= {node, *node.inputs}
    return next((node for node in graph.nodes if node not in confirmed), None)


def first_left(graph: Graph, values: Mapping[Node, Any], outputs: Mapping[str, list[Any]], tolerance: float) -> Node | None:
    """The last node of the first module that returns another value than it; None where no module could be compared."""
    last = {node.path: node for node in graph.nodes if node.path}
    for path, returned in outputs.items():
        node = last.get(path)
        if (
            node is None
            or len(returned) != 1
            or not isinstance(returned[0], torch.Tensor)
            or tuple(returned[0].shape) != node.shape
        ):
            continue
        if not _close(returned[0].double(), values[node], tolerance):
            return node
    return None


def _close(found: torch.Tensor, value: torch.Tensor, tolerance: float) -> bool:
    size = float(value.abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
    return torch.allclose(found, value.double(), rtol=0, atol=tolerance * size, equal_nan=True)
