"""A model as it was: whatever it does to itself while it runs is undone, in everything that it holds."""

from __future__ import annotations

import dis
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from normscope.core.errors import Refusal, first_line
from normscope.graph.states import (
    ITERATED,
    PLAIN,
    Plain,
    Value,
    array_content,
    attribute,
    attributes,
    is_a,
    item,
    opened,
    parts,
    states,
    tensor_content,
)

DEPTH = 4  # how many objects inside of each other are looked into, beside modules and containers
NEAR = 2  # likewise around functions
LEFT = (*PLAIN, types.ModuleType, UninitializedParameter, UninitializedBuffer)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial)
MANY = 10_000  # entries of containers around a function that are looked into, in all
LARGE = 2**22  # entries of tensors and arrays around functions that are copied, in all
SHARED = {"queue", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "logging", "socket"}  # with others


class Snapshot:
    """A model as it is now: its attributes, parameters and buffers, containers, generators and plain objects.

    Of its functions, such as hooks, what they write to: see `_Around`.
    tensors: whether what is in tensors may change, which nothing on fake ones does.
    """

    def __init__(self, model: torch.nn.Module, tensors: bool = True) -> None:
        self.kept: list[Callable[[], Any]] = [*_kept(model, tensors)]
        self.kept.append(Value(model, torch.get_default_dtype, torch.set_default_dtype))

    def restore(self) -> None:
        """Make the model what it was then.

        Nothing is written that has not changed. Tensors are compared bit by bit with copies, because a write through `.data` or
        `.numpy()` leaves no trace. What cannot be put back is refused once everything else is.
        """
        failed = []
        with torch.no_grad():
            for restore in self.kept:
                try:
                    restore()
                except Exception as error:  # of whatever the model holds
                    failed.append(f"{getattr(restore, 'owner', 'class')}: {first_line(error)}")
        if failed:
            raise Refusal(
                "the model changes what it holds when it runs, and this could not be put back",
                [*dict.fromkeys(failed)],
                "Load the model again, and do not change this in `forward`.",
            )


@contextmanager
def untouched(model: torch.nn.Module, tensors: bool = True, before: Snapshot | None = None) -> Iterator[None]:
    """Undo what happens inside to a model; `before`: a snapshot of it as it is, which is then not made again."""
    before = before or Snapshot(model, tensors)
    try:
        yield
    except Exception:
        before.restore()
        raise
    except BaseException:  # an interrupt goes on
        with suppress(Refusal):
            before.restore()
        raise
    before.restore()


def _kept(model: torch.nn.Module, tensors: bool) -> Iterator[Value | Plain]:
    """What puts back each object that a model holds, containers before what is in them; those that are nearest come first."""
    seen: dict[int, Any] = {}  # the objects are kept, so that no other gets their ids
    around, left = _Around(), () if tensors else (tensor_content,)
    waiting: deque[tuple[Any, int]] = deque([(model, 0)])
    while waiting:
        value, depth = waiting.popleft()
        if id(value) in seen or _is_left(value):
            continue
        seen[id(value)] = value
        if is_a(value, FUNCTIONS):
            yield from around(value)
            continue
        yield from states(value, left)
        waiting.extendleft((one, depth) for one in parts(value))
        inside: list[Any] = []
        if is_a(value, torch.nn.Module):
            yield from attributes(value, inside)
            waiting.extendleft((one, depth) for one in inside)
        elif depth < DEPTH:
            yield from attributes(value, inside)
            waiting.extend((one, depth + 1) for one in inside)


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

    def __call__(self, function: Any) -> Iterator[Value | Plain]:
        waiting, room = deque([(function, 0)]), MANY
        while waiting:
            value, depth = waiting.popleft()
            if id(value) in self.seen or _is_left(value):
                continue
            self.seen[id(value)] = value
            inside: list[Any] = []
            if is_a(value, FUNCTIONS):
                yield from self._function(value, inside)
            else:
                if is_a(value, (torch.Tensor, np.ndarray)):
                    self.memory -= value.numel() if is_a(value, torch.Tensor) else value.size
                yield from states(value, () if self.memory > 0 else (tensor_content, array_content))
                inside += parts(value)
                if not is_a(value, ITERATED) and depth < NEAR:
                    depth += 1
                    yield from attributes(value, inside)
            inside = opened(inside)
            if len(inside) <= room:
                room -= len(inside)
                waiting += [(one, depth) for one in inside]

    def _function(self, function: Any, inside: list[Any]) -> Iterator[Value | Plain]:
        if isinstance(function, partial):
            inside += [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, types.BuiltinMethodType):
            inside.append(function.__self__)  # as of `kept.append`
        elif isinstance(function, types.MethodType):
            inside += [function.__func__, function.__self__]
        else:
            cells, names = function.__closure__ or (), function.__globals__
            used, assigned = _global_names(function.__code__)
            yield from (item(names, name) for name in assigned)
            variables = [attribute(cell, "cell_contents") for cell in cells]
            yield from variables
            inside += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), function.__dict__]
            inside += [variable.before for variable in variables]
            held = opened([names[name] for name in used if name in names])
            inside += [one for one in held if not is_a(one, FUNCTIONS) or getattr(one, "__globals__", names) is names]


def _is_left(value: Any) -> bool:
    """What has nothing to put back, or what other threads may change meanwhile."""
    kind = type(value)
    return kind in weakref.ProxyTypes or str(kind.__module__).partition(".")[0] in SHARED or issubclass(kind, LEFT)


def _global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Those that a function names, the functions inside of it included, and those of them that it assigns."""
    used = set(code.co_names)
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            used, assigned = (mine | its for mine, its in zip((used, assigned), _global_names(inner), strict=True))
    return used, assigned
