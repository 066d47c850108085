"""What one object is: the values that it holds, each with what reads it and what puts it back."""

from __future__ import annotations

import array
import io
import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size})
CONTAINERS = (list, deque, OrderedDict, dict, set)
ITERATED = (*CONTAINERS, tuple, frozenset)
PICKLED = (io.StringIO, io.BytesIO, np.random.SeedSequence, *map(type, (iter([]), reversed([]), iter(()), iter(range(0)))))
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMPTY = object()


class Value:
    """What `read` returns now, which calling this puts back with `write`, if it is not the `same` then; `clear` makes it empty.

    copy: of what is written to in place. before: what it was, if that is known. owner: the type that an error names.
    """

    def __init__(
        self,
        owner: Any,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        clear: Callable[[], Any] | None = None,
        same: Callable[[Any, Any], bool] = operator.is_,
        copy: Callable[[Any], Any] | None = None,
        before: Any = EMPTY,
    ) -> None:
        self.owner, self.read, self.write, self.clear, self.same = type(owner).__name__, read, write, clear, same
        self.before = before if before is not EMPTY else copy(read()) if copy else self._now()

    def __call__(self) -> None:
        now = self._now()
        if self.before is EMPTY:
            if now is not EMPTY and self.clear is not None:
                self.clear()
        elif now is EMPTY or not self.same(now, self.before):
            self.write(self.before)

    def _now(self) -> Any:
        if self.clear is None:
            return self.read()
        try:
            return self.read()
        except (AttributeError, ValueError, KeyError):
            return EMPTY


class Plain:
    """What `Value` is for each state of an ordinary tensor, for all of them at once: most are as they were, which is seen here."""

    def __init__(self, tensor: torch.Tensor, content: bool) -> None:
        self.tensor, self.owner, self.memory = tensor, type(tensor).__name__, tensor.detach()
        self.storage = self.memory.untyped_storage()
        self.bits = self.memory.view(BITS[tensor.element_size()])
        self.copy = self.bits.clone() if content else None
        self.facts, self.held = self._facts(), self._held()

    def __call__(self) -> None:
        try:
            there = self._facts() == self.facts and self.tensor.data_ptr() == self.memory.data_ptr()
            if there and all(map(operator.is_, self._held(), self.held)) and self._same_content():
                return
        except Exception:  # what it is now cannot be looked at
            pass
        with ExitStack() as stack:  # each of them, whatever another one raises
            for value in reversed([*self._values()]):
                stack.callback(value)

    def _facts(self) -> tuple[Any, ...]:
        tensor = self.tensor
        place = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, self.storage.nbytes()
        return (*place, tensor._version, tensor.is_leaf, tensor.requires_grad)

    def _same_content(self) -> bool:
        return self.copy is None or torch.equal(self.bits, self.copy)

    def _held(self) -> list[Any]:
        tensor = self.tensor
        return [tensor.grad if tensor.is_leaf else None, *(getattr(tensor, name) for name in HOOKS)]

    def _values(self) -> Iterator[Value]:
        tensor, (*_, size, version, leaf, needs), (gradient, *hooks) = self.tensor, self.facts, self.held
        yield _place(tensor, self.memory, size)
        if self.copy is not None:
            yield tensor_content(tensor, self.bits, self.copy)
        if leaf:
            yield _requires_grad(tensor, needs)
            yield _gradient(tensor, gradient)
        for name, kept in zip(HOOKS, hooks, strict=True):
            yield Value(tensor, partial(getattr, tensor, name), partial(setattr, tensor, name), before=kept)
        yield _version(tensor, version)


def is_a(value: Any, kinds: Any) -> bool:
    """Its own type, whatever it says that its class is."""
    return issubclass(type(value), kinds)


def states(value: Any, left: Collection[Any] = ()) -> Iterator[Value | Plain]:
    """The values of an object that are no attributes; what cannot be looked at is left as it is, and some if asked to."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        with suppress(Exception):
            if _is_ordinary(value):
                yield Plain(value, tensor_content not in left)
                return
    for kinds, takes in STATES:
        if is_a(value, kinds):
            for take in takes:
                if take not in left:
                    with suppress(Exception):
                        yield take(value)


def attribute(value: Any, name: str) -> Value:
    return Value(value, partial(getattr, value, name), partial(setattr, value, name), partial(delattr, value, name))


def item(held: dict[str, Any], name: str) -> Value:
    return Value(held, partial(operator.getitem, held, name), partial(held.__setitem__, name), partial(held.__delitem__, name))


def attributes(value: Any, inside: list[Any]) -> Iterator[Value]:
    """An object's class, its attributes and its slots; what they hold is added to `inside`."""
    if type(value) in ITERATED:
        return
    held: Any = None
    with suppress(Exception):  # of an object's own making
        held = value.__dict__ if value.__dict__ is value.__dict__ else None
    if is_a(held, dict):
        yield _class_and_dict(value)
        inside += opened([*dict.values(held)])
    for base in type(value).__mro__:
        for slot in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType):
                read, write, clear = (partial(does, value) for does in (slot.__get__, slot.__set__, slot.__delete__))
                kept = Value(value, read, write, clear)
                inside += opened([kept.before])
                yield kept


def _class_and_dict(value: Any) -> Value:
    def read() -> list[Any]:
        held = value.__dict__
        return [type(value), held, *dict.keys(held), *dict.values(held)]

    def write(before: list[Any]) -> None:
        kind, held, *content = before
        try:
            if not _same_entries(entries(held), content):
                _fill(held, content)
            if value.__dict__ is not held:
                object.__setattr__(value, "__dict__", held)
        finally:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)

    return Value(value, read, write, same=_same_entries)


def parts(value: Any) -> list[Any]:
    """What is in an object beside its attributes, as far as it may change."""
    found: list[Any] = []
    with suppress(Exception):
        if is_a(value, ITERATED):
            found = entries(value)
        elif is_a(value, torch.Tensor):
            found = [*(getattr(value, name) for name in HOOKS), value.grad if value.is_leaf else None]
        elif is_a(value, np.ndarray) and value.dtype == object:
            found = value.ravel().tolist()
        elif is_a(value, np.random.Generator):
            found = [value.bit_generator]
        elif is_a(value, np.random.BitGenerator):
            found = [value.seed_seq]
    return opened(found)


def opened(found: list[Any]) -> list[Any]:
    """Without what never changes, numbers and texts above all."""
    return [one for one in found if (kind := type(one)) not in PLAIN and not (kind is tuple and PLAIN.issuperset(map(type, one)))]


def container(held: Any) -> Value:
    return Value(held, partial(entries, held), partial(_fill, held), same=_same_entries)


def entries(held: Any) -> list[Any]:
    """Keys before values; through the methods of its base, which a class of one's own may have changed."""
    base = _base(held)
    return [*base.keys(held), *base.values(held)] if issubclass(base, dict) else list(base.__iter__(held))


def _same_entries(present: list[Any], before: list[Any]) -> bool:
    return len(present) == len(before) and all(map(operator.is_, present, before))


def _fill(held: Any, before: list[Any]) -> None:
    base = _base(held)
    base.clear(held)
    if issubclass(base, dict):
        for key, value in zip(before[: len(before) // 2], before[len(before) // 2 :], strict=True):
            base.__setitem__(held, key, value)
    else:
        (base.update if base is set else base.extend)(held, before)


def _base(held: Any) -> Any:
    return type(held) if type(held) in ITERATED else next(base for base in ITERATED if is_a(held, base))


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether each of its entries has memory of its own, which can be read as whole numbers."""
    marked = tensor.is_complex() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference()
    known = tensor.layout == torch.strided and tensor.device.type != "meta" and not is_functorch_wrapped_tensor(tensor)
    return known and not marked and (0 not in tensor.stride() or tensor.is_contiguous())


def _place(tensor: torch.Tensor, memory: torch.Tensor | None = None, size: int = 0) -> Value:
    known = memory is not None
    memory = tensor.detach() if memory is None else memory
    if not known and memory.layout == torch.strided:
        size = memory.untyped_storage().nbytes()

    def is_there(now: torch.Tensor, before: torch.Tensor) -> bool:
        if size and memory.untyped_storage().nbytes() != size:
            memory.untyped_storage().resize_(size)
        if (now.device, now.dtype, now.layout, now.shape) != (before.device, before.dtype, before.layout, before.shape):
            return False
        return now.layout != torch.strided or (now.stride(), now.data_ptr()) == (before.stride(), before.data_ptr())

    if not known and not is_there(tensor, memory):
        raise NotImplementedError
    return Value(tensor, lambda: tensor, partial(setattr, tensor, "data"), same=is_there, before=memory)


def tensor_content(tensor: torch.Tensor, memory: torch.Tensor | None = None, before: Any = EMPTY) -> Value:
    if memory is None:
        if tensor.device.type == "meta":
            raise NotImplementedError
        memory = tensor.detach()
        if memory.layout == torch.strided and any(
            size > 1 and not step for size, step in zip(memory.shape, memory.stride(), strict=True)
        ):
            memory = memory[tuple(slice(None if step else 1) for step in memory.stride())]  # an expanded one repeats its entries
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            same_bits(memory, memory)  # it may not know how
    return Value(tensor, lambda: memory, memory.copy_, same=same_bits, copy=torch.clone, before=before)


def _version(tensor: torch.Tensor, before: Any = EMPTY) -> Value:
    """Else a backward pass that is still to come would be refused."""
    write = torch._C._autograd._unsafe_set_version_counter
    return Value(tensor, lambda: tensor._version, lambda before: write((tensor,), (before,)), before=before)


def _requires_grad(tensor: torch.Tensor, before: Any = EMPTY) -> Value:
    if before is EMPTY and not tensor.is_leaf:
        raise NotImplementedError

    def write(needs: bool) -> None:
        if not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        if tensor.is_leaf:
            tensor.requires_grad_(needs)

    return Value(tensor, lambda: tensor.requires_grad, write, before=before)


def _gradient(tensor: torch.Tensor, before: Any = EMPTY) -> Value:
    if before is EMPTY and not tensor.is_leaf:
        raise NotImplementedError
    read = lambda: tensor.grad if tensor.is_leaf else None  # noqa: E731
    return Value(tensor, read, partial(setattr, tensor, "grad"), before=before)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same: a NaN is equal to itself, and 0 is not −0."""
    if one.layout != torch.strided or one.is_quantized:
        return False
    one, other = one.resolve_neg(), other.resolve_neg()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = BITS[one.element_size()]
    return one.shape == other.shape and torch.equal(one.view(bits), other.view(bits))


def array_content(value: np.ndarray) -> Value:
    if not value.flags.writeable:
        raise NotImplementedError

    def same(now: np.ndarray, before: np.ndarray) -> bool:
        return (now.shape, now.dtype) == (before.shape, before.dtype) and now.tobytes() == before.tobytes()

    def write(before: np.ndarray) -> None:
        if value.shape != before.shape:
            value.resize(before.shape, refcheck=False)
        np.copyto(value, before)

    return Value(value, lambda: value, write, same=same, copy=operator.methodcaller("copy"))


def _methods(read: str, write: str) -> Callable[[Any], Value]:
    return lambda value: Value(value, getattr(value, read), getattr(value, write))


def _named(name: str) -> Callable[[Any], Value]:
    return lambda value: Value(value, partial(getattr, value, name), partial(setattr, value, name))


def _entries(value: Any) -> Value:
    whole = slice(None)
    return Value(value, partial(value.__getitem__, whole), partial(value.__setitem__, whole), same=operator.eq)


def _pickled(value: Any) -> Value:
    return Value(value, lambda: value.__reduce_ex__(4)[2], value.__setstate__)


STATES: list[tuple[Any, tuple[Callable[[Any], Value], ...]]] = [
    (CONTAINERS, (container,)),
    (torch.Tensor, (_place, tensor_content, _requires_grad, _gradient, *map(_named, HOOKS), _version)),
    (np.ndarray, (array_content,)),
    (torch.UntypedStorage, (_methods("clone", "copy_"),)),
    ((torch.Generator, np.random.RandomState), (_methods("get_state", "set_state"),)),
    (random.Random, (_methods("getstate", "setstate"),)),
    (np.random.BitGenerator, (_named("state"),)),
    ((bytearray, array.array), (_entries,)),
    (PICKLED, (_pickled,)),
]
