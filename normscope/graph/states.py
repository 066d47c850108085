"""What one object is: the values that it holds, each with what reads it and what puts it back."""

from __future__ import annotations

import array
import io
import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size})
CONTAINERS = (list, deque, OrderedDict, dict, set)
ITERATED = (*CONTAINERS, tuple, frozenset)
PICKLED = (io.StringIO, io.BytesIO, np.random.SeedSequence, *map(type, (iter([]), reversed([]), iter(()), iter(range(0)))))
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMPTY = object()


class Value:
    """What `read` returns now, which calling this puts back with `write`, if it is not the `same` then; `clear` makes it empty.

    copy: of what is written to in place. owner: the type that an error names.
    """

    def __init__(
        self,
        owner: Any,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        clear: Callable[[], Any] | None = None,
        same: Callable[[Any, Any], bool] = operator.is_,
        copy: Callable[[Any], Any] | None = None,
    ) -> None:
        self.owner, self.read, self.write, self.clear, self.same = type(owner).__name__, read, write, clear, same
        self.before = copy(read()) if copy else self._now()

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


def is_a(value: Any, kinds: Any) -> bool:
    """Its own type, whatever it says that its class is."""
    return issubclass(type(value), kinds)


def states(value: Any, left: Collection[Any] = ()) -> Iterator[Value]:
    """The values of an object that are no attributes; what cannot be looked at is left as it is, and some if asked to."""
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
        yield Value(value, partial(type, value), partial(object.__setattr__, value, "__class__"))
        yield Value(value, partial(getattr, value, "__dict__"), partial(object.__setattr__, value, "__dict__"))
        yield container(held)
        inside += opened([*dict.values(held)])
    for base in type(value).__mro__:
        for slot in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType):
                read, write, clear = (partial(does, value) for does in (slot.__get__, slot.__set__, slot.__delete__))
                kept = Value(value, read, write, clear)
                inside += opened([kept.before])
                yield kept


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
    return next(base for base in ITERATED if is_a(held, base))


def _place(tensor: torch.Tensor) -> Value:
    memory = tensor.detach()
    size = memory.untyped_storage().nbytes() if memory.layout == torch.strided else 0

    def is_there(now: torch.Tensor, before: torch.Tensor) -> bool:
        if size and memory.untyped_storage().nbytes() != size:
            memory.untyped_storage().resize_(size)
        if (now.device, now.dtype, now.layout, now.shape) != (before.device, before.dtype, before.layout, before.shape):
            return False
        return now.layout != torch.strided or (now.stride(), now.data_ptr()) == (before.stride(), before.data_ptr())

    if not is_there(tensor, memory):
        raise NotImplementedError
    return Value(tensor, lambda: tensor, partial(setattr, tensor, "data"), same=is_there, copy=lambda _: memory)


def tensor_content(tensor: torch.Tensor) -> Value:
    if tensor.device.type == "meta":
        raise NotImplementedError
    memory = tensor.detach()
    if memory.layout == torch.strided and any(
        size > 1 and not step for size, step in zip(memory.shape, memory.stride(), strict=True)
    ):
        memory = memory[tuple(slice(None if step else 1) for step in memory.stride())]  # an expanded one repeats its entries
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        same_bits(memory, memory)  # it may not know how
    return Value(tensor, lambda: memory, memory.copy_, same=same_bits, copy=torch.clone)


def _version(tensor: torch.Tensor) -> Value:
    """Else a backward pass that is still to come would be refused."""
    write = torch._C._autograd._unsafe_set_version_counter
    return Value(tensor, lambda: tensor._version, lambda before: write((tensor,), (before,)))


def _requires_grad(tensor: torch.Tensor) -> Value:
    if not tensor.is_leaf:
        raise NotImplementedError

    def write(needs: bool) -> None:
        if not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        if tensor.is_leaf:
            tensor.requires_grad_(needs)

    return Value(tensor, lambda: tensor.requires_grad, write)


def _gradient(tensor: torch.Tensor) -> Value:
    if not tensor.is_leaf:
        raise NotImplementedError
    read = lambda: tensor.grad if tensor.is_leaf else None  # noqa: E731
    return Value(tensor, read, partial(setattr, tensor, "grad"))


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
