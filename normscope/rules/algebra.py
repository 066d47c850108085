"""What an operation is as algebra: a small vocabulary in which every operation says how it treats scales and shifts.

A rule translates its node into these forms (`Rule.form`); the searches of `normscope.symmetry` know nothing else. Whatever
is not known to keep a structure is `Opaque`, which no symmetry passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from normscope.graph.graph import Constant, Node, Shape

Move = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(eq=False)
class Form:
    """A tensor and how it is made from others; `node` is the operation of the graph that it belongs to."""

    operands: tuple[Form, ...]
    shape: Shape
    node: Node | None = field(default=None, kw_only=True)

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False)
class Parameter(Form):
    name: str


@dataclass(eq=False)
class Fixed(Form):
    """Data, buffers and literals: nothing that a symmetry moves."""


@dataclass(eq=False)
class Opaque(Form):
    """No structure: equal inputs for equal outputs."""


@dataclass(eq=False)
class Homogeneous(Form):
    """φ(c x) = c^power φ(x) for c > 0, entry by entry. odd_linear: φ(x) = ±x."""

    power: float = 1.0
    odd_linear: bool = False


@dataclass(eq=False)
class Moved(Form):
    """Every output entry is an entry of an operand, or fixed."""

    move: Move

    @cached_property
    def source(self) -> np.ndarray:
        """For every output entry its place among all entries of the operands, −1 for zero, −2 for another fixed value.

        Entries are numbered twice, the second time from where the first ended: what does not change by that is no entry.
        """
        sizes = [operand.entries for operand in self.operands]
        starts = np.cumsum([0, *sizes])
        total = int(starts[-1])
        first, second = (
            self.move([
                (torch.arange(size, dtype=torch.float64) + (start + offset)).reshape(operand.shape)
                for size, start, operand in zip(sizes, starts[:-1], self.operands, strict=True)
            ]).numpy()
            for offset in (0, total)
        )  # fmt: skip
        is_entry = (second - first == total) & (first >= 0) & (first < total)
        is_entry &= first == np.floor(first)
        zero = (first == 0) & (second == 0)
        return np.where(is_entry, np.where(is_entry, first, 0), np.where(zero, -1, -2)).astype(np.int64)


@dataclass(eq=False)
class Mixed(Form):
    """Entries along `axes` of the operand are combined, positively homogeneously, the same way at all other places.

    `kept` is the output's shape with every mixed axis still there. linear: the combination is linear. constants: an
    operand that is constant along the axes gives an output that is.
    """

    axes: tuple[int, ...]
    kept: Shape
    linear: bool = True
    constants: bool = True


@dataclass(eq=False)
class Sum(Form):
    """Σ coefficient · operand, broadcast."""

    coefficients: tuple[float, ...]


@dataclass(eq=False)
class Product(Form):
    """∏ operand^power, broadcast."""

    powers: tuple[float, ...]


@dataclass(eq=False)
class Contraction(Form):
    """Σ over the names that are not in `out`, of the product of two operands whose (split) axes have names.

    views: the shapes in which the operands are read, out_view that in which the result is. A name in one operand only
    that `out` lacks is mixed away; one that only `out` has is made by that mixing: positions of the first operand, under
    the taps of the second. constants: a first operand that is constant along what is mixed gives a result that is.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    out: tuple[str, ...]
    views: tuple[Shape, Shape]
    out_view: Shape
    constants: bool = True

    def shared(self) -> set[str]:
        return set(self.names[0]) & set(self.names[1])

    def contracted(self) -> set[str]:
        """Summed over in both operands together."""
        return self.shared() - set(self.out)

    def batched(self) -> set[str]:
        """In both operands and in the result."""
        return self.shared() & set(self.out)

    def mixed(self, operand: int) -> set[str]:
        """Summed over in one operand alone."""
        return set(self.names[operand]) - set(self.names[1 - operand]) - set(self.out)

    def made(self) -> set[str]:
        """Of the result alone."""
        return set(self.out) - set(self.names[0]) - set(self.names[1])


@dataclass(eq=False)
class Normalized(Form):
    """x (less its mean, if centered) over its scale along `axes`; only centered, not scaled, without `divides`."""

    axes: tuple[int, ...]
    centered: bool
    divides: bool = True


@dataclass(eq=False)
class Softmax(Form):
    """exp over its sum along an axis, or the logarithm of that: blind to a constant along the axis."""

    axis: int
    stochastic: bool = True


@dataclass(eq=False)
class Rotation(Form):
    """Planes (i, i + d/2) of the last axis turned by fixed angles, each plane by its own."""


@dataclass(eq=False)
class Lookup(Form):
    """Rows of a table, chosen by any indices."""


Operand = Node | Constant | float | int | None


@dataclass
class Forms:
    """Builds the forms of one graph, node by node; what rules call in `Rule.form`."""

    made: dict[Node, Form] = field(default_factory=dict)
    node: Node | None = None  # whose form is being built

    def of(self, operand: Any) -> Form:
        """The form of an argument of a node."""
        if isinstance(operand, Node):
            return self.made[operand]
        return Fixed((), operand.shape if isinstance(operand, Constant) else (), node=self.node)

    def opaque(self, *operands: Form) -> Form:
        assert self.node is not None
        return Opaque(operands or tuple(map(self.of, dict.fromkeys(self.node.inputs))), self.node.shape, node=self.node)

    def opaque_of(self, x: Form) -> Form:
        return Opaque((x,), x.shape, node=self.node)

    def entrywise(self, x: Form, power: float = 1.0, odd_linear: bool = False) -> Form:
        return Homogeneous((x,), x.shape, power, odd_linear, node=self.node)

    def moved(self, operands: Sequence[Form], move: Move, shape: Shape) -> Form:
        """Parts of one tensor that are put together again are one rearrangement of it."""
        origins = [_origin(operand) for operand in operands]
        if len(operands) > 1 and all(origin is origins[0] for origin in origins):
            return Moved(
                (origins[0],), shape, lambda values: move([_replayed(operand, values[0]) for operand in operands]), node=self.node
            )
        return Moved(tuple(operands), shape, move, node=self.node)

    def rearranged(self) -> Form:
        """The current node as a rearrangement of its inputs."""
        node = self.node
        assert node is not None
        inputs = list(dict.fromkeys(node.inputs))
        blank = _with_blank_constants(node)

        def move(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return blank.evaluate(dict(zip(inputs, values, strict=True)), torch.float64)

        return self.moved([self.made[source] for source in inputs], move, node.shape)

    def view(self, x: Form, shape: Shape) -> Form:
        return x if x.shape == shape else self.moved([x], lambda values: values[0].reshape(shape), shape)

    def mixed(self, x: Form, axes: Sequence[int], shape: Shape, kept: Shape, linear: bool = True, constants: bool = True) -> Form:
        axes = tuple(axis % max(len(x.shape), 1) for axis in axes)
        return Mixed((x,), shape, axes, kept, linear, constants, node=self.node)

    def sum(self, *operands: Form, coefficients: tuple[float, ...] | None = None) -> Form:
        return Sum(operands, _broadcast(operands), coefficients or (1.0,) * len(operands), node=self.node)

    def product(self, *operands: Form, powers: tuple[float, ...] | None = None) -> Form:
        return Product(operands, _broadcast(operands), powers or (1.0,) * len(operands), node=self.node)

    def contraction(
        self, a: Form, b: Form, names: tuple[Sequence[str], Sequence[str]], out: Sequence[str],
        shape: Shape, views: tuple[Shape, Shape] | None = None, out_view: Shape | None = None, constants: bool = True,
    ) -> Form:  # fmt: skip
        return Contraction(
            (a, b), shape, (tuple(names[0]), tuple(names[1])), tuple(out), views or (a.shape, b.shape), out_view or shape,
            constants, node=self.node,
        )  # fmt: skip

    def einsum(self, equation: str, a: Form, b: Form) -> Form:
        """A product of two tensors in einsum's notation, one letter per axis."""
        inputs, out = equation.split("->")
        left, right = inputs.split(",")
        sizes = dict(zip(left + right, a.shape + b.shape, strict=True))
        return self.contraction(a, b, (left, right), out, tuple(sizes[letter] for letter in out))

    def matmul(self, a: Form, b: Form) -> Form:
        """torch.matmul of tensors of rank ≥ 2; batch axes of size 1 are broadcast."""
        rank = max(len(a.shape), len(b.shape))
        batch = [f"batch{i}" for i in range(rank - 2)]
        names, views = [], []
        for form, own in ((a, ("row", "inner")), (b, ("inner", "column"))):
            leading = form.shape[:-2]
            kept = [(name, size) for name, size in zip(batch[len(batch) - len(leading) :], leading, strict=True) if size > 1]
            names.append((*(name for name, _ in kept), *own))
            views.append((*(size for _, size in kept), *form.shape[-2:]))
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        kept_out = [(name, size) for name, size in zip(batch, leading, strict=True) if size > 1]
        out_view = (*(size for _, size in kept_out), a.shape[-2], b.shape[-1])
        out = (*(name for name, _ in kept_out), "row", "column")
        shape = (*leading, a.shape[-2], b.shape[-1])
        return self.contraction(a, b, (names[0], names[1]), out, shape, (views[0], views[1]), out_view)

    def affine(self, x: Form, weight: Form | None, bias: Form | None) -> Form:
        """γ x + β, each where there is one."""
        if weight is not None:
            x = self.product(x, weight)
        return x if bias is None else self.sum(x, bias)

    def normalized(self, x: Form, axes: Sequence[int], centered: bool, divides: bool = True) -> Form:
        return Normalized((x,), x.shape, tuple(axis % len(x.shape) for axis in axes), centered, divides, node=self.node)

    def softmax(self, x: Form, axis: int, stochastic: bool = True) -> Form:
        return Softmax((x,), x.shape, axis % max(len(x.shape), 1), stochastic, node=self.node)


def _origin(form: Form) -> Form:
    """What a form is a rearrangement of."""
    while isinstance(form, Moved) and len(form.operands) == 1:
        form = form.operands[0]
    return form


def _replayed(form: Form, value: torch.Tensor) -> torch.Tensor:
    """A form from the value of its origin."""
    steps = []
    while isinstance(form, Moved) and len(form.operands) == 1:
        steps.append(form.move)
        form = form.operands[0]
    for step in reversed(steps):
        value = step([value])
    return value


def _broadcast(operands: Sequence[Form]) -> Shape:
    return tuple(np.broadcast_shapes(*(operand.shape for operand in operands)))


def _with_blank_constants(node: Node) -> Node:
    """The same operation with NaN for every floating-point constant, so that what comes from it is seen."""

    def blank(constant: Constant) -> Constant:
        value = constant.value
        return Constant(torch.where(value == 0, value, math.nan)) if value.is_floating_point() else constant

    args, kwargs = tree_map_only(Constant, blank, (node.args, node.kwargs))
    return Node(node.name, node.op, node.target, args, kwargs, node.path, node.source, node.shape, node.dtype)
