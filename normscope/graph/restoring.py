"""A model as it was: whatever it does to itself while it runs is undone, in everything that it holds."""

from __future__ import annotations

import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

DEPTH = 4  # how many objects inside of each other are looked into, beside modules and containers
LEAVES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial)
CONTAINERS = (list, deque, OrderedDict, dict, set)
MANY = 10_000  # entries of a container around functions: what is in a larger one is not looked into
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Restore = Callable[[], Any]


class Snapshot:
    """A model as it is now: its attributes, parameters and buffers, containers, generators and plain objects.

    Of its functions, such as hooks, what they write to: see `_around`.
    tensors: whether what is in tensors may change, which nothing on fake ones does.
    """

    def __init__(self, model: torch.nn.Module, tensors: bool = True) -> None:
        self.kept = list(_kept(model, tensors))

    def restore(self) -> None:
        """Make the model what it was then.

        Nothing is written that has not changed. Tensors are compared bit by bit with copies, because a write through `.data` or
        `.numpy()` leaves no trace.
        """
        with torch.no_grad():
            for restore in self.kept:
                restore()


@contextmanager
def untouched(model: torch.nn.Module, tensors: bool = True, before: Snapshot | None = None) -> Iterator[None]:
    """Undo what happens inside to a model; `before`: a snapshot of it as it is, which is then not made again."""
    before = before or Snapshot(model, tensors)
    try:
        yield
    finally:
        before.restore()


def _kept(model: torch.nn.Module, tensors: bool) -> Iterator[Restore]:
    """What puts back each object that a model holds, containers before what is in them."""
    seen: dict[int, Any] = {}  # the objects are kept, so that no other gets their ids
    around: dict[int, Any] = {}  # what is around functions
    waiting: list[tuple[Any, int]] = [(model, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (*LEAVES, types.ModuleType)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FUNCTIONS):
            yield from _around(value, around)
            continue
        if isinstance(value, torch.Tensor):
            if tensors and not is_lazy(value) and value.device.type != "meta":
                yield _tensor(value)
            continue
        restore = _state(value)
        if restore is not None:
            yield restore
            continue
        inside: list[Any] = []
        if isinstance(value, CONTAINERS):
            yield _container(value)
        if isinstance(value, (list, deque, tuple, set, frozenset)):
            inside += value
        elif isinstance(value, dict):
            inside += dict.values(value)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and (isinstance(value, torch.nn.Module) or depth < DEPTH):
            yield _container(held)
            depth += not isinstance(value, torch.nn.Module)
            inside += held.values()
        waiting += [(item, depth) for item in inside]


def _around(function: Any, seen: dict[int, Any]) -> Iterator[Restore]:
    """What puts back what a function may write to: its variables and global names, and attributes and containers in them or among
    its arguments. Of functions that it wraps too, and of those of its own module that it calls by name.

    Objects in containers are not looked into: they may hold a whole training.
    """
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (*LEAVES, types.ModuleType)) or id(value) in seen:
            continue
        seen[id(value)] = value  # many hooks may share a container
        if not isinstance(value, (*FUNCTIONS, *CONTAINERS)):
            value = getattr(value, "__dict__", None)
        if isinstance(value, CONTAINERS):
            yield _container(value)
            waiting += [part for part in _parts(value) if isinstance(part, CONTAINERS)] if len(value) <= MANY else []
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.BuiltinMethodType):
            waiting.append(value.__self__)  # as of `kept.append`
        elif isinstance(value, types.MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            cells = list(_filled(value.__closure__ or ()))
            names = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            yield partial(value.__globals__.update, names)
            yield from (partial(setattr, cell, "cell_contents", content) for cell, content in cells)
            waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__dict__]
            waiting += [content for _, content in cells]
            waiting += [held for held in names.values() if getattr(held, "__globals__", value.__globals__) is value.__globals__]


def _filled(cells: tuple[types.CellType, ...]) -> Iterator[tuple[types.CellType, Any]]:
    for cell in cells:
        with suppress(ValueError):  # it is empty
            yield cell, cell.cell_contents


def _tensor(tensor: torch.Tensor) -> Restore:
    memory, content, needs_gradient = tensor.detach(), tensor.detach().clone(), tensor.requires_grad

    def restore() -> None:
        if not same_bits(memory, content):
            memory.copy_(content)
        if tensor.shape != memory.shape or (tensor.layout == torch.strided and tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        if tensor.is_leaf and tensor.requires_grad != needs_gradient:
            tensor.requires_grad_(needs_gradient)

    return restore


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same: a NaN is equal to itself, and 0 is not −0."""
    if one.layout != torch.strided or one.is_quantized:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = BITS[one.element_size()]
    return one.shape == other.shape and torch.equal(one.view(bits), other.view(bits))


def _container(held: Any) -> Restore:
    """Through the methods of its base, which a class of one's own may have changed."""
    before, base = _parts(held), _base(held)

    def restore() -> None:
        present = _parts(held)
        if len(present) == len(before) and all(map(operator.is_, present, before)):
            return
        base.clear(held)
        if issubclass(base, dict):
            for key, value in zip(before[::2], before[1::2], strict=True):
                base.__setitem__(held, key, value)
        else:
            (base.update if base is set else base.extend)(held, before)

    return restore


def _parts(held: Any) -> list[Any]:
    base = _base(held)
    return [part for item in base.items(held) for part in item] if issubclass(base, dict) else list(base.__iter__(held))


def _base(held: Any) -> Any:
    return next(base for base in CONTAINERS if isinstance(held, base))


def _state(value: Any) -> Restore | None:
    """For objects that have a state of their own: generators of random numbers, arrays."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray):
        content = value.copy()
        return lambda: None if not value.flags.writeable or value.tobytes() == content.tobytes() else np.copyto(value, content)
    return None
