"""A model as it runs, in its own type: in how little it computes, and what it writes to memory that it shares with itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normscope.core.errors import Refusal
from normscope.graph.arrays import shared_with_arrays
from normscope.graph.naming import is_view, operation_name

# they may read the very tensor that they write, as entrywise operations may; of some of these torch does not say that they are
ROW_BY_ROW = (
    "copy", "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "where", "tril", "triu", "floor_divide",
    "copysign", "heaviside",
)  # fmt: skip


class Running(TorchDispatchMode):
    """dtype: the least precise floating-point type that is computed in.

    shared_write(): the operation that wrote to memory which the model had before, and which it reads as another tensor too. Each of
    such tensors (a buffer and a view of it, two weights tied by their storage) is one of its own to torch.export: a write to one is
    not seen in the other.

    overlap: the first operation that writes to memory which it also reads as another tensor, as `y[:, 1:] += y[:, :-1]` does:
    what it reads depends on the order in which a kernel writes.

    exchanged: the first operation on a tensor that was given other memory since it was seen, as `w.data = y` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64
        self.made: set[int] = set()  # memory that is new here
        self.old: set[int] = set()  # memory that is not
        self.views: dict[int, torch.Tensor] = {}  # of memory that is not; kept, so that no other tensor gets the id of one
        self.held: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that were there before
        self.written: dict[tuple[int, int], str] = {}  # which memory, and by which operation
        self.changed: dict[int, torch.UntypedStorage] = {}  # memory that is not new and is written to
        self.overlap: str | None = None
        self.storages: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # of each tensor, as it was first seen
        self.exchanged: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self.views and memory(tensor) not in self.made:
                self.held.setdefault(id(tensor), weakref.ref(tensor))
                self.old.add(memory(tensor))
            if self.exchanged is None and self._is_exchanged(tensor):
                self.exchanged = operation_name(function)
        written = [*written_by(function, args, kwargs)]
        for tensor in written:
            if memory(tensor) in self.old and tensor.numel():
                self.written.setdefault(span(tensor), operation_name(function))
                self.changed[memory(tensor)] = tensor.untyped_storage()
        if written and self.overlap is None and _reads_what_it_writes(function, written, args, kwargs):
            self.overlap = operation_name(function)
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            if memory(tensor) in self.old:
                if is_view(function):
                    self.views[id(tensor)] = tensor
            else:
                self.made.add(memory(tensor))
            self._is_exchanged(tensor)
            if tensor.is_floating_point():
                self.dtype = max(self.dtype, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result

    def _is_exchanged(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        seen, before = self.storages.get(id(tensor), (None, storage))
        if seen is None or seen() is not tensor:  # the id may have been another tensor's
            self.storages[id(tensor)] = weakref.ref(tensor), storage
            return False
        return storage != before

    def check(self, model: torch.nn.Module) -> None:
        """Refuse what a graph does not show."""
        if shared_with_arrays(model, self.changed.values()):
            raise Refusal(
                "the model writes to memory that a tensor of it shares with an array, which a graph does not show",
                ["what reads the array may see the numbers that were written"],
                "Make the tensor from a copy of the array: `torch.tensor(array)`.",
            )
        shared = self.shared_write()
        if shared is not None:
            raise Refusal(
                "the model writes to memory that several of its tensors share, which a graph does not show",
                [f"{shared} writes to one of them"],
                "Let the model hold one tensor, and make the others from it in its forward.",
            )
        if self.overlap is not None:
            raise Refusal(
                "the model reads memory while it writes to it, so its answer depends on the order in which a kernel does both",
                [f"{self.overlap} writes to a tensor that overlaps with another one it reads"],
                "Read from a copy: `y[:, 1:] += y[:, :-1].clone()`.",
            )
        if self.exchanged is not None:
            raise Refusal(
                "the model gives a tensor other memory, which a graph does not show",
                [f"as `.data =` and `set_` do, before {self.exchanged}"],
                "Write a new tensor instead, or copy with `copy_`.",
            )

    def shared_write(self) -> str | None:
        held = [span(tensor) for reference in self.held.values() if (tensor := reference()) is not None and tensor.numel()]
        for (start, stop), operation in self.written.items():
            if sum(start < end and begin < stop for begin, end in held) > 1:
                return operation
        return None


def memory(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, the same for all its views."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first entry to behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return _arguments(function, args, kwargs, written=True)


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: bool) -> list[torch.Tensor]:
    """The tensors among the arguments that an operation writes to, or among the others."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) == written:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _reads_what_it_writes(function: Any, written: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what it writes to shares entries with what it reads beside, or with something else that it writes to."""
    read = _arguments(function, args, kwargs, written=False)
    if operation_name(function).startswith("_foreach_"):  # place by place of lists as long as each other
        entrywise = bool(written) and len(read) % len(written) == 0
    else:
        entrywise = len(written) == 1 and (torch.Tag.pointwise in function.tags or operation_name(function) in ROW_BY_ROW)
    return any(share_entries(*pair) for pair in combinations(written, 2)) or any(
        share_entries(one, other) and not (entrywise and is_same_view(one, other) and place % len(written) == number)
        for number, one in enumerate(written)
        for place, other in enumerate(read)
    )


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return view_of(one) == view_of(other)


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is the same for all tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor with memory of its own, and neither a stand-in for one nor what a transform wraps."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not functorch.is_functorch_wrapped_tensor(tensor)


def share_entries(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte of memory in common."""
    (start, stop), (begin, end) = span(one), span(other)
    if not (one.numel() and other.numel() and start < end and begin < stop) or memory(one) != memory(other):
        return False
    unit = math.gcd(one.element_size(), other.element_size())
    marks = torch.zeros((max(stop, end) - min(start, begin)) // unit, dtype=torch.bool)
    first, second = (_marked(marks, tensor, (tensor.data_ptr() - min(start, begin)) // unit, unit) for tensor in (one, other))
    first.fill_(True)
    return bool(second.any())


def _marked(marks: torch.Tensor, tensor: torch.Tensor, offset: int, unit: int) -> torch.Tensor:
    """Where a tensor lies in memory of which each unit of bytes has a mark."""
    units = tensor.element_size() // unit
    return marks.as_strided((*tensor.shape, units), (*[units * stride for stride in tensor.stride()], 1), offset)


@contextmanager
def as_if_exported() -> Iterator[None]:
    """A model that asks whether it is being compiled or exported is told so; gradients are enabled, as they are then."""
    flags = "_is_compiling_flag", "_is_exporting_flag"
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        with torch.enable_grad():
            yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)
