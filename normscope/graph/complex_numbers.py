"""Complex numbers as pairs of real ones: a tensor of shape s is one of shape (*s, 2), and what is computed with it is real.

Distances are the same, |z|² = Re² + Im², so that bounds on the pairs are bounds on the numbers. A product with a constant c turns
each plane by its angle and scales it by |c|; a Fourier transform is a matrix along its axis. Whatever is not known here reads
complex tensors again, and has no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.graph.canonical import CASTS
from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.rotary import rotary

aten = torch.ops.aten

Make = Callable[..., Any]  # from an operation and its arguments to a node, or to a constant
LARGEST = 1 << 22  # entries of the matrix of a Fourier transform
ARITHMETIC = ("mul", "add", "sub", "div")
RESHAPES = ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as", "ravel")


@dataclass(frozen=True, eq=False)
class Pairs:
    """A complex tensor that depends on the input, as the node of its real and imaginary parts along a last axis."""

    node: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.shape[:-1])


def in_pairs(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, make: Make) -> Any:
    """What an operation on complex numbers returns, made of operations on real ones; None where nothing of it is complex.

    result: a fake tensor of the shape and type that it has.
    """
    if op == "view_as_complex":
        return Pairs(args[0]) if isinstance(args[0], Node) else None
    if op in CASTS and _is_real(args[0]) and result.is_complex():
        return Pairs(_padded(args[0], make))
    if op == "complex":
        return Pairs(make(aten.stack.default, [_expanded(part, result, make) for part in args[:2]], -1))
    transform = _transform(op, args, make)
    if transform is not None:
        return transform
    if op in ARITHMETIC and isinstance(result, torch.Tensor) and result.is_complex():
        args = tuple(Pairs(_padded(part, make)) if _is_real(part) else part for part in args)
    if not any(isinstance(leaf, Pairs) for leaf in tree_leaves((args, kwargs))):
        return None
    found = _of_pairs(op, args, kwargs, result, make)
    return found if found is not None else make(target, *_together(args, make), **_together(kwargs, make))


def _is_real(part: Any) -> bool:
    return isinstance(part, Node) and part.dtype is not None and part.dtype.is_floating_point


def _together(tree: Any, make: Make) -> Any:
    """Complex tensors again, for operations that are not known here."""
    return tree_map_only(Pairs, lambda pairs: make(aten.view_as_complex.default, pairs.node), tree)


def _of_pairs(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, make: Make) -> Any:
    first = args[0]
    if op in ARITHMETIC:
        return _arithmetic(op, args[0], args[1], kwargs, result, make)
    if not isinstance(first, Pairs):
        return None
    rank, pairs = len(first.shape), first.node
    if op == "view_as_real":
        return pairs
    if op in ("real", "imag"):
        return make(aten.select.int, pairs, -1, ("real", "imag").index(op))
    if op == "abs":
        return make(aten.linalg_vector_norm.default, pairs, 2, [-1])
    if op in ("conj", "_conj", "conj_physical"):
        return Pairs(make(aten.mul.Tensor, pairs, Constant(torch.tensor([1.0, -1.0], dtype=torch.float64))))
    if op == "neg":
        return Pairs(make(aten.neg.default, pairs))
    if op in RESHAPES:
        return Pairs(make(aten.reshape.default, pairs, [*result.shape, 2]))
    if op == "expand":
        return Pairs(make(aten.expand.default, pairs, [*result.shape, 2]))
    if op == "transpose":
        return Pairs(make(aten.transpose.int, pairs, args[1] % rank, args[2] % rank))
    if op == "permute":
        return Pairs(make(aten.permute.default, pairs, [*(axis % rank for axis in args[1]), rank]))
    if op == "slice":
        return Pairs(make(aten.slice.Tensor, pairs, args[1] % rank, *args[2:]))
    if op == "select":
        return Pairs(make(aten.select.int, pairs, args[1] % rank, args[2]))
    if op in CASTS and not result.is_complex():
        return make(aten.select.int, pairs, -1, 0) if result.is_floating_point() else None
    return first if op in (*CASTS, "resolve_conj") else None


def _arithmetic(op: str, one: Any, other: Any, kwargs: dict[str, Any], result: Any, make: Make) -> Any:
    """A sum, or a product with a number that does not depend on the input."""
    if op in ("add", "sub"):
        return Pairs(make(getattr(aten, op).Tensor, *(_padded(part, make) for part in (one, other)), **kwargs))
    pairs, factor = (one, other) if isinstance(one, Pairs) else (other, one)
    if isinstance(factor, (Pairs, Node)) or (op == "div" and pairs is not one) or kwargs:
        return None
    value, *sources = _numbers(factor)
    value = (1 / value if op == "div" else value).unsqueeze(-1)
    parts = (Constant(part.expand(*value.shape[:-1], 2), *sources) for part in (value.real, value.imag))
    return Pairs(make(rotary, _expanded(pairs, result, make), *parts))


def _padded(part: Any, make: Make) -> Any:
    """A summand as pairs: real ones have no imaginary part."""
    if isinstance(part, Pairs):
        return part.node
    if isinstance(part, Node):
        return make(aten.constant_pad_nd.default, make(aten.unsqueeze.default, part, -1), [0, 1])
    value, *sources = _numbers(part)
    return Constant(torch.view_as_real(value), *sources)


def _numbers(part: Any) -> tuple[Any, ...]:
    """A constant or a number in complex128, and what else a constant knows."""
    if not isinstance(part, Constant):
        return (torch.tensor(part, dtype=torch.complex128),)
    return part.value.to(torch.complex128).resolve_conj(), part.sources, part.learned, part.rank


def _expanded(part: Any, result: Any, make: Make) -> Any:
    """A tensor, or the pairs of one, in the shape that the result has."""
    node, shape = (part.node, [*result.shape, 2]) if isinstance(part, Pairs) else (part, list(result.shape))
    return node if tuple(node.shape) == tuple(shape) else make(aten.expand.default, node, shape)


# Fourier transforms ----------------------------------------------------------------------------------------------------

AXES = {"": (-1,), "2": (-2, -1), "n": None}  # what a transform without an argument for it runs along


def _transform(op: str, args: tuple[Any, ...], make: Make) -> Any:
    """A discrete Fourier transform along some axes; None for other operations, and where a matrix would be too large."""
    if not op.startswith("fft_") or not isinstance(args[0], (Node, Pairs)):
        return None
    name = op.removeprefix("fft_")
    kind = name.rstrip("2n")
    if kind not in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") or name.removeprefix(kind) not in AXES:
        return None
    x, norm = args[0], args[3]
    rank = len(x.shape)
    single = name == kind
    given, sizes = (None if part is None else [part] if single else list(part) for part in (args[2], args[1]))
    usual = AXES[name.removeprefix(kind)] or range(0 if sizes is None else rank - len(sizes), rank)
    axes = [axis % rank for axis in (usual if given is None else given)]
    lengths: list[int | None] = [None] * len(axes) if sizes is None else [None if size == -1 else size for size in sizes]
    others = {"rfft": "fft", "irfft": "ifft", "hfft": "fft", "ihfft": "ifft"}.get(kind, kind)
    order = [(kind if place == len(axes) - 1 else others, axis, lengths[place]) for place, axis in enumerate(axes)]
    for part, axis, length in order if kind in ("irfft", "hfft") else reversed(order):  # real numbers come last, or first
        found = _along(x, getattr(torch.fft, part), axis, length, norm, make)
        if found is None:
            return None
        x = found
    return x


def _along(x: Any, transform: Any, axis: int, length: int | None, norm: str | None, make: Make) -> Any:
    """One axis: its entries times the matrix of the transform, whose rows are what the unit vectors become."""
    rank, size, pairs = len(x.shape), x.shape[axis], isinstance(x, Pairs)
    if size > math.isqrt(LARGEST) or (length or 0) > math.isqrt(LARGEST):
        return None
    unit = torch.eye(size, dtype=torch.float64)
    unit = torch.stack([unit, 1j * unit], 1).flatten(0, 1) if pairs else unit
    rows = transform(unit, length, -1, norm).resolve_conj()
    count, made = rows.shape[-1], rows.is_complex()
    matrix = torch.view_as_real(rows).flatten(1) if made else rows
    if matrix.numel() > LARGEST:
        return None
    order = [*(other for other in range(rank) if other != axis), axis]
    back = [order.index(other) for other in range(rank)]
    shape = [x.shape[other] for other in order[:-1]]
    moved = make(aten.permute.default, x.node if pairs else x, [*order, rank] if pairs else order)
    moved = make(aten.reshape.default, moved, [*shape, 2 * size]) if pairs else moved
    product = make(aten.matmul.default, moved, Constant(matrix))
    product = make(aten.reshape.default, product, [*shape, count, 2]) if made else product
    result = make(aten.permute.default, product, [*back, rank] if made else back)
    return Pairs(result) if made else result
