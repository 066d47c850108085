"""Products with constant matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.errors import InputError
from normscope.core.interval import Interval
from normscope.core.magnitude import Magnitude, product, root_sum_square
from normscope.core.rounding import UNDERFLOW, above, gamma, length, summation_error
from normscope.graph.graph import Constant, Node
from normscope.operators.dense import spectral_norm
from normscope.rules.algebra import Form, Forms
from normscope.rules.arithmetic import copies
from normscope.rules.readings import LinearMap
from normscope.rules.registry import Context, Gain, Rule, registry, rule
from normscope.rules.remainder import Remainder, Sizes

EXACT_SIZE = 2000


def constant_map(node: Node) -> LinearMap | None:
    """The map of a node that is W x + b with constants W and b, and nothing else; or None."""
    found = registry.reading(node, LinearMap)
    if found is None or not (found.plain and found.fixed):
        return None
    if node.is_foreign and not _computes(node, found):
        raise InputError(
            f"{node.label} does not compute the W x + b that the reading of its rule says: correct outputs=, input_axis= and "
            "output_axis=, or pass plain=False"
        )
    return found


def _computes(node: Node, read: LinearMap) -> bool:
    """Whether a node is what a user's rule reads, at a random point: two affine maps that differ do so almost everywhere."""
    if read.kernel is not None or read.input_axis is None or read.output_axis is None:
        return False
    x = torch.randn(node.input.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix, channels = read.matrix(), x.movedim(read.input_axis, -1)
    if matrix.shape[1] != channels.shape[-1]:
        return False
    expected, found = channels @ matrix.T, node.apply(x)
    if isinstance(read.bias, Constant):
        expected = expected + read.bias.double()
    expected, size = expected.movedim(-1, read.output_axis), (channels.abs() @ matrix.abs().T).movedim(-1, read.output_axis)
    return expected.shape == found.shape and bool(((expected - found).abs() <= 1e-6 * (size + found.abs())).all())


def weight_of(node: Node) -> Constant | None:
    """The weight of a layer: a linear map's own, or the only learned matrix that an operation of another library reads."""
    found = registry.reading(node, LinearMap)
    if found is not None:
        stored = any(isinstance(part, Constant) and part.sources for part in (found.weight, found.bias))
        return found.weight if isinstance(found.weight, Constant) and found.fixed and stored else None
    matrices = [constant for constant in node.constants if constant.learned and len(constant.shape) > 1]
    return matrices[0] if node.is_foreign and len(node.inputs) == len(matrices) == 1 else None


def with_absolute_constants(node: Node) -> Node:
    """The same operation with |C| for every constant C: an entrywise bound on its matrix."""
    args, kwargs = tree_map_only(Constant, lambda c: Constant(c.double().abs(), c.sources), (node.args, node.kwargs))
    kwargs = {name: abs(value) if name in ("alpha", "beta") else value for name, value in kwargs.items()}
    return Node(node.name, node.op, node.target, args, kwargs, node.path, node.source, node.shape, node.dtype)


def propagate(node: Node, context: Context, terms: int, row_norms: torch.Tensor | None = None) -> Interval:
    """Values of an affine node: center through the node, radius through its absolute matrix, plus rounding.

    row_norms: ‖w_i‖ for every output, broadcast to the node's shape; on a region |w_i · Δ| ≤ ‖w_i‖ ‖Δ‖ for the deviation Δ of
    the input from its value at the middle.
    """
    bounds = context.interval(node.input)
    if not bounds.finite:
        return Interval.unbounded(node.shape)
    absolute = with_absolute_constants(node)
    center, middle_size = node.apply(bounds.center), absolute.apply(bounds.center.abs())
    spread = without_offset(absolute).apply(bounds.radius)
    error = summation_error(terms, middle_size) + summation_error(terms, spread)
    found = Interval.around(center, spread + error)
    middle, deviation = context.center(node), context.deviation(node.input)
    if row_norms is None or middle is None or not math.isfinite(deviation):
        return found
    return found.within(Interval.around(middle, above(row_norms * deviation) + context.error(node)))


def dense_matrix(node: Node) -> torch.Tensor:
    """The matrix of an affine one-input node, by applying it, without its constant part, to a basis."""
    shape, plain = node.input.shape, without_offset(node)
    basis = torch.eye(math.prod(shape), dtype=torch.float64)
    return torch.stack([plain.apply(unit.reshape(shape)).reshape(-1) for unit in basis], 1)


def _offset_at(node: Node) -> int:
    """At which place an affine operation takes what it adds to its product; -1 if it adds nothing."""
    place = {"linear": 2, "addmm": 0, "baddbmm": 0, "addmv": 0, "bilinear": 3}.get(node.op, 2 if node.op.startswith("conv") else -1)
    return place if place < len(node.args) else -1


def adds_its_input(node: Node) -> bool:
    """Whether what depends on the input is what an affine node of one input adds to its product."""
    place = _offset_at(node)
    return place >= 0 and node.args[place] is node.input


def factors(node: Node) -> list[Constant]:
    """The constants that an affine node multiplies, without the one it adds, which may be the same tensor."""
    place = _offset_at(node)
    multiplied = [arg for i, arg in enumerate(node.args) if i != place]
    return [leaf for leaf in tree_leaves((multiplied, node.kwargs)) if isinstance(leaf, Constant)]


def without_offset(node: Node) -> Node:
    """The same operation that adds nothing."""
    place = _offset_at(node)
    if place < 0 or not isinstance(node.args[place], Constant):
        return node
    args = (*node.args[:place], Constant(torch.zeros_like(node.args[place].value)), *node.args[place + 1 :])
    return Node(node.name, node.op, node.target, args, node.kwargs, node.path, node.source, node.shape, node.dtype)


@rule("linear")
class Linear(Rule):
    """x ↦ Wx + b on the last axis."""

    first_alone = "its weight or bias depends on the input"

    def reading(self, node: Node) -> LinearMap:
        x, weight, bias = node.args[:3]
        vector = len(weight.shape) == 1  # gives one number per sample
        return LinearMap(x, weight, bias, () if vector else (0,), -1, None if vector else -1, plain=not vector)

    def tokenwise(self, node: Node) -> bool:
        return len(node.args[1].shape) == 2

    def terms(self, node: Node) -> float:
        """n terms err by n u |W||x|, and ‖|W|‖ ≤ √n ‖W‖."""
        return node.args[1].shape[-1] ** 1.5

    def gain(self, node: Node, context: Context) -> Gain:
        bound, method = self.reading(node).norm()
        return Gain((bound,), method)

    def interval(self, node: Node, context: Context) -> Interval:
        rows = length(self.reading(node).matrix(), -1).reshape(node.args[1].shape[:-1])
        return propagate(node, context, node.args[1].shape[-1], rows)

    def norm(self, node: Node, context: Context) -> float:
        if not node.shape or len(node.args[1].shape) == 1:
            return math.inf
        bias = float(length(node.args[2].double())) if node.args[2] is not None else 0.0
        return above(context.gain(node).factors[0].ceiling * context.norm(node.input) + bias) + 2 * UNDERFLOW

    def linear(self, node: Node) -> bool:
        return True

    def form(self, node: Node, forms: Forms) -> Form:
        x, weight, bias = (None if operand is None else forms.of(operand) for operand in node.args[:3])
        assert x is not None and weight is not None
        leading = [f"batch{i}" for i in range(len(x.shape) - 1)]
        if len(weight.shape) == 1:
            product = forms.contraction(x, weight, ([*leading, "in"], ["in"]), leading, node.shape)
        else:
            product = forms.contraction(x, weight, ([*leading, "in"], ["out", "in"]), [*leading, "out"], node.shape)
        return forms.affine(product, None, bias)


def _summed_alone(node: Node) -> float:
    """√ of the number of terms that an einsum sums within one operand alone; an axis of one entry is broadcast."""
    equation, operands = node.args[:2]
    inputs, _, result = equation.replace(" ", "").partition("->")
    if "." in equation or not result:
        return math.sqrt(math.prod(math.prod(operand.shape) for operand in operands))  # no finer than all of them
    lengths: dict[str, list[int]] = {}  # of every axis that is summed over, in the operands where it is not broadcast
    for name, operand in zip(inputs.split(","), operands, strict=True):
        for letter in set(name) - set(result):
            length = max(operand.shape[axis] for axis, other in enumerate(name) if other == letter)
            lengths.setdefault(letter, []).extend([length] if length > 1 else [])
    return math.sqrt(math.prod(several[0] for several in lengths.values() if len(several) == 1))


def _other_norms(node: Node, sizes: list[torch.Tensor]) -> tuple[Magnitude, Magnitude]:
    """For each of two factors the product of the Frobenius norms of the other one and of all constants."""
    sides, constants = [Magnitude(float(length(size))) for size in sizes], _constant_norms(node)
    first, second = ((side * constants).raised(side, constants) for side in sides)
    return second, first


def _constant_norms(node: Node) -> Magnitude:
    """The product of the Frobenius norms of all constant factors: times ‖x‖ a bound on ‖Σ|products|‖, by Cauchy and Schwarz."""
    alone = _summed_alone(node) if node.op == "einsum" else 1.0
    scale = abs(float(node.kwargs.get("alpha", 1))) if node.op in ("addmm", "baddbmm", "addmv") else 1.0
    norms = [Magnitude(float(length(constant.double()))) for constant in factors(node)]
    factor = above(alone * scale)
    return (product(norms) * factor).raised(*norms, factor)


def _most_terms(node: Node) -> int:
    """More than any sum on the way to the product has."""
    shapes = [source.shape for source in node.inputs] + [constant.shape for constant in node.constants]
    return sum(map(math.prod, shapes))


def _product_with(factors: Sequence[Node | Constant], plain: bool) -> LinearMap | None:
    """x @ W or W @ x, for whichever factor is a constant, or a parameter where parameters are nodes."""
    left, right = factors
    fixed = [isinstance(factor, Constant) or factor.is_parameter for factor in factors]
    if sum(fixed) != 1:
        return None
    x, weight, after = (left, right, True) if fixed[1] else (right, left, False)
    axes = len(weight.shape)
    if axes < 2:  # a vector sums over the whole axis
        return LinearMap(x, weight, None, (), -1 if after or len(x.shape) == 1 else -2, None, plain=False)
    outputs = (*range(axes - 2), axes - 1 if after else axes - 2)
    axis = -1 if after or len(x.shape) == 1 else -2
    return LinearMap(x, weight, None, outputs, axis, axis, plain and axes == 2)


def _contraction(node: Node) -> LinearMap | None:
    """An einsum with one constant, or one learned constant among several, that no axis is summed or repeated within."""
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    inputs, arrow, result = equation.partition("->")
    words = inputs.split(",")
    fixed = [i for i, operand in enumerate(operands) if isinstance(operand, Constant) or operand.is_parameter]
    trained = [i for i in fixed if isinstance(operands[i], Node) or operands[i].learned]
    chosen = fixed if len(fixed) == 1 else trained
    if not arrow or "." in equation or len(chosen) != 1 or len(operands) != len(fixed) + 1:
        return None
    at = next(i for i in range(len(operands)) if i not in fixed)
    weight, word, read = operands[chosen[0]], words[chosen[0]], words[at]
    made = [letter for letter in word if letter in result]
    summed = [letter for letter in word if letter in read and letter not in result]
    if len(set(word)) != len(word) or len(set(read)) != len(read) or not made:
        return None
    single = len(made) == 1 and made[0] not in read
    return LinearMap(
        operands[at], weight, None, tuple(word.index(letter) for letter in made),
        read.index(summed[0]) - len(read) if len(summed) == 1 else None,
        result.index(made[0]) - len(result) if single else None,
        # the other axes of x stay as they are, in any order
        plain=len(operands) == 2 and single and len(word) == 2 and len(summed) == 1
        and len(result) == len(read) and operands[at].shape[read.index(summed[0])] == weight.shape[word.index(summed[0])],
    )  # fmt: skip


TWO_FACTORS = ("mm", "matmul", "bmm", "dot", "mv", "inner", "outer", "einsum")


@rule("mm", "matmul", "bmm", "addmm", "baddbmm", "dot", "mv", "inner", "tensordot", "einsum", "outer", "kron", "bilinear", "addmv")
class ConstantProduct(Rule):
    """A product with constant factors is linear; a product of two values that both depend on the input is not.

    Two values: ‖Δ(AB)‖ ≤ sup‖B‖ ‖ΔA‖ + sup‖A‖ ‖ΔB‖, with Frobenius norms for the suprema, and for the constants of an einsum.
    """

    def reading(self, node: Node) -> LinearMap | None:
        """A product with one constant, or with one that is learned and others that are not."""
        if node.op in ("addmm", "baddbmm"):
            bias, *factors = node.args[:3]
            plain = len(bias.shape) <= 1 and all(weight == 1 for weight in node.kwargs.values())  # neither α nor β
            product = _product_with(factors, plain)
            return None if product is None else replace(product, bias=bias)
        if node.op in ("mm", "matmul", "bmm"):
            return _product_with(node.args[:2], True)
        if node.op == "inner" and isinstance(node.args[1], Constant) and len(node.args[1].shape) == 2 and node.args[0].shape:
            return LinearMap(node.args[0], node.args[1])  # x Wᵀ; of a number without axes it is a multiple of W
        return _contraction(node) if node.op == "einsum" else None

    def terms(self, node: Node) -> float:
        """As for `Linear`; with two factors the norms in their gains are Frobenius norms, which |A||B| does not exceed."""
        if len(node.inputs) == 1 and all(constant.value.numel() for constant in node.constants):
            return max((c.value.numel() / max(min(c.shape, default=1), 1) for c in node.constants), default=1) ** 1.5
        return super().terms(node)

    def gain(self, node: Node, context: Context) -> Gain:
        if len(node.inputs) == 1:
            return Gain((self._constant_factor(node),), "exact")
        if node.op in TWO_FACTORS and len(node.inputs) == 2:
            return self._two_factors(node, context)
        return Gain.infinite(node, "a product of values that all depend on the input")

    @staticmethod
    def _constant_factor(node: Node) -> Magnitude:
        read = ConstantProduct().reading(node)
        if read is not None and read.plain and read.fixed:
            return read.norm()[0]
        if node.op in ("mm", "matmul") and node.input is node.args[0]:
            matrix, rows = node.args[1].double(), len(node.input.shape) > 1
            if matrix.dim() > 2 and rows and node.input.shape[:-2] == node.shape[:-2]:  # each part of x meets one of the matrices
                return spectral_norm(matrix)
            if matrix.dim() > 2:  # one input against several matrices, as a vector always is
                return root_sum_square(spectral_norm(m) for m in matrix.reshape(-1, *matrix.shape[-2:]))
        if node.op == "mv" and node.input is node.args[1]:
            return spectral_norm(node.args[0].double())
        if adds_its_input(node):
            return Magnitude(above(abs(float(node.kwargs.get("beta", 1))) * math.sqrt(copies(node.input.shape, node.shape))))
        if math.prod(node.input.shape) <= EXACT_SIZE and math.prod(node.input.shape) * math.prod(node.shape) <= 16_000_000:
            matrix = dense_matrix(node)
            several = len(factors(node)) > 1 or "alpha" in node.kwargs  # entries are computed
            if not several:
                return spectral_norm(matrix)
            error = gamma(ConstantProduct().terms(node) + 8) * float(length(dense_matrix(with_absolute_constants(node))))
            return spectral_norm(matrix, error)
        return _constant_norms(node)

    @staticmethod
    def _two_factors(node: Node, context: Context) -> Gain:
        bounds = [context.interval(source) for source in node.inputs]
        norms = _other_norms(node, [bound.sizes for bound in bounds])
        if not all(bound.finite for bound in bounds) or not all(norm.finite for norm in norms):
            return Gain.infinite(node, "a product of two values of which one is unbounded; bound them by a region or a normalizer")
        return Gain.of(*norms, method="product")

    def computed_on_the_way(self, node: Node, context: Context) -> float:
        """Products of several constants may cancel in the gain, but not in the rounding."""
        if len(node.inputs) > 1 or len(factors(node)) < 2:
            return 0.0
        middle = context.center(node.input)
        if middle is None:
            return math.inf
        size = 1.0 if adds_its_input(node) else float(length(middle))
        return _constant_norms(node).ceiling * size

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """Δ(AB) − ÂΔB − ΔA B̂ = (A − Â)ΔB + ΔA (B' − B̂)."""
        away = [context.distances(source) for source in node.inputs]
        if node.op not in TWO_FACTORS or any(part is None for part in away):
            return None
        first, second = _other_norms(node, away)  # type: ignore[arg-type]
        return first.ceiling + UNDERFLOW, second.ceiling + UNDERFLOW

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """The same entry by entry, with absolute values; from the middle (A − Â)(B − B̂)."""
        if node.op not in TWO_FACTORS or len(node.inputs) != 2 or node.inputs[0] is node.inputs[1]:
            return super().remainder(node, context, away, moves)
        absolute, (first, second) = with_absolute_constants(node), node.inputs
        if moves is None:
            entries = absolute.apply(away.entries(first), away.entries(second))
        else:
            entries = absolute.apply(away.entries(first), moves.entries(second))
            entries = entries + absolute.apply(moves.entries(first), away.entries(second))
        entries = entries + summation_error(_most_terms(node), entries)
        return Remainder(torch.ones(node.shape, dtype=torch.float64), entries)

    def interval(self, node: Node, context: Context) -> Interval:
        if len(node.inputs) == 1:
            return propagate(node, context, _most_terms(node))
        if len(node.inputs) == 2 and node.inputs[0] is not node.inputs[1]:
            left, right = (context.interval(source) for source in node.inputs)
            if left.finite and right.finite:
                size = with_absolute_constants(node).apply(left.sizes, right.sizes)
                return Interval.around(torch.zeros_like(size), size + summation_error(_most_terms(node), size))
        return Interval.unbounded(node.shape)

    def linear(self, node: Node) -> bool:
        return len(node.inputs) == 1

    def form(self, node: Node, forms: Forms) -> Form:
        if node.op in ("addmm", "baddbmm", "addmv"):
            bias, *factors = map(forms.of, node.args[:3])
            product = self._product("mv" if node.op == "addmv" else "matmul", factors, node, forms)
            weights = float(node.kwargs.get("alpha", 1)), float(node.kwargs.get("beta", 1))
            return forms.sum(product, bias, coefficients=weights)
        if node.op == "einsum":
            return self._einsum(node, forms)
        if node.op in ("bilinear", "tensordot", "kron"):
            return forms.opaque()
        return self._product(node.op, [forms.of(operand) for operand in node.args[:2]], node, forms)

    @staticmethod
    def _einsum(node: Node, forms: Forms) -> Form:
        equation, operands = node.args[0].replace(" ", ""), node.args[1]
        letters = equation.split("->")[0].split(",")
        plain = "->" in equation and "." not in equation and all(len(set(word)) == len(word) for word in letters)
        if len(operands) != 2 or not plain:
            return forms.opaque()
        return forms.einsum(equation, *map(forms.of, operands))

    @staticmethod
    def _product(op: str, factors: Sequence[Form], node: Node, forms: Forms) -> Form:
        """Any product of two tensors over their last axes, vectors read as matrices with one row or column."""
        a, b = factors
        if op == "outer":
            return forms.einsum("i,j->ij", a, b)
        if op == "inner":
            if len(a.shape) > 4 or not a.shape or not b.shape or len(b.shape) > 2:
                return forms.opaque()
            leading, last = "klm"[: len(a.shape) - 1], "o" * (len(b.shape) - 1)
            return forms.einsum(f"{leading}i,{last}i->{leading}{last}", a, b)
        row, column = len(a.shape) == 1, len(b.shape) == 1
        left = forms.view(a, (1, *a.shape)) if row else a
        right = forms.view(b, (*b.shape, 1)) if column else b
        return forms.view(forms.matmul(left, right), node.shape)
