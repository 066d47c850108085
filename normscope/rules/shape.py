"""Operations that move, repeat, drop or overwrite entries: each output entry is one entry of an input, or a constant.

Then AᵀA is diagonal and holds how often each entry is there, so the norm is √ of the most copies, exactly. Which entry goes where
is read off the operation itself, applied to numbered entries; no derivative of torch's is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from normscope.core.errors import Refusal
from normscope.core.interval import Interval
from normscope.core.rounding import above, root
from normscope.graph.canonical import is_float
from normscope.graph.graph import Constant, Node
from normscope.rules.algebra import Form, Forms
from normscope.rules.readings import Joining, Permuting, Reshaping
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.remainder import Remainder, Sizes


def entries_read(node: Node) -> torch.Tensor:
    """Which entry of its inputs (the distinct ones, laid end to end) each output entry of a node is; −1 for a constant."""
    sources = list(dict.fromkeys(node.inputs))
    sizes = [math.prod(source.shape) for source in sources]
    numbers = torch.arange(1, sum(sizes) + 1, dtype=torch.float64)
    constants, found, backwards = (
        joined(node.apply(*(part.reshape(source.shape) for part, source in zip(values.split(sizes), sources, strict=True))))
        for values in (torch.zeros_like(numbers), numbers, len(numbers) + 1 - numbers)
    )
    found, backwards = ((values - constants).nan_to_num(0, 0, 0) for values in (found, backwards))
    moved = found != 0
    if bool((found != found.round()).any()) or bool((found + backwards)[moved].ne(len(numbers) + 1).any()):
        raise Refusal("no certificate: an operation changes entries that its rule takes to be moved", [node.label])
    return found.long() - 1


def copies_read(node: Node) -> list[int]:
    """How often the node's output holds one and the same entry of each of `node.inputs`, at most.

    All copies of an input that is there twice are counted at its first place, none at the others.
    """
    sources = list(dict.fromkeys(node.inputs))
    sizes = [math.prod(source.shape) for source in sources]
    read = entries_read(node)
    counts = torch.bincount(read[read >= 0], minlength=sum(sizes)).split(sizes)
    most = {source: int(count.max()) if count.numel() else 0 for source, count in zip(sources, counts, strict=True)}
    return [most.pop(source, 0) for source in node.inputs]


def joined(value: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One vector of all entries; an operation may return several tensors."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)
    return torch.cat([part.reshape(-1) for part in value])


def on_both_sides(node: Node, context: Context) -> Interval:
    """The bounds of a node that moves entries of all its inputs, or takes the larger or the lesser of them."""
    bounds = [context.interval(source) for source in dict.fromkeys(node.inputs)]
    return Interval(node.apply(*(b.low for b in bounds)), node.apply(*(b.high for b in bounds)))


@rule(
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "mT", "mH", "ravel",
    "swapdims", "moveaxis", "movedim", "swapaxes", "flip", "fliplr", "flipud", "rot90", "roll", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle", "numpy_T", "adjoint", "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
class Rearrangement(Rule):
    """Every entry moves to one place: an isometry."""

    def reading(self, node: Node) -> Reshaping | Permuting | None:
        return Reshaping() if node.op in ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel") else Permuting()

    def terms(self, node: Node) -> float:
        return 0

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(1, method="isometry")

    def interval(self, node: Node, context: Context) -> Interval:
        return context.interval(node.input).map(node.apply)

    def norm(self, node: Node, context: Context) -> float:
        """Vectors along the last axis stay whole, are split, or are joined, as positions tell."""
        return above(context.norm(node.input) * math.sqrt(vectors_joined(node)))

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.rearranged() if node.inputs[0].shape or node.shape else forms.of(node.inputs[0])


@rule(
    "slice", "select", "narrow", "index", "index_select", "gather", "take", "take_along_dim", "diagonal", "diag", "diag_embed",
    "expand", "repeat", "repeat_interleave", "tile", "broadcast_to", "unfold", "im2col", "tril", "triu", "constant_pad_nd",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "as_strided", "pad",
)  # fmt: skip
class Selection(Rearrangement):
    """Every output entry is an entry of the input or a constant: √ of the most copies."""

    def reading(self, node: Node) -> None:
        return None

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(root(max(copies_read(node))), method="copies")

    def form(self, node: Node, forms: Forms) -> Form:
        if any(not is_float(source) for source in node.inputs):
            return forms.opaque()  # entries chosen by values
        return forms.opaque() if node.op in ("diag", "take") else forms.rearranged()


CONSTANT_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")


@rule(*CONSTANT_LIKE)
class ConstantLike(Rule):
    """Of its input only the shape is read."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(0 for _ in node.inputs), method="constant")

    def interval(self, node: Node, context: Context) -> Interval:
        value = node.apply(*(torch.zeros(source.shape, dtype=torch.float64) for source in dict.fromkeys(node.inputs)))
        return Interval(value.double(), value.double())

    def linear(self, node: Node) -> bool:
        return True


def reduced(node: Node, forms: Forms, linear: bool = True, constants: bool = True, position: int = 1) -> Form:
    """A combination of the entries along the axes that a node names (all of them if it names none)."""
    x, shape = forms.of(node.inputs[0]), node.shape
    if node.dtype is None:  # values and indices: the values
        shape = tuple(node.apply(torch.zeros(x.shape, dtype=torch.float64))[0].shape)
    given = _named_axes(node, position)
    axes = tuple(range(len(x.shape))) if given is None or not x.shape else tuple(axis % len(x.shape) for axis in given)
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

    Infinite where an output vector holds some entry twice, or a constant.
    """
    source = node.input
    if not source.shape or not node.shape or not math.prod(node.shape):
        return math.inf
    rows = entries_read(node).reshape(-1, node.shape[-1]).sort(1).values
    if bool((rows < 0).any()) or bool((rows[:, 1:] == rows[:, :-1]).any()):
        return math.inf
    owners = rows // source.shape[-1]
    return int((owners[:, 1:] != owners[:, :-1]).sum(1).max()) + 1 if owners.shape[1] > 1 else 1


@rule("getitem")
class Pick(Rule):
    """One of several outputs; pieces of a tensor are slices (graph/canonical.py)."""

    def gain(self, node: Node, context: Context) -> Gain:
        if node.dtype is not None and not node.dtype.is_floating_point:
            return Gain.infinite(
                node.input,
                "its places depend on the order of values, so the result may jump; give a region where that is the same everywhere",
            )
        return Gain.of(1, method="part")

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        first = forms.made.get(node.input)  # rules of operations with several outputs give the form of the first
        return first if first is not None and node.args[1] == 0 and first.shape == node.shape else forms.opaque()


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")
class Concatenation(Rule):
    """The inputs go to separate entries: √Σ L_i²."""

    def reading(self, node: Node) -> Joining | None:
        joins = node.op in ("cat", "concat", "concatenate")
        return Joining(node.argument(1, "dim", 0) % len(node.shape)) if joins else None

    def terms(self, node: Node) -> float:
        return 0

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(1 for _ in node.inputs), method="concatenation", separate=True)

    def interval(self, node: Node, context: Context) -> Interval:
        return on_both_sides(node, context)

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.rearranged()


@rule(
    "select_scatter", "slice_scatter", "diagonal_scatter", "index_put", "index_copy", "index_fill", "scatter", "copy",
    "masked_fill", "where", "masked_scatter", "fill",
)  # fmt: skip
class Overwrite(Rule):
    """Each output entry is taken from one of the inputs, by a rule that does not depend on their values."""

    def gain(self, node: Node, context: Context) -> Gain:
        if node.op == "index_put" and node.argument(3, "accumulate", False):
            return _accumulated(node)
        if node.op == "scatter" and (len(node.args) > 4 or node.kwargs.get("reduce") is not None):
            return Gain.infinite(node, "a scatter that multiplies or adds has no rule here; use scatter_add")
        several = _written_by(node)
        copies = [
            most if several is None or source is not _values(node) else max(most, several)
            for source, most in zip(node.inputs, copies_read(node), strict=True)
        ]
        return Gain.of(*(root(most) for most in copies), method="selection", separate=True)

    def interval(self, node: Node, context: Context) -> Interval:
        chosen_by_values = any(not is_float(source) for source in node.inputs)
        if chosen_by_values or _written_by(node) is not None or node.argument(3, "accumulate", False):
            return Interval.unbounded(node.shape)
        return on_both_sides(node, context)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """Nothing, where torch says which entry goes where."""
        if any(not is_float(source) for source in node.inputs) or _written_by(node) is not None:
            return None
        return Remainder(*torch.zeros(2, *node.shape, dtype=torch.float64))

    def form(self, node: Node, forms: Forms) -> Form:
        chosen_by_values = any(not is_float(source) for source in node.inputs)
        plain = node.op not in ("masked_scatter", "fill", "scatter", "index_fill", "diagonal_scatter")
        if chosen_by_values or not plain or node.argument(3, "accumulate", False):
            return forms.opaque()
        return forms.rearranged()


def _places_and_values(node: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For an operation that writes values to the places in an index: for every write the place and the number of the value."""
    if node.op not in ("index_put", "index_copy", "scatter", "index_add", "scatter_add"):
        return None
    places = torch.arange(math.prod(node.shape)).reshape(node.shape)
    if node.op == "index_put":
        indices = tuple(slice(None) if index is None else _tensor(index) for index in node.args[1])
        at, values = places[indices], node.args[2]
    else:
        axis, index, values = node.args[1:4]
        at = places.gather(axis, _tensor(index)) if "scatter" in node.op else places.index_select(axis, _tensor(index))
    shape = values.shape if isinstance(values, (Node, Constant)) else ()
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    if node.op in ("scatter", "scatter_add") and shape:
        numbers = numbers[tuple(slice(size) for size in at.shape)]
    return at.reshape(-1), numbers.broadcast_to(at.shape).reshape(-1)


def _values(node: Node) -> object:
    """The operand that is written."""
    return node.args[2] if node.op == "index_put" else node.args[3]


def _written_by(node: Node) -> int | None:
    """Where several values go to one place, torch does not say which of them stays: how many places one value may fill, at most."""
    writes = _places_and_values(node)
    if writes is None or len(writes[0].unique()) == len(writes[0]):
        return None
    distinct = torch.stack(writes, 1).unique(dim=0)
    return int(torch.bincount(distinct[:, 1]).max())


def _accumulated(node: Node, weight: float = 1.0) -> Gain:
    """base + w · scattered values, S a matrix of zeros and ones: ‖S‖ ≤ √(largest row sum · largest column sum)."""
    writes = _places_and_values(node)
    assert writes is not None
    most = [int(torch.bincount(part).max()) if part.numel() else 0 for part in writes]
    scattered = above(abs(weight) * math.sqrt(most[0] * most[1]))
    operands = ((node.args[0], 1.0), (_values(node), scattered))  # by place: both may be the same node
    return Gain.of(*(factor for operand, factor in operands if isinstance(operand, Node)), method="sum")


@rule("index_add", "scatter_add")
class Accumulation(Rule):
    """base + scattered values."""

    def gain(self, node: Node, context: Context) -> Gain:
        return _accumulated(node, float(node.argument(4, "alpha", 1)))

    def linear(self, node: Node) -> bool:
        return True


def _tensor(index: Constant | torch.Tensor) -> torch.Tensor:
    return index.value if isinstance(index, Constant) else index


@rule("broadcast_tensors")
class Several(Rule):
    """Several tensors at once, made of the entries of the inputs."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(root(most) for most in copies_read(node)), method="copies", separate=True)

    def terms(self, node: Node) -> float:
        return 0

    def linear(self, node: Node) -> bool:
        return True
