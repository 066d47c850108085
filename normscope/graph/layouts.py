"""Which axis of a result holds the samples, operation by operation (aten's own, as they reach the kernels)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Layout:
    """Index j along `axis`, of size outer · B · inner, belongs to sample (j // inner) mod B."""

    axis: int
    outer: int = 1
    inner: int = 1

    def at(self, axis: int) -> Layout:
        return Layout(axis, self.outer, self.inner)


@dataclass(frozen=True)
class Constant:
    """Depends on no sample, nor on how many there are."""


@dataclass(frozen=True)
class Unproved:
    reason: str


CONSTANT = Constant()

State = Union[Layout, Constant, Unproved]


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

    def states(self) -> list[State]:
        """Of every tensor that the operation returns."""
        return [self._state(place) for place in range(len(self.results))] if self.results else []

    @cached_property
    def _common(self) -> State | tuple[State, ...]:
        unproved = [state for tensor in self.tensors if isinstance(state := self.known[id(tensor)], Unproved)]
        if unproved:
            return unproved[0]
        if not self.own or (self._random and not self._undrawn):
            return Unproved(f"{self.name} is {'random' if self._random else 'not in the table'}")
        counted = [name for name, value in self.values.items() if name not in SIZES.get(self.name, ()) and _has_symbol(value)]
        if counted:
            return Unproved(f"{counted[0]} of {self.name} depends on the size of the batch")
        sized = any(_has_symbol(value) for value in self.values.values())
        if not sized and not any(isinstance(self.known[id(tensor)], Layout) for tensor in self.tensors):
            return CONSTANT
        rule = entrywise if self.entrywise else LAYOUTS.get(self.name)
        if rule is None:
            return Unproved(f"{self.name} is not in the table")
        try:
            return rule(self)
        except Ends as error:
            return Unproved(f"{self.name} {str(error) or 'acts along the batch'}")

    def _state(self, place: int) -> State:
        common = self._common
        if isinstance(common, tuple):
            return common[place] if place < len(common) else Unproved(f"result {place} of {self.name}")
        return common

    @property
    def _random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def _undrawn(self) -> bool:
        return self.values.get("dropout_p") == 0.0

    # what rules read

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def layout(self, name: str) -> Layout | None:
        """Of a tensor argument; None for a constant and for no tensor."""
        return self.of(self.values.get(name))

    def of(self, value: Any) -> Layout | None:
        state = self.known.get(id(value)) if isinstance(value, torch.Tensor) else None
        return state if isinstance(state, Layout) else None

    def only(self, name: str) -> Layout:
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


def _has_symbol(value: Any) -> bool:
    return any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in tree_leaves(value))


def _require(holds: bool, reason: str = "") -> None:
    if not holds:
        raise Ends(reason)


def aligned(operation: Operation, tensors: Sequence[Any], rank: int) -> Layout:
    """The one layout of tensors that are broadcast together; constants are the same for every sample."""
    found = {layout.at(layout.axis + rank - tensor.dim()) for tensor in tensors if (layout := operation.of(tensor)) is not None}
    _require(len(found) == 1, "brings samples together")
    layout = found.pop()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and operation.of(tensor) is None:
            axis = layout.axis - (rank - tensor.dim())
            _require(axis < 0 or tensor.shape[axis] == 1, "treats samples differently")
    return layout


def entrywise(operation: Operation) -> Layout:
    return aligned(operation, operation.tensors, max(tensor.dim() for tensor in operation.tensors))


def reduced(operation: Operation) -> Layout:
    layout = operation.only("self")
    axes = operation.axes("dim", operation["self"].dim())
    _require(layout.axis not in axes)
    return layout if operation.values.get("keepdim") else layout.at(layout.axis - sum(axis < layout.axis for axis in set(axes)))


def along(name: str) -> Callable[[Operation], Layout]:
    """Works along the axes that an argument names, which stay."""

    def rule(operation: Operation) -> Layout:
        layout = operation.only("self" if "self" in operation.values else "input")
        _require(bool(operation[name]) or operation[name] == 0)
        _require(layout.axis not in operation.axes(name, operation.tensors[0].dim()))
        return layout

    return rule


def viewed(operation: Operation) -> Layout:
    """Reshaped: sample number = (place // stride) mod B, in row-major order, before and after."""
    layout, before, after = operation.only("self"), operation["self"].shape, operation.results[0].shape
    stride = layout.inner * _product(before[layout.axis + 1 :])
    axis = _batch_axis(after)
    block = _product(after[axis + 1 :])
    size = size_of(after[axis])
    _require(size is not None and block > 0 and stride % block == 0, "splits the samples")
    assert size is not None
    inner = stride // block
    _require(inner > 0 and size[0] % inner == 0, "splits the samples")
    return Layout(axis, size[0] // inner, inner)


def _batch_axis(shape: Sequence[Any]) -> int:
    """The only axis whose size depends on B."""
    axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    _require(len(axes) == 1, "splits the samples")
    return axes[0]


def _product(sizes: Sequence[Any]) -> int:
    _require(all(isinstance(size, int) for size in sizes), "splits the samples")
    return math.prod(sizes)


def made(operation: Operation) -> State:
    """A tensor of given sizes, the same everywhere."""
    _require(not any(operation.of(tensor) is not None for name, tensor in operation.values.items() if name == "fill_value"))
    return _uniform(operation.results[0].shape)


def _uniform(shape: Sequence[Any]) -> State:
    """Equal values along every axis whose size depends on B: whichever way they are given to samples."""
    if all(isinstance(size, int) for size in shape):
        return CONSTANT
    axis = _batch_axis(shape)
    size = size_of(shape[axis])
    _require(size is not None and size[1] == 1)
    assert size is not None
    return Layout(axis, 1, size[0])


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
        _require(isinstance(repeats[layout.axis + new], int) and repeats[layout.axis + new] == 1)
        return layout.at(layout.axis + new)
    axis = _batch_axis(repeats)
    size = size_of(repeats[axis])
    _require(size is not None and size[1] == 1)
    assert size is not None
    return Layout(axis, 1, size[0] * (tensor.shape[axis - new] if axis >= new else 1))


def permuted(operation: Operation) -> Layout:
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


def unsqueezed(operation: Operation) -> Layout:
    layout, rank = operation.only("self"), operation["self"].dim()
    return layout.at(layout.axis + (operation["dim"] % (rank + 1) <= layout.axis))


def squeezed(operation: Operation) -> Layout:
    layout, shape = operation.only("self"), operation["self"].shape
    among = operation.axes("dim", len(shape)) if "dim" in operation.values else range(len(shape))
    return layout.at(
        layout.axis - sum(axis < layout.axis and isinstance(shape[axis], int) and shape[axis] == 1 for axis in set(among))
    )


def selected(operation: Operation) -> Layout:
    layout, rank = operation.only("self"), operation["self"].dim()
    axis = operation["dim"] % rank
    _require(axis != layout.axis)
    return layout.at(layout.axis - (axis < layout.axis))


def sliced(operation: Operation) -> Layout:
    layout, tensor = operation.only("self"), operation["self"]
    axis, start, end, step = (operation[name] for name in ("dim", "start", "end", "step"))
    if axis % tensor.dim() == layout.axis:
        whole = end is None or (isinstance(end, int) and end >= 2**62) or size_of(end) == size_of(tensor.shape[layout.axis])
        _require(whole and start in (None, 0) and step == 1)
    else:
        _require(not _has_symbol([start, end, step]), "depends on the size of the batch")
    return layout


def diagonal(operation: Operation) -> Layout:
    layout, rank = operation.only("self"), operation["self"].dim()
    axes = {operation["dim1"] % rank, operation["dim2"] % rank}
    _require(layout.axis not in axes)
    return layout.at(layout.axis - sum(axis < layout.axis for axis in axes))


def joined(operation: Operation) -> Layout:
    tensors = operation["tensors"]
    layouts = {operation.of(tensor) for tensor in tensors}
    _require(len(layouts) == 1 and None not in layouts, "joins samples with a constant")
    (layout,) = layouts
    assert layout is not None
    rank = tensors[0].dim()
    if operation.name == "stack":
        return layout.at(layout.axis + (operation["dim"] % (rank + 1) <= layout.axis))
    _require(all(tensor.dim() == rank for tensor in tensors) and operation["dim"] % rank != layout.axis)
    return layout


def _matrix_product(operation: Operation, a: Any, b: Any) -> Layout:
    """Axes of a: (…, row, inner), of b: (…, inner, column) or (inner,); leading axes are the same in both."""
    left, right, rank = operation.of(a), operation.of(b), a.dim()
    if left is not None and right is not None:
        _require(left == right and left.axis < rank - 2 and b.dim() == rank, "multiplies samples by each other")
        return left
    if left is not None:
        _require(left.axis == rank - 2)
        return left
    _require(right is not None and right.axis == rank - 1 and b.dim() == rank)
    assert right is not None
    return right


def multiplied(first: str, second: str, added: str | None = None) -> Callable[[Operation], Layout]:
    def rule(operation: Operation) -> Layout:
        a, b = operation[first], operation[second]
        if operation.of(a) is None and operation.of(b) is None:
            raise Ends("adds samples to a product")
        layout = _matrix_product(operation, a, b)
        if added is None:
            return layout
        term, rank = operation[added], operation.results[0].dim()
        own = operation.of(term)
        if own is not None:
            _require(own.at(own.axis + rank - term.dim()) == layout, "brings samples together")
        else:
            axis = layout.axis - (rank - term.dim())
            _require(axis < 0 or term.shape[axis] == 1, "treats samples differently")
        return layout

    return rule


def on_last(count: int, name: str = "self") -> Callable[[Operation], Layout]:
    """Works within the last axes, each of the places before them by itself."""

    def rule(operation: Operation) -> Layout:
        layout = operation.only(name)
        _require(layout.axis < operation[name].dim() - count and operation.results[0].dim() == operation[name].dim())
        return layout

    return rule


def padded(operation: Operation) -> Layout:
    layout, pad = operation.only("self"), operation["pad"]
    _require(layout.axis < operation["self"].dim() - len(pad) // 2)
    return layout


def convolved(operation: Operation) -> Layout:
    layout = operation.only("input")
    _require(layout.axis == 0 and operation["input"].dim() == operation["weight"].dim())
    return layout


def layer_normalized(operation: Operation) -> Layout:
    layout = operation.only("input")
    _require(layout.axis < operation["input"].dim() - len(operation["normalized_shape"]))
    return layout


def group_normalized(operation: Operation) -> tuple[Layout, ...]:
    layout = operation.only("input")
    _require(layout.axis == 0 and size_of(operation["N"]) == size_of(operation["input"].shape[0]))
    return (layout,)


def batch_normalized(operation: Operation) -> tuple[Layout, ...]:
    """With running statistics each sample by itself; with its own, where the samples are channels (as instance norms do it)."""
    layout = operation.layout("input")
    assert layout is not None or operation.tensors
    _require(layout is not None, "takes samples in another argument")
    assert layout is not None
    statistics = [operation.values.get(name) for name in ("running_mean", "running_var")]
    others = [value for name, value in operation.values.items() if name != "input" and isinstance(value, torch.Tensor)]
    if operation.values.get("training", False):
        _require(
            layout.axis == 1 and not any(isinstance(value, torch.Tensor) for value in statistics), "takes statistics of the batch"
        )
        _require(all(operation.of(value) == layout.at(0) for value in others), "treats samples differently")
    else:
        _require(layout.axis != 1 and all(operation.of(value) is None for value in others), "treats samples differently")
        _require(all(isinstance(value, torch.Tensor) for value in statistics), "takes statistics of the batch")
    return (layout,)


def attended(operation: Operation) -> tuple[Layout, ...]:
    heads = [operation[name] for name in ("query", "key", "value")]
    layouts = {operation.of(tensor) for tensor in heads}
    _require(len(layouts) == 1 and None not in layouts and all(tensor.dim() == 4 for tensor in heads), "brings samples together")
    (layout,) = layouts
    assert layout is not None
    _require(layout.axis < 2)
    mask = operation.values.get("attn_mask", operation.values.get("attn_bias"))
    if isinstance(mask, torch.Tensor):
        _require(aligned(operation, [heads[0], mask], 4) == layout)
    return (layout,)


def looked_up(operation: Operation) -> Layout:
    return operation.only("indices")


def index_selected(operation: Operation) -> Layout:
    axis = operation["dim"] % max(operation["self"].dim(), 1)
    if operation.layout("self") is None:
        return operation.only("index").at(axis)
    layout = operation.only("self")
    _require(layout.axis != axis)
    return layout


def gathered(operation: Operation) -> Layout:
    """Every tensor has its samples along the same axis, which is not the one that indices point along."""
    layouts = {operation.of(tensor) for tensor in operation.tensors}
    _require(len(layouts) == 1 and None not in layouts, "treats samples differently")
    (layout,) = layouts
    assert layout is not None
    _require(layout.axis != operation["dim"] % operation["self"].dim())
    return layout


def indexed(operation: Operation) -> Layout:
    indices = list(operation["indices"])
    places = [place for place, index in enumerate(indices) if index is not None]
    given = [indices[place] for place in places]
    _require(all(index.dtype not in (torch.bool, torch.uint8) for index in given))
    rank = max(index.dim() for index in given)
    block = places == list(range(places[0], places[0] + len(places)))
    layout = operation.layout("self")
    if operation.name == "index_put":
        layout = operation.only("self")
        _require(layout.axis not in places)
        return layout
    if layout is None:
        return (found := aligned(operation, given, rank)).at(found.axis + (places[0] if block else 0))
    layout = operation.only("self")
    _require(layout.axis not in places)
    before = sum(place < layout.axis for place in places)
    if not block:
        return layout.at(rank + layout.axis - before)
    return layout.at(layout.axis if layout.axis < places[0] else layout.axis - len(places) + rank)


SIZES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("view", "_unsafe_view", "expand", "full", "zeros", "ones", "empty"), ("size",)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), ("size",)),
    "repeat": ("repeats",), "native_group_norm": ("N",), "slice": ("start", "end"), "empty_strided": ("size", "stride"),
}  # fmt: skip
"""Arguments that may depend on B, since the result's shape shows it."""

ENTRYWISE = {
    "alias", "copy", "detach", "fill", "floor_divide", "hardswish", "lift_fresh", "lift_fresh_copy",
    "_prelu_kernel", "_to_copy", "zero",
}  # fmt: skip
"""Beside those that torch tags as such."""

REDUCTIONS = (
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "kthvalue", "linalg_vector_norm", "logsumexp", "max", "mean",
    "median", "min", "mode", "nanmedian", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
ALONG = (
    "_log_softmax", "_softmax", "cummax", "cummin", "cumprod", "cumsum", "glu", "logcumsumexp", "sort", "split", "split_with_sizes",
    "topk",
)  # fmt: skip
MADE = ("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")

LAYOUTS: dict[str, Callable[[Operation], State | tuple[State, ...]]] = {
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys(ALONG, along("dim")),
    **dict.fromkeys(("flip", "roll"), along("dims")),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), along("dim")),
    **dict.fromkeys(MADE, made),
    **dict.fromkeys(LIKE, entrywise),
    **dict.fromkeys(("permute", "t", "transpose"), permuted),
    **dict.fromkeys(("view", "_unsafe_view"), viewed),
    "expand": expanded, "repeat": repeated, "unsqueeze": unsqueezed, "squeeze": squeezed, "diagonal": diagonal,
    "select": selected, "unbind": selected, "slice": sliced, "cat": joined, "stack": joined,
    "mm": multiplied("self", "mat2"), "bmm": multiplied("self", "mat2"),
    "addmm": multiplied("mat1", "mat2", "self"), "baddbmm": multiplied("batch1", "batch2", "self"),
    "convolution": convolved, "native_layer_norm": layer_normalized, "_fused_rms_norm": layer_normalized,
    "native_group_norm": group_normalized, "native_batch_norm": batch_normalized,
    "_native_batch_norm_legit": batch_normalized, "_native_batch_norm_legit_no_training": batch_normalized,
    "cudnn_batch_norm": batch_normalized,
    "embedding": looked_up, "index_select": index_selected, "gather": gathered, "scatter": gathered, "scatter_add": gathered,
    "index": indexed, "_unsafe_index": indexed, "index_put": indexed, "constant_pad_nd": padded, "tril":
    on_last(2), "triu": on_last(2),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d", "upsample_nearest1d", "upsample_linear1d"), on_last(1)),
    **dict.fromkeys((
        "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices", "reflection_pad2d",
        "replication_pad2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d",
    ), on_last(2)),
    **dict.fromkeys((
        "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d_with_indices", "pixel_shuffle", "pixel_unshuffle",
        "reflection_pad3d", "replication_pad3d", "upsample_nearest3d", "upsample_trilinear3d",
    ), on_last(3)),
    **dict.fromkeys((
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    ), attended),
}  # fmt: skip
"""For every operation that may keep samples apart: the layout of its result (of each of its results), or `Ends`."""
