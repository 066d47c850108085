"""A model as it was: whatever it does to itself while it runs is undone, in everything that it holds."""

from __future__ import annotations

import dis
import operator
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

DEPTH = 4  # how many objects inside of each other are looked into, beside modules and containers
NEAR = 2  # likewise around functions
LEAVES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial)
CONTAINERS = (list, deque, OrderedDict, dict, set)
MANY = 10_000  # entries of containers around a function that are looked into, in all
LARGE = 2**22  # entries of tensors and arrays around functions that are copied, in all
SHARED = {"queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "logging", "socket"}  # with others
STATEFUL = (torch.Tensor, np.ndarray, bytearray, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Restore = Callable[[], Any]


class Snapshot:
    """A model as it is now: its attributes, parameters and buffers, containers, generators and plain objects.

    Of its functions, such as hooks, what they write to: see `_Around`.
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
    around = _Around()
    waiting: list[tuple[Any, int]] = [(model, 0)]
    while waiting:
        value, depth = waiting.pop()
        if _is_left(value) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FUNCTIONS):
            yield from around(value)
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
        held = _attributes(value)
        if isinstance(value, torch.nn.Module) or depth < DEPTH:
            if isinstance(held, dict):
                yield _container(held)
                inside += held.values()
            yield from _slots(value, inside)
            depth += not isinstance(value, torch.nn.Module)
        waiting += [(item, depth) for item in inside]


class _Around:
    """What puts back what functions may write to: their variables, the global names that they assign, and tensors, generators,
    attributes and containers in them or among their arguments. Of functions that they wrap too, and of those of their own module
    that they call by name.

    Up to a number of entries and two objects inside of each other, since there may be a whole training.
    Containers that another thread fills meanwhile lose what it put there.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}  # many hooks may share a container
        self.memory = LARGE

    def __call__(self, function: Any) -> Iterator[Restore]:
        waiting, room = deque([(function, 0)]), MANY
        while waiting:
            value, depth = waiting.popleft()
            if _is_left(value) or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            inside: list[Any] = []
            if isinstance(value, STATEFUL):
                yield from self._content(value)
            elif isinstance(value, FUNCTIONS):
                yield from self._function(value, inside)
            elif isinstance(value, tuple):
                inside += tuple.__iter__(value)
            elif isinstance(value, CONTAINERS):
                yield _container(value)
                inside += _parts(value)
            elif depth < NEAR:
                depth += 1
                if isinstance(held := _attributes(value), dict):
                    yield _container(held)
                    inside += held.values()
                yield from _slots(value, inside)
            if len(inside) <= room:
                room -= len(inside)
                waiting += [(one, depth) for one in inside if not _is_left(one)]

    def _function(self, function: Any, inside: list[Any]) -> Iterator[Restore]:
        if isinstance(function, partial):
            inside += [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, types.BuiltinMethodType):
            inside.append(function.__self__)  # as of `kept.append`
        elif isinstance(function, types.MethodType):
            inside += [function.__func__, function.__self__]
        else:
            cells, names = list(_filled(function.__closure__ or ())), function.__globals__
            used, assigned = _global_names(function.__code__)
            yield from (_named(names, name) for name in assigned)
            yield from (partial(setattr, cell, "cell_contents", content) for cell, content in cells)
            inside += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), function.__dict__]
            inside += [content for _, content in cells]
            held = [names[name] for name in used if name in names]
            inside += [one for one in held if _is_left(one) or getattr(one, "__globals__", names) is names]

    def _content(self, value: Any) -> Iterator[Restore]:
        if isinstance(value, torch.Tensor) and (is_lazy(value) or value.device.type == "meta"):
            return
        self.memory -= value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
        restore = None if self.memory <= 0 else _tensor(value) if isinstance(value, torch.Tensor) else _state(value)
        if restore is not None:
            yield restore


def _is_left(value: Any) -> bool:
    """What has nothing to put back, or what other threads may change meanwhile."""
    kind = type(value)
    return (
        kind in weakref.ProxyTypes or kind.__module__.partition(".")[0] in SHARED or isinstance(value, (*LEAVES, types.ModuleType))
    )


def _slots(value: Any, inside: list[Any]) -> Iterator[Restore]:
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            with suppress(Exception):  # it is empty, or private to its class
                content = getattr(value, name)
                inside.append(content)
                yield partial(_set_slot, value, name, content)


def _set_slot(value: Any, name: str, content: Any) -> None:
    if getattr(value, name, None) is not content:
        object.__setattr__(value, name, content)  # it may be frozen


def _attributes(value: Any) -> Any:
    with suppress(Exception):  # of an object's own making
        return value.__dict__
    return None


def _global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Those that a function names, the functions inside of it included, and those of them that it assigns."""
    used = set(code.co_names)
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            used, assigned = (mine | its for mine, its in zip((used, assigned), _global_names(inner), strict=True))
    return used, assigned


def _named(names: dict[str, Any], name: str) -> Restore:
    return partial(names.__setitem__, name, names[name]) if name in names else partial(names.pop, name, None)


def _filled(cells: tuple[types.CellType, ...]) -> Iterator[tuple[types.CellType, Any]]:
    for cell in cells:
        with suppress(ValueError):  # it is empty
            yield cell, cell.cell_contents


def _tensor(tensor: torch.Tensor) -> Restore:
    memory, content, needs_gradient = tensor.detach(), tensor.detach().clone(), tensor.requires_grad
    gradient = tensor.grad if tensor.is_leaf else None
    restore_gradient = None if gradient is None else _tensor(gradient)
    version = None if tensor.is_inference() else tensor._version

    def restore() -> None:
        if not same_bits(memory, content):
            memory.copy_(content)
        if version is not None and memory._version != version:  # else a backward pass that is still to come would be refused
            torch._C._autograd._unsafe_set_version_counter((memory,), (version,))
        if tensor.shape != memory.shape or (tensor.layout == torch.strided and tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        if tensor.is_leaf and tensor.requires_grad != needs_gradient:
            tensor.requires_grad_(needs_gradient)
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
        if restore_gradient is not None:
            restore_gradient()

    return restore


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same: a NaN is equal to itself, and 0 is not −0."""
    if one.layout != torch.strided or one.is_quantized:
        return False
    one, other = one.resolve_neg(), other.resolve_neg()
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
    if isinstance(value, bytearray):
        return partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, np.ndarray):
        content = value.copy()
        return lambda: None if not value.flags.writeable or value.tobytes() == content.tobytes() else np.copyto(value, content)
    return None
