"""A model as it runs, in its own type: in how little it computes, and what it writes to memory that it shares with itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.graph.naming import is_view, operation_name


class Running(TorchDispatchMode):
    """dtype: the least precise floating-point type that is computed in.

    shared_write(): the operation that wrote to memory which the model had before, and which it reads as another tensor too. Each of
    such tensors (a buffer and a view of it, two weights tied by their storage) is one of its own to torch.export: a write to one is
    not seen in the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64
        self.made: set[int] = set()  # memory that is new here
        self.views: dict[int, torch.Tensor] = {}  # of memory that is not; kept, so that no other tensor gets the id of one
        self.held: dict[int, dict[int, weakref.ref[torch.Tensor]]] = {}  # tensors that were there before, by their memory
        self.written: dict[int, str] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if id(tensor) not in self.views and memory(tensor) not in self.made:
                self.held.setdefault(memory(tensor), {}).setdefault(id(tensor), weakref.ref(tensor))
        for tensor in _written(function, args, kwargs):
            self.written.setdefault(memory(tensor), operation_name(function))
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            if memory(tensor) in self.held:
                if is_view(function):
                    self.views[id(tensor)] = tensor
            else:
                self.made.add(memory(tensor))
            if tensor.is_floating_point():
                self.dtype = max(self.dtype, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result

    def shared_write(self) -> str | None:
        for place, operation in self.written.items():
            if sum(tensor() is not None for tensor in self.held.get(place, {}).values()) > 1:
                return operation
        return None


def memory(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


@contextmanager
def as_if_exported() -> Iterator[None]:
    """A model that asks whether it is being compiled or exported is told so."""
    flags = "_is_compiling_flag", "_is_exporting_flag"
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)
