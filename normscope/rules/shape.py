"""Operations that move, repeat or drop entries, and other linear maps with weights ≥ 0.

For a matrix A ≥ 0, Schur's test gives ‖A‖ ≤ √(largest row sum · largest column sum), both read off by applying A and
its adjoint to ones; likewise for A ≤ 0. It is exact where every output reads one entry (views, slices, padding, expand:
√copies) and for averages over disjoint windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope.core.interval import Interval
from normscope.graph.canonical import is_float
from normscope.graph.graph import Constant, Node
from normscope.rules.forms import Form, Forms, Lookup
from normscope.rules.registry import Context, Gain, Rule, rule


def schur_bound(node: Node) -> float:
    """√(‖A‖₁ ‖A‖_∞) for the linear part A ≥ 0 of a one-input node."""
    ones = torch.ones(node.input.shape, dtype=torch.float64)
    rows = linear_part(node, ones)
    adjoint = torch.func.vjp(lambda x: _joined(node.apply(x)), ones)[1]
    (columns,) = adjoint(torch.ones_like(rows))
    row, column = (float(sums.abs().max()) if sums.numel() else 0.0 for sums in (rows, columns))
    return math.sqrt(row * column) * (1 + 2**-40)


def linear_part(node: Node, x: torch.Tensor) -> torch.Tensor:
    """A x, flat, for an affine one-input node x ↦ A x + b; as a derivative, so that no large b takes its digits."""
    return torch.func.jvp(lambda at: _joined(node.apply(at)), (torch.zeros_like(x),), (x,))[1]


def _joined(value: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One vector of all entries; an operation may return several tensors."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)
    return torch.cat([part.reshape(-1) for part in value])


@rule(
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "mT", "mH",
    "swapdims", "moveaxis", "movedim", "swapaxes", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "numpy_T", "adjoint",
)  # fmt: skip
class Rearrangement(Rule):
    """Every entry moves to one place: an isometry."""

    def terms(self, node: Node) -> float:
        return 0

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(1, method="isometry")

    def interval(self, node: Node, context: Context) -> Interval:
        return context.interval(node.input).map(node.apply)

    def norm(self, node: Node, context: Context) -> float:
        """Vectors along the last axis stay whole, are split, or are joined, as positions tell."""
        return context.norm(node.input) * math.sqrt(vectors_joined(node))

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.rearranged() if node.inputs[0].shape or node.shape else forms.of(node.inputs[0])


@rule(
    "slice", "select", "narrow", "index", "index_select", "gather", "diagonal",
    "expand", "repeat", "repeat_interleave", "tile", "broadcast_to", "unfold", "im2col", "col2im",
    "sum", "mean", "cumsum", "tril", "triu", "constant_pad_nd", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "as_strided", "trace", "pad",
)  # fmt: skip
class NonnegativeLinear(Rule):
    """Every output is a sum of entries with weights ≥ 0: Schur's test."""

    def terms(self, node: Node) -> float:
        return 0 if node.op in SELECTIONS or node.op == "pad" else super().terms(node)

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(schur_bound(node), method="Schur")

    def norm(self, node: Node, context: Context) -> float:
        return context.norm(node.input) * math.sqrt(vectors_joined(node)) if node.op in SELECTIONS else math.inf

    def interval(self, node: Node, context: Context) -> Interval:
        return context.interval(node.input).map(node.apply)

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        if any(not is_float(source) for source in node.inputs):
            return forms.opaque()  # entries chosen by values
        if node.op in ("sum", "mean", "cumsum"):
            return reduced(node, forms, constants=node.op != "cumsum")
        if "avg_pool" in node.op:
            axes = int(node.op[-2])
            return forms.mixed(forms.of(node.input), range(-axes, 0), node.shape, node.shape, constants=keeps_constants(node))
        if node.op in ("col2im", "trace"):
            return forms.opaque()
        return forms.rearranged()


def keeps_constants(node: Node) -> bool:
    """Whether a linear node with weights ≥ 0 maps a constant to a constant."""
    image = node.apply(torch.ones(node.input.shape, dtype=torch.float64))
    return bool((image - image.flatten()[0]).abs().max() < 1e-9)


def reduced(node: Node, forms: Forms, linear: bool = True, constants: bool = True, position: int = 1) -> Form:
    """A combination of the entries along the axes that a node names (all of them if it names none)."""
    x, shape = forms.of(node.inputs[0]), node.shape
    if node.dtype is None:  # values and indices: the values
        shape = tuple(node.apply(torch.zeros(x.shape, dtype=torch.float64))[0].shape)
    given = _named_axes(node, position)
    axes = tuple(range(len(x.shape))) if given is None else tuple(axis % len(x.shape) for axis in given)
    kept = shape if len(shape) == len(x.shape) else tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    return forms.mixed(x, axes, shape, kept, linear, constants)


def _named_axes(node: Node, position: int) -> Sequence[int] | None:
    """The argument called `dim` of a reduction, as a list; None if it reduces everything."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    where = names.index("dim") if "dim" in names else position
    axes = node.argument(where, "dim") if "dim" in names else None
    if node.op == "msort":
        return [0]
    if axes is None or axes == []:
        return None
    return [axes] if isinstance(axes, int) else list(axes)


def vectors_joined(node: Node) -> float:
    """From how many vectors along the input's last axis the entries of one output vector come, at most.

    Infinite where an output vector holds some entry twice, or where its entries are not entries of the input.
    """
    source = node.input
    if not source.shape or not node.shape or not math.prod(node.shape):
        return math.inf
    entries = torch.arange(math.prod(source.shape), dtype=torch.float64).reshape(source.shape)
    rows = node.apply(entries).reshape(-1, node.shape[-1]).sort(1).values
    if bool((rows[:, 1:] == rows[:, :-1]).any()):
        return math.inf
    owners = (rows // source.shape[-1]).sort(1).values
    return int((owners[:, 1:] != owners[:, :-1]).sum(1).max()) + 1 if owners.shape[1] > 1 else 1


SELECTIONS = (
    "slice",
    "select",
    "narrow",
    "index",
    "index_select",
    "gather",
    "expand",
    "repeat",
    "repeat_interleave",
    "tile",
)


@rule("getitem")
class Pick(Rule):
    """One of several outputs; pieces of a tensor are slices (graph/canonical.py)."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(1, method="part")

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        first = forms.made.get(node.input)  # rules of operations with several outputs give the form of the first
        return first if first is not None and node.args[1] == 0 and first.shape == node.shape else forms.opaque()


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
class Concatenation(Rule):
    """The inputs go to separate entries: √Σ L_i²."""

    def terms(self, node: Node) -> float:
        return 0

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(1 for _ in node.inputs), method="concatenation", separate=True)

    def interval(self, node: Node, context: Context) -> Interval:
        distinct = list(dict.fromkeys(node.inputs))
        bounds = [context.interval(source) for source in distinct]
        return Interval(node.apply(*(b.low for b in bounds)), node.apply(*(b.high for b in bounds)))

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.rearranged()


@rule("select_scatter", "slice_scatter", "index_put", "index_copy", "copy", "masked_fill", "where", "masked_scatter", "fill")
class Overwrite(Rule):
    """Each output entry is taken from one of the inputs, by a rule that does not depend on their values."""

    def gain(self, node: Node, context: Context) -> Gain:
        if node.op == "index_put" and node.argument(3, "accumulate", False):
            return self._accumulated(node)
        factors = [math.sqrt(_copies(source, node)) for source in node.inputs]
        return Gain.of(*factors, method="selection", separate=True)

    def form(self, node: Node, forms: Forms) -> Form:
        chosen_by_values = any(not is_float(source) for source in node.inputs)
        if chosen_by_values or node.op in ("masked_scatter", "fill") or node.argument(3, "accumulate", False):
            return forms.opaque()
        return forms.rearranged()

    @staticmethod
    def _accumulated(node: Node) -> Gain:
        """base + scattered values: an entry that receives m values adds √m of their change."""
        base, indices, values = node.args[:3]
        received = torch.zeros(node.shape, dtype=torch.float64).index_put(
            [index.value if isinstance(index, Constant) else index for index in indices],
            torch.ones((), dtype=torch.float64),
            accumulate=True,
        )
        places = float(received.sum())
        factors = {}
        if isinstance(base, Node):
            factors[base] = 1.0
        if isinstance(values, Node):
            factors[values] = math.sqrt(float(received.max()) * max(1.0, places / max(math.prod(values.shape), 1)))
        return Gain.of(*(factors[source] for source in node.inputs), method="sum")


def _copies(source: Node, node: Node) -> int:
    """How often broadcasting may repeat an entry of `source`."""
    entries, outputs = math.prod(source.shape), math.prod(node.shape)
    return max(1, math.ceil(outputs / max(entries, 1)))


@rule(
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
)  # fmt: skip
class Interpolation(Rule):
    """A tensor product of one matrix an axis, so the norm is the product of theirs: exact for every mode."""

    def gain(self, node: Node, context: Context) -> Gain:
        from normscope.operators.dense import spectral_norm

        size = node.input.shape[2:]
        bound = spectral_norm(torch.ones(1, 1))
        for axis in range(len(size)):
            bound = bound * spectral_norm(self._axis_matrix(node, axis))
        return Gain((bound,), "exact")

    @staticmethod
    def _axis_matrix(node: Node, axis: int) -> torch.Tensor:
        """The map along one axis, read off on inputs that are constant along the others (their rows sum to 1)."""
        size = node.input.shape[2:]
        shape = [1] * (len(size) + 2)
        shape[axis + 2] = size[axis]
        columns = []
        for unit in torch.eye(size[axis], dtype=torch.float64):
            sample = unit.reshape(shape).expand(1, node.input.shape[1], *size)
            picked = node.apply(sample.contiguous())[0, 0]
            columns.append(picked.movedim(axis, 0).reshape(picked.shape[axis], -1)[:, 0])
        return torch.stack(columns, 1)

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.mixed(forms.of(node.input), range(2, len(node.shape)), node.shape, node.shape)


@rule("embedding")
class Embedding(Rule):
    """Rows of a table."""

    def form(self, node: Node, forms: Forms) -> Form:
        return Lookup((forms.of(node.args[0]),), node.shape, node=node)
