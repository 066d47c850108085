"""Which axis of a tensor holds the samples, and where operations leave it that move, join, drop or repeat axes and entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class SampleLayout:
    """Index j along `axis`, of size outer · B · inner, belongs to sample (j // inner) mod B."""

    axis: int
    outer: int = 1
    inner: int = 1

    def at(self, axis: int) -> SampleLayout:
        return SampleLayout(axis, self.outer, self.inner)


@dataclass(frozen=True)
class SampleFree:
    """Depends on no sample, nor on how many there are."""


@dataclass(frozen=True)
class Unproved:
    reason: str


CONSTANT = SampleFree()

State = Union[SampleLayout, SampleFree, Unproved]

ENTRYWISE = {
    "alias", "copy", "detach", "fill", "floor_divide", "hardswish", "lift_fresh", "lift_fresh_copy",
    "_prelu_kernel", "_to_copy", "zero",
}  # fmt: skip
"""Beside those that torch tags as such."""


class Ends(Exception):
    """The operation is not known to keep samples apart here."""


def size_of(size: Any) -> tuple[int, int] | None:
    """c · B^k as (c, k); None for anything else."""
    if isinstance(size, int):
        return size, 0
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    coefficient, rest = expression.as_coeff_Mul()
    if rest.is_Symbol and coefficient.is_Integer:
        return int(coefficient), 1
    return (int(expression), 0) if expression.is_Integer else None


class Operation:
    """One call of an operation: its arguments by name, and what is known of them."""

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], states: dict[int, State], results: Sequence[torch.Tensor]
    ) -> None:
        self.func, self.known, self.results = func, states, results
        packet = func._schema.name.split("::")
        self.name = packet[1][:-1] if packet[1].endswith("_") and not packet[1].startswith("_") else packet[1]
        self.own = packet[0] in ("aten", "prim", "prims")
        arguments = func._schema.arguments
        self.values = {
            spec.name: args[place] if place < len(args) else kwargs.get(spec.name, spec.default_value)
            for place, spec in enumerate(arguments)
        }
        self.written: list[torch.Tensor] = [
            leaf
            for spec in arguments
            if spec.alias_info is not None and spec.alias_info.is_write
            for leaf in tree_leaves(self.values[spec.name])
            if isinstance(leaf, torch.Tensor)
        ]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(list(self.values.values())) if isinstance(leaf, torch.Tensor)]

    @property
    def entrywise(self) -> bool:
        return self.own and (torch.Tag.pointwise in self.func.tags or self.name in ENTRYWISE)

    @property
    def random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def undrawn(self) -> bool:
        return self.values.get("dropout_p") == 0.0

    # what rules read

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def layout(self, name: str) -> SampleLayout | None:
        """Of a tensor argument; None for a constant and for no tensor."""
        return self.of(self.values.get(name))

    def of(self, value: Any) -> SampleLayout | None:
        state = self.known.get(id(value)) if isinstance(value, torch.Tensor) else None
        return state if isinstance(state, SampleLayout) else None

    def only(self, name: str) -> SampleLayout:
        """The layout of an argument, the only one that holds samples."""
        layout = self.layout(name)
        if layout is None or any(self.of(tensor) is not None for tensor in self.tensors if tensor is not self[name]):
            raise Ends("takes samples in another argument")
        return layout

    def axes(self, name: str, among: int) -> list[int]:
        """An argument that names axes, counted from the left; all of them where none is named."""
        value = self.values.get(name)
        named = list(range(among)) if value is None or (isinstance(value, (list, tuple)) and not value) else value
        return [axis % max(among, 1) for axis in (named if isinstance(named, (list, tuple)) else [named])]


def laid_out(like: torch.Tensor, size: int) -> torch.Tensor:
    """An empty batch of so many samples that lies in memory as `like` does; contiguous where entries of `like` overlap."""
    shape, strides = (size, *like.shape[1:]), list(like.stride())
    if len(like) == 1:  # behind all of its sample
        strides[0] = (
            max(1, *(step * length for step, length in zip(strides[1:], like.shape[1:], strict=True))) if like.dim() > 1 else 1
        )
    strides[1:] = [step if step < strides[0] else step // max(len(like), 1) * size for step in strides[1:]]
    reach = 1
    for step, length in sorted(zip(strides, shape, strict=True)):
        if length > 1 and step < reach:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        reach = step * (length - 1) + reach if length > 1 else reach
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def has_symbol(value: Any) -> bool:
    return any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in tree_leaves(value))


def require(holds: bool, reason: str = "") -> None:
    if not holds:
        raise Ends(reason)


def aligned(operation: Operation, tensors: Sequence[Any], rank: int) -> SampleLayout:
    """The one layout of tensors that are broadcast together; constants are the same for every sample."""
    found = {layout.at(layout.axis + rank - tensor.dim()) for tensor in tensors if (layout := operation.of(tensor)) is not None}
    require(len(found) == 1, "brings samples together")
    layout = found.pop()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and operation.of(tensor) is None:
            axis = layout.axis - (rank - tensor.dim())
            require(axis < 0 or tensor.shape[axis] == 1, "treats samples differently")
    return layout


def entrywise(operation: Operation) -> SampleLayout:
    return aligned(operation, operation.tensors, max(tensor.dim() for tensor in operation.tensors))


def reduced(operation: Operation) -> SampleLayout:
    layout = operation.only("self")
    axes = operation.axes("dim", operation["self"].dim())
    require(layout.axis not in axes)
    return layout if operation.values.get("keepdim") else layout.at(layout.axis - sum(axis < layout.axis for axis in set(axes)))


def along(name: str) -> Callable[[Operation], SampleLayout]:
    """Works along the axes that an argument names, which stay."""

    def rule(operation: Operation) -> SampleLayout:
        layout = operation.only("self" if "self" in operation.values else "input")
        require(bool(operation[name]) or operation[name] == 0)
        require(layout.axis not in operation.axes(name, operation.tensors[0].dim()))
        return layout

    return rule


def viewed(operation: Operation) -> SampleLayout:
    """Reshaped: sample number = (place // stride) mod B, in row-major order, before and after."""
    layout, before, after = operation.only("self"), operation["self"].shape, operation.results[0].shape
    stride = layout.inner * _product(before[layout.axis + 1 :])
    axis = _batch_axis(after)
    block = _product(after[axis + 1 :])
    size = size_of(after[axis])
    require(size is not None and block > 0 and stride % block == 0, "splits the samples")
    assert size is not None
    inner = stride // block
    require(inner > 0 and size[0] % inner == 0, "splits the samples")
    return SampleLayout(axis, size[0] // inner, inner)


def _batch_axis(shape: Sequence[Any]) -> int:
    """The only axis whose size depends on B."""
    axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    require(len(axes) == 1, "splits the samples")
    return axes[0]


def _product(sizes: Sequence[Any]) -> int:
    require(all(isinstance(size, int) for size in sizes), "splits the samples")
    return math.prod(sizes)


def made(operation: Operation) -> State:
    """A tensor of given sizes, the same everywhere."""
    require(not any(operation.of(tensor) is not None for name, tensor in operation.values.items() if name == "fill_value"))
    return _uniform(operation.results[0].shape)


def _uniform(shape: Sequence[Any]) -> State:
    """Equal values along every axis whose size depends on B: whichever way they are given to samples."""
    if all(isinstance(size, int) for size in shape):
        return CONSTANT
    axis = _batch_axis(shape)
    size = size_of(shape[axis])
    require(size is not None and size[1] == 1)
    assert size is not None
    return SampleLayout(axis, 1, size[0])


def expanded(operation: Operation) -> State:
    tensor = operation["self"]
    layout = operation.layout("self")
    if layout is None:
        return _uniform(operation.results[0].shape)
    return layout.at(layout.axis + operation.results[0].dim() - tensor.dim())


def repeated(operation: Operation) -> State:
    layout, tensor, repeats = operation.layout("self"), operation["self"], list(operation["repeats"])
    new = len(repeats) - tensor.dim()
    if layout is not None:
        require(isinstance(repeats[layout.axis + new], int) and repeats[layout.axis + new] == 1)
        return layout.at(layout.axis + new)
    axis = _batch_axis(repeats)
    size = size_of(repeats[axis])
    require(size is not None and size[1] == 1)
    assert size is not None
    return SampleLayout(axis, 1, size[0] * (tensor.shape[axis - new] if axis >= new else 1))


def permuted(operation: Operation) -> SampleLayout:
    layout, rank = operation.only("self"), operation["self"].dim()
    order = list(range(rank))
    if operation.name == "permute":
        order = operation.axes("dims", rank)
    elif operation.name == "t":
        order.reverse()
    else:
        first, second = (operation[name] % rank for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    return layout.at(order.index(layout.axis))


def unsqueezed(operation: Operation) -> SampleLayout:
    layout, rank = operation.only("self"), operation["self"].dim()
    return layout.at(layout.axis + (operation["dim"] % (rank + 1) <= layout.axis))


def squeezed(operation: Operation) -> SampleLayout:
    layout, shape = operation.only("self"), operation["self"].shape
    among = operation.axes("dim", len(shape)) if "dim" in operation.values else range(len(shape))
    return layout.at(
        layout.axis - sum(axis < layout.axis and isinstance(shape[axis], int) and shape[axis] == 1 for axis in set(among))
    )


def selected(operation: Operation) -> SampleLayout:
    layout, rank = operation.only("self"), operation["self"].dim()
    axis = operation["dim"] % rank
    require(axis != layout.axis)
    return layout.at(layout.axis - (axis < layout.axis))


def sliced(operation: Operation) -> SampleLayout:
    layout, tensor = operation.only("self"), operation["self"]
    axis, start, end, step = (operation[name] for name in ("dim", "start", "end", "step"))
    if axis % tensor.dim() == layout.axis:
        whole = end is None or (isinstance(end, int) and end >= 2**62) or size_of(end) == size_of(tensor.shape[layout.axis])
        require(whole and start in (None, 0) and step == 1)
    else:
        require(not has_symbol([start, end, step]), "depends on the size of the batch")
    return layout


def diagonal(operation: Operation) -> SampleLayout:
    layout, rank = operation.only("self"), operation["self"].dim()
    axes = {operation["dim1"] % rank, operation["dim2"] % rank}
    require(layout.axis not in axes)
    return layout.at(layout.axis - sum(axis < layout.axis for axis in axes))
