"""Which axis of a result holds the samples, operation by operation (aten's own, as they reach the kernels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from normscope.graph.batch_axis import (
    CONSTANT,
    Ends,
    Operation,
    SampleLayout,
    State,
    Unproved,
    aligned,
    along,
    diagonal,
    entrywise,
    expanded,
    has_symbol,
    made,
    permuted,
    reduced,
    repeated,
    require,
    selected,
    size_of,
    sliced,
    squeezed,
    unsqueezed,
    viewed,
)


def joined(operation: Operation) -> SampleLayout:
    tensors = operation["tensors"]
    if operation.name == "cat":  # which leaves out tensors of shape (0,), whatever the rank of the others
        tensors = [tensor for tensor in tensors if tensor.dim() != 1 or size_of(tensor.shape[0]) != (0, 0)]
    layouts = {operation.of(tensor) for tensor in tensors}
    require(len(layouts) == 1 and None not in layouts, "joins samples with a constant")
    (layout,) = layouts
    assert layout is not None
    rank = tensors[0].dim()
    if operation.name == "stack":
        return layout.at(layout.axis + (operation["dim"] % (rank + 1) <= layout.axis))
    require(all(tensor.dim() == rank for tensor in tensors) and operation["dim"] % rank != layout.axis)
    return layout


def _matrix_product(operation: Operation, a: Any, b: Any) -> SampleLayout:
    """Axes of a: (…, row, inner), of b: (…, inner, column) or (inner,); leading axes are the same in both."""
    left, right, rank = operation.of(a), operation.of(b), a.dim()
    if left is not None and right is not None:
        require(left == right and left.axis < rank - 2 and b.dim() == rank, "multiplies samples by each other")
        return left
    if left is not None:
        require(left.axis == rank - 2)
        return left
    require(right is not None and right.axis == rank - 1 and b.dim() == rank)
    assert right is not None
    return right


def multiplied(first: str, second: str, added: str | None = None) -> Callable[[Operation], SampleLayout]:
    def rule(operation: Operation) -> SampleLayout:
        a, b = operation[first], operation[second]
        if operation.of(a) is None and operation.of(b) is None:
            raise Ends("adds samples to a product")
        layout = _matrix_product(operation, a, b)
        if added is None:
            return layout
        term, rank = operation[added], operation.results[0].dim()
        own = operation.of(term)
        if own is not None:
            require(own.at(own.axis + rank - term.dim()) == layout, "brings samples together")
        else:
            axis = layout.axis - (rank - term.dim())
            require(axis < 0 or term.shape[axis] == 1, "treats samples differently")
        return layout

    return rule


def on_last(count: int, name: str = "self") -> Callable[[Operation], SampleLayout]:
    """Works within the last axes, each of the places before them by itself."""

    def rule(operation: Operation) -> SampleLayout:
        layout = operation.only(name)
        require(layout.axis < operation[name].dim() - count and operation.results[0].dim() == operation[name].dim())
        return layout

    return rule


def padded(operation: Operation) -> SampleLayout:
    """The pad is in pairs, from the last axis on; one of the batch axis must be empty."""
    layout, pad = operation.only("self"), operation["pad"]
    place = 2 * (operation["self"].dim() - 1 - layout.axis)
    require(not any(pad[place : place + 2]))
    return layout


def convolved(operation: Operation) -> SampleLayout:
    layout = operation.only("input")
    require(layout.axis == 0 and operation["input"].dim() == operation["weight"].dim())
    return layout


def layer_normalized(operation: Operation) -> SampleLayout:
    layout = operation.only("input")
    require(layout.axis < operation["input"].dim() - len(operation["normalized_shape"]))
    return layout


def group_normalized(operation: Operation) -> tuple[SampleLayout, ...]:
    layout = operation.only("input")
    require(layout.axis == 0 and size_of(operation["N"]) == size_of(operation["input"].shape[0]))
    return (layout,)


def batch_normalized(operation: Operation) -> tuple[SampleLayout, ...]:
    """With running statistics each sample by itself; with its own, where the samples are channels (as instance norms do it)."""
    layout = operation.layout("input")
    assert layout is not None or operation.tensors
    require(layout is not None, "takes samples in another argument")
    assert layout is not None
    statistics = [operation.values.get(name) for name in ("running_mean", "running_var")]
    others = [value for name, value in operation.values.items() if name != "input" and isinstance(value, torch.Tensor)]
    if operation.values.get("training", False):
        require(
            layout.axis == 1 and not any(isinstance(value, torch.Tensor) for value in statistics), "takes statistics of the batch"
        )
        require(all(operation.of(value) == layout.at(0) for value in others), "treats samples differently")
    else:
        require(layout.axis != 1 and all(operation.of(value) is None for value in others), "treats samples differently")
        require(all(isinstance(value, torch.Tensor) for value in statistics), "takes statistics of the batch")
    return (layout,)


def attended(operation: Operation) -> tuple[SampleLayout, ...]:
    heads = [operation[name] for name in ("query", "key", "value")]
    layouts = {operation.of(tensor) for tensor in heads}
    require(len(layouts) == 1 and None not in layouts and all(tensor.dim() == 4 for tensor in heads), "brings samples together")
    (layout,) = layouts
    assert layout is not None
    require(layout.axis < 2)
    mask = operation.values.get("attn_mask", operation.values.get("attn_bias"))
    if isinstance(mask, torch.Tensor):
        require(aligned(operation, [heads[0], mask], 4) == layout)
    return (layout,)


def looked_up(operation: Operation) -> SampleLayout:
    return operation.only("indices")


def index_selected(operation: Operation) -> SampleLayout:
    axis = operation["dim"] % max(operation["self"].dim(), 1)
    if operation.layout("self") is None:
        return operation.only("index").at(axis)
    layout = operation.only("self")
    require(layout.axis != axis)
    return layout


def gathered(operation: Operation) -> SampleLayout:
    """Every tensor has its samples along the same axis, which is not the one that indices point along."""
    layouts = {operation.of(tensor) for tensor in operation.tensors}
    require(len(layouts) == 1 and None not in layouts, "treats samples differently")
    (layout,) = layouts
    assert layout is not None
    require(layout.axis != operation["dim"] % operation["self"].dim())
    return layout


def indexed(operation: Operation) -> SampleLayout:
    indices = list(operation["indices"])
    places = [place for place, index in enumerate(indices) if index is not None]
    given = [indices[place] for place in places]
    require(all(index.dtype not in (torch.bool, torch.uint8) for index in given))
    rank = max(index.dim() for index in given)
    block = places == list(range(places[0], places[0] + len(places)))
    layout = operation.layout("self")
    if operation.name == "index_put":
        layout = operation.only("self")
        require(layout.axis not in places)
        return layout
    if layout is None:
        return (found := aligned(operation, given, rank)).at(found.axis + (places[0] if block else 0))
    layout = operation.only("self")
    require(layout.axis not in places)
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

REDUCTIONS = (
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "kthvalue", "linalg_vector_norm", "logsumexp", "max", "mean",
    "median", "min", "mode", "nanmedian", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
ALONG = (
    "_log_softmax", "_safe_softmax",
    "_softmax", "cummax", "cummin", "cumprod", "cumsum", "glu", "logcumsumexp", "sort", "split", "split_with_sizes",
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


def states_of(operation: Operation) -> list[State]:
    """What is known of every tensor that an operation returns."""
    common = _common(operation) if operation.results else CONSTANT
    if not isinstance(common, tuple):
        return [common] * len(operation.results)
    beyond = [Unproved(f"result {place} of {operation.name}") for place in range(len(common), len(operation.results))]
    return [*common, *beyond][: len(operation.results)]


def _common(operation: Operation) -> State | tuple[State, ...]:
    """For all of its results, or for each."""
    name, known = operation.name, operation.known
    unproved = [state for tensor in operation.tensors if isinstance(state := known[id(tensor)], Unproved)]
    if unproved:
        return unproved[0]
    if not operation.own or (operation.random and not operation.undrawn):
        return Unproved(f"{name} is {'random' if operation.random else 'not in the table'}")
    counted = [
        argument for argument, value in operation.values.items() if argument not in SIZES.get(name, ()) and has_symbol(value)
    ]
    if counted:
        of_tensors = any(map(free_unbacked_symbols, filter(has_symbol, (operation.values[one] for one in counted))))
        source = "is a number taken from a tensor" if of_tensors else "depends on the size of the batch"
        return Unproved(f"{counted[0]} of {name} {source}")
    sized = any(has_symbol(value) for value in operation.values.values())
    if not sized and not any(isinstance(known[id(tensor)], SampleLayout) for tensor in operation.tensors):
        return CONSTANT
    rule = entrywise if operation.entrywise else LAYOUTS.get(name)
    if rule is None:
        return Unproved(f"{name} is not in the table")
    try:
        return rule(operation)
    except Ends as error:
        return Unproved(f"{name} {str(error) or 'acts along the batch'}")
