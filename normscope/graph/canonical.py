"""One form for operations that torch has several of, and none for those that leave their input as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from normscope.graph.double import softplus_threshold
from normscope.graph.graph import Constant, Node

aten = torch.ops.aten

# Operations that return what they are given: the traced function is the same without them.
IDENTITIES = {"contiguous", "clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "identity", "positive", "requires_grad"}
CASTS = {"to", "_to_copy", "type_as", "float", "double", "half", "bfloat16", "convert_element_type"}
DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}

SPLITS = {
    "split": None,
    "split_with_sizes": None,
    "chunk": None,
    "tensor_split": None,
    "unsafe_split": None,
    "unsafe_split_with_sizes": None,
    "unsafe_chunk": None,
    "hsplit": 1,
    "vsplit": 0,
    "dsplit": 2,
}  # axis

AT_LEAST = ("atleast_1d", "atleast_2d", "atleast_3d")  # of one tensor, or of each of several

FUNCTIONAL_BATCH_NORMS = (
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit",
)

Form = tuple[str, Any, tuple[Any, ...]]  # operation, target, arguments


def is_identity(op: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether the operation returns its first argument: no-ops, casts between real or complex types, dropout in eval mode."""
    if op in CASTS:
        return isinstance(result, torch.Tensor) and (
            (result.is_floating_point() and is_float(args[0])) or (result.is_complex() and is_complex(args[0]))
        )
    if op in ("pad", "constant_pad_nd"):
        return not args[1]
    return op in IDENTITIES or (op in DROPOUTS and args[2] is False)


def canonical(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """The one form of an operation; `result` is a fake tensor with its shape and dtype."""
    rewrite = REWRITES.get(op)
    return (op, target, args) if rewrite is None else rewrite(op, target, args, result)


def _without_unread_statistics(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """With batch or instance statistics the running ones are not read, and evaluating must not update them."""
    return op, target, (*args[:3], None, None, *args[5:]) if args[5] else args


def _functional_batch_norm(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """What functionalization makes of batch_norm; of its results only the first is ever read."""
    training, *rest = (False, *args[-2:]) if op == "_native_batch_norm_legit_no_training" else args[-3:]
    statistics = (None, None) if training else args[3:5]
    return "batch_norm", aten.batch_norm.default, (*args[:3], *statistics, training, *rest, False)


def _rrelu(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """In eval mode a leaky ReLU with the mean slope."""
    return (op, target, args) if args[3] else ("leaky_relu", aten.leaky_relu.default, (args[0], (args[1] + args[2]) / 2))


def _softplus(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    return op, target, (*args[:2], softplus_threshold(args[2], result.dtype))


def _rms_norm(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """torch's default ε depends on the dtype that the model runs in."""
    dtype = torch.float64 if result.dtype == torch.float64 else torch.float32
    return op, target, (*args[:3], torch.finfo(dtype).eps if args[3] is None else args[3])


def _copy(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """copy(destination, source) is the source, broadcast; what was in the destination is lost."""
    source = args[1]
    if isinstance(source, Constant) and not is_float(source):
        source = Constant(source.value.to(torch.float64), source.sources, source.learned)
    return _expand(op, target, (source,), result) if is_float(source) else (op, target, args)


def _index(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """A constant mask picks the entries where it is true: integers say which."""
    places: list[Any] = []
    for place in args[1]:
        mask = isinstance(place, Constant) and place.value.dtype in (torch.bool, torch.uint8)
        places += [Constant(axis) for axis in place.value.bool().nonzero(as_tuple=True)] if mask else [place]
    return op, target, (args[0], places, *args[2:])


def _repeat_interleave(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """With a constant number of repeats for each entry it is a choice of entries."""
    x, repeats, axis = args[:3] if len(args) > 2 else (None, None, None)
    if not isinstance(x, Node) or not isinstance(repeats, Constant) or axis is None:
        return op, target, args
    count = x.shape[axis]
    chosen = torch.arange(count).repeat_interleave(repeats.value.expand(count) if repeats.value.numel() == 1 else repeats.value)
    return "index_select", aten.index_select.default, (x, axis, Constant(chosen))


def _linear(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """A weight of one axis is a product with a vector."""
    vector = isinstance(args[1], Constant) and len(args[1].shape) == 1 and args[2] is None
    return ("matmul", aten.matmul.default, args[:2]) if vector else (op, target, args)


def _softmax(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """Of a single number without axes it is 1, and its logarithm 0."""
    if result.shape:
        return op, target, args
    constant = "zeros_like" if "log" in op else "ones_like"
    return constant, getattr(aten, constant).default, args[:1]


def _expand(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """Of another tensor it may be given only the shape is read."""
    return "expand", aten.expand.default, (args[0], list(result.shape))


def _reshape(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """A view needs the memory layout that the model happened to have; a reshape does not. Of a second tensor the shape is read."""
    return "reshape", aten.reshape.default, (args[0], list(result.shape))


def _part(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """One piece of a tensor that was taken apart is a slice or a row of it; one of several with more axes is made of that one."""
    several, index = args
    if isinstance(several, Node) and several.op in AT_LEAST and not isinstance(several.args[0], Node):
        return several.op, getattr(aten, several.op).default, (several.args[0][index],)
    if not isinstance(several, Node) or several.op not in ("unbind", *SPLITS):
        return op, target, args
    whole = several.input
    if several.op == "unbind":
        return "select", aten.select.int, (whole, several.argument(1, "dim", 0), index)
    axis = SPLITS[several.op]
    axis = several.argument(2, "dim", 0) if axis is None else min(axis, len(whole.shape) - 1)
    assert several.target is not None
    empty = torch.empty(whole.shape, device="meta")
    sizes = [piece.shape[axis] for piece in several.target(empty, *several.args[1:], **several.kwargs)]
    start = sum(sizes[: index % len(sizes)])
    return "slice", aten.slice.Tensor, (whole, axis, start, start + sizes[index])


def strided(x: torch.Tensor, size: list[int], stride: list[int], offset: int = 0) -> torch.Tensor:
    """as_strided of a tensor that holds all that is read, whatever its layout is here."""
    return x.contiguous().as_strided(size, stride, offset)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x in groups, each times a matrix of its own: group g has the rows before ends[g] that no group before it has."""
    place = torch.arange(x.shape[0], device=x.device)
    result = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    start = torch.zeros_like(ends[0])
    for group in range(weight.shape[0]):
        inside = (place >= start) & (place < ends[group])
        result = torch.where(inside[:, None], x @ weight[group], result)
        start = torch.maximum(start, ends[group])
    return result


def _grouped(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """A kernel that torch runs in few types, or that has no derivative of every kind, as products and choices of rows."""
    plain = len(args[0].shape) == 2 and len(args[1].shape) == 3 and all(argument is None for argument in args[3:])
    return ("grouped_mm", grouped_mm, args[:3]) if plain else (op, target, args)


def _empty(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """Memory that is written before it is read; a model that does read it gives other numbers than its graph, and is refused."""
    return (
        ("zeros_like", aten.zeros_like.default, args[:1]) if op == "empty_like" else ("new_zeros", aten.new_zeros.default, args[:2])
    )


def _index_put(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """Without a check of the indices, which were checked."""
    return "index_put", aten.index_put.default, args


def _dot(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    """Of real vectors both are the same."""
    return "dot", aten.dot.default, args


def _adjoint(op: str, target: Any, args: tuple[Any, ...], result: Any) -> Form:
    return "mH", aten.mH.default, args


REWRITES: dict[str, Callable[[str, Any, tuple[Any, ...], Any], Form]] = {
    "batch_norm": _without_unread_statistics,
    "instance_norm": _without_unread_statistics,
    **dict.fromkeys(FUNCTIONAL_BATCH_NORMS, _functional_batch_norm),
    "rrelu": _rrelu,
    "softplus": _softplus,
    "rms_norm": _rms_norm,
    "copy": _copy,
    "index": _index,
    "repeat_interleave": _repeat_interleave,
    "linear": _linear,
    "expand_as": _expand,
    "view": _reshape,
    "view_as": _reshape,
    "reshape_as": _reshape,
    "_unsafe_view": _reshape,
    "getitem": _part,
    "vdot": _dot,
    **dict.fromkeys(("softmax", "_softmax", "special_softmax", "log_softmax", "_log_softmax", "special_log_softmax"), _softmax),
    "_unsafe_index_put": _index_put,
    "empty_like": _empty,
    "new_empty": _empty,
    "_grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "matrix_H": _adjoint,
}


def is_complex(value: Any) -> bool:
    """Whether a node, a constant or a tensor holds complex numbers."""
    value = value.value if isinstance(value, Constant) else value
    return isinstance(value, (Node, torch.Tensor)) and value.dtype is not None and value.dtype.is_complex


def is_float(value: Any) -> bool:
    """Whether a node, a constant or a tensor holds floating-point numbers."""
    value = value.value if isinstance(value, Constant) else value
    return isinstance(value, (Node, torch.Tensor)) and value.dtype is not None and value.dtype.is_floating_point
