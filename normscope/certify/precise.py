"""How far the computed value at the middle is from the exact one, by computing it again in about twice float64's precision.

A bound from the sizes of what float64 adds (`certify/kernels.py`) is thousands of times what rounding really does, and every layer
multiplies it by its gain, until no sign of a unit is certain in a deep network. Here a value is v = high + low + e, high and low in
float64, ‖e‖ ≤ error. Gains carry that on as well, but from about 2^-90 of the values. It reaches from the inputs as far as nodes
are products with constants, normalizers with running statistics, sums, ReLUs and the like, and entries that move.

A product is made of exact parts (Ozaki et al. 2012): W = W₁ + W₂ + W₃ and x = x₁ + x₂ + x₃, where the first two of each are whole
numbers of β bits times a power of two, so that a sum of n ≤ 2^(53−2β) products of theirs is exact, in whichever order it is added.
Only W₃x₁₂ + Wx₃, which is 2^-2β as large, is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import torch
from torch.utils._pytree import tree_map_only

from normscope.certify.columns import middle_of, rule_of
from normscope.certify.kernels import linear_map, terms
from normscope.core.rounding import UNDERFLOW, UNIT_ROUNDOFF, above, exponent_of, length, summation_error
from normscope.graph.graph import Constant, Graph, Node
from normscope.rules.affine import without_offset
from normscope.rules.normalizers import channel_tensor
from normscope.rules.readings import Activation, LinearMap, Normalizer, Scaling, Sum
from normscope.rules.registry import Context, registry

FEWEST_BITS = 8  # of a slice, below which products have too many terms to be exact
MOST_EXPONENT = 400  # of 2: sizes beyond it, or below its inverse, may overflow or underflow on the way
LOST = 2.0**-900  # what underflow takes from an entry, at most, within these sizes
SPLITTER = 2.0**27 + 1  # Dekker's: the upper half of a number's digits
DIGITS = 60  # decimal ones, of γ/√(v + ε)


@dataclass(frozen=True)
class Precise:
    """The value at the middle, within `error` in ℓ2 of high + low, |low| ≤ u|high|."""

    high: torch.Tensor
    low: torch.Tensor
    error: float

    def from_computed(self, computed: torch.Tensor) -> float:
        """How far (ℓ2) a computed value is from the exact one."""
        return above(float(length((computed - self.high).abs() + self.low.abs())) + self.error)


class PreciseMiddle:
    """Values at the middle, node by node in topological order: each is kept until its last reader has had its turn."""

    def __init__(self, graph: Graph) -> None:
        self.errors: dict[Node, float | None] = {}
        self._values: dict[Node, Precise] = {}
        self._last_reader = {source: node for node in graph.nodes for source in node.inputs}

    def error(self, node: Node, facts: Context) -> float | None:
        """How far (ℓ2) the computed value at the middle is from the exact one, or None where that is not known so precisely."""
        if node not in self.errors:
            with torch.no_grad():
                self.errors[node] = self._found(node, facts)
        return self.errors[node]

    def _found(self, node: Node, facts: Context) -> float | None:
        computed, made = middle_of(facts, node), None
        if node.is_input:
            made = Precise(computed, torch.zeros_like(computed), 0.0)
        elif all(source in self._values for source in node.inputs):
            made = _precise(node, [self._values[source] for source in node.inputs], facts)
        for source in set(node.inputs):
            if self._last_reader[source] is node:
                self._values.pop(source, None)
        if made is None or not math.isfinite(error := made.from_computed(computed)):
            return None
        self._values[node] = made
        return error


def _precise(node: Node, values: Sequence[Precise], facts: Context) -> Precise | None:
    """The value of a node from those it reads, or None where it is not known so precisely."""
    rule, product = rule_of(node), linear_map(node)
    sizes = [float(value.high.abs().max()) if value.high.numel() else 0.0 for value in values]
    if node.is_foreign or not all(size == 0 or 2.0**-MOST_EXPONENT < size < 2.0**MOST_EXPONENT for size in sizes):
        return None
    if product is not None:
        made = _product(node, product, values[0])
    elif rule.linear(node) and not rule.terms(node):
        made = _moved(node, values)
    else:
        made = _normalized(node, values) or _scaled(node, values) or _sum(node, values) or _cut_off(node, values[0])
    if made is None:
        return None
    factors = facts.gain(node).factors
    carried = sum(factor.ceiling * value.error for factor, value in zip(factors, values, strict=True) if value.error)
    return Precise(made.high, made.low, above(carried + made.error))


def _product(node: Node, product: LinearMap, value: Precise) -> Precise | None:
    weight, count = product.weight, terms(product)
    bits = (53 - math.ceil(math.log2(count + 1))) // 2
    if not isinstance(weight, Constant) or sum(one is weight for one in node.constants) != 1 or bits < FEWEST_BITS:
        return None
    plain = without_offset(node)
    stored = weight.double()
    if abs(exponent_of(stored)) > MOST_EXPONENT:
        return None

    def times(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        args = tree_map_only(Constant, lambda one: Constant(matrix, one.sources) if one is weight else one, plain.args)
        made = Node(node.name, node.op, node.target, args, node.kwargs, node.path, node.source, node.shape, node.dtype)
        return made.apply(x)

    (first, second, rest), (upper, lower, away) = _sliced(stored, bits), _sliced(value.high, bits)
    exact = [times(one, other) for one in (first, second) for other in (upper, lower)]
    step = 2.0 ** (exponent_of(stored) + exponent_of(value.high) - 4 * bits)
    if any(bool((part.remainder(step) != 0).any()) for part in exact):  # the kernel does more than multiply and add
        return None
    rounded = times(stored, away + value.low) + times(rest, upper + lower)
    size = times(stored.abs(), away.abs() + value.low.abs()) + times(rest.abs(), (upper + lower).abs())
    offset = node.apply(torch.zeros_like(value.high))
    return _added([*exact, offset, rounded], summation_error(2 * count + 16, size))


def _sliced(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three tensors whose sum is `values`: multiples of 2^(e−bits) and of 2^(e−2·bits), e the exponent of all, and the rest."""
    exponent = exponent_of(values)
    first = _rounded(values, bits - exponent)
    second = _rounded(values - first, 2 * bits - exponent)
    return first, second, values - first - second


def _rounded(values: torch.Tensor, places: int) -> torch.Tensor:
    return (values * 2.0**places).round() * 2.0**-places


def _moved(node: Node, values: Sequence[Precise]) -> Precise:
    """Entries that move, are left out or repeated, and constants beside them."""
    distinct = dict(zip(node.inputs, values, strict=True)).values()
    high, low, beside = (
        node.apply(*parts)
        for parts in (
            [value.high for value in distinct],
            [value.low for value in distinct],
            [torch.zeros_like(value.high) for value in distinct],
        )
    )
    return Precise(high, low - beside, 0.0)


def _normalized(node: Node, values: Sequence[Precise]) -> Precise | None:
    """s ⊙ x + t, s = γ/√(v + ε) and t = β − s μ of a normalizer with running statistics."""
    normalizer = registry.reading(node, Normalizer)
    if normalizer is None or not normalizer.fixed or len(values) != 1:
        return None
    scale, shift = _channels(normalizer)
    (scale, scale_rest), (shift, shift_rest) = (
        [channel_tensor(node, normalizer, part, 0.0) for part in pair] for pair in (scale, shift)
    )
    if not bool((scale.abs() < 2.0**MOST_EXPONENT).all() and (shift.abs() < 2.0**MOST_EXPONENT).all()):
        return None
    parts = [*_multiplied(scale, values[0]), scale_rest * values[0].high, shift, shift_rest]
    # two products of halves that round, one that is left out, and what 60 digits leave of s and t, which is relative to β and s μ
    sizes = parts[0].abs() + shift.abs() + channel_tensor(node, normalizer, normalizer.bias, 0.0).abs()
    return _added(parts, 8 * UNIT_ROUNDOFF**2 * sizes)


def _scaled(node: Node, values: Sequence[Precise]) -> Precise | None:
    """A constant times x."""
    reading = registry.reading(node, Scaling)
    if reading is None or len(values) != 1 or isinstance(reading.factor, Node):
        return None
    given = reading.factor.double() if isinstance(reading.factor, Constant) else torch.tensor(reading.factor, dtype=torch.float64)
    if not bool((given.abs() < 2.0**MOST_EXPONENT).all()):
        return None
    (value,) = values
    whole = Precise(value.high.expand(node.shape), value.low.expand(node.shape), value.error)
    parts = _multiplied(given.expand(node.shape), whole)
    return _added(parts, 2 * UNIT_ROUNDOFF**2 * parts[0].abs())


def _multiplied(factor: torch.Tensor, value: Precise) -> list[torch.Tensor]:
    """factor ⊙ (high + low) as a sum: the first two parts are exact, the last one, u as large, is rounded."""
    return [*_two_product(factor, value.high), factor * value.low]


def _channels(normalizer: Normalizer) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """s and t of each channel, in two numbers each."""
    assert normalizer.running_mean is not None and normalizer.running_variance is not None
    count, none = len(normalizer.running_variance), Decimal(0)
    mean, variance = normalizer.running_mean.tolist(), normalizer.running_variance.tolist()
    gamma = [1.0] * count if normalizer.weight is None else normalizer.weight.tolist()
    beta = [0.0] * count if normalizer.bias is None else normalizer.bias.tolist()
    scales, shifts = [], []
    with localcontext() as context:
        context.prec = DIGITS
        for place in range(count):
            spread = Decimal(variance[place]) + Decimal(normalizer.epsilon)
            scale = Decimal(gamma[place]) / spread.sqrt() if spread > none else Decimal("NaN")
            scales.append(scale)
            shifts.append(Decimal(beta[place]) - scale * Decimal(mean[place]))
        return _halves(scales), _halves(shifts)


def _halves(numbers: Sequence[Decimal]) -> tuple[torch.Tensor, torch.Tensor]:
    high = [float(number) for number in numbers]
    low = [float(number - Decimal(part)) for number, part in zip(numbers, high, strict=True)]
    return torch.tensor(high, dtype=torch.float64), torch.tensor(low, dtype=torch.float64)


def _sum(node: Node, values: Sequence[Precise]) -> Precise | None:
    """Of two nodes, or of a node and a constant."""
    reading = registry.reading(node, Sum)
    if reading is None or not reading.plain:
        return None
    parts = [part.expand(node.shape) for value in values for part in (value.high, value.low)]
    if len(values) == 1:
        parts.append(node.apply(torch.zeros_like(values[0].high)))
    return _added(parts, torch.zeros(node.shape, dtype=torch.float64))


def _cut_off(node: Node, value: Precise) -> Precise | None:
    """max(x, s x), or an entrywise function that is constant or x itself around every entry, as clamps are."""
    reading, rule = registry.reading(node, Activation), rule_of(node)
    scalar = None if reading is None or reading.scalar is None else reading.scalar()
    if reading is None or scalar is None or scalar.rounding:
        return None
    if reading.relu_like:
        slope = -scalar.value(-torch.ones((), dtype=torch.float64)).expand(node.shape)
        parts = _multiplied(torch.where(value.high > 0, 1.0, slope), value)
        return _added(parts, 2 * UNIT_ROUNDOFF**2 * parts[0].abs()) if bool((slope.abs() < 2.0**MOST_EXPONENT).all()) else None
    if rule.slopes(node) != (0.0, 1.0):
        return None
    if any(float(scalar.value(torch.tensor(place, dtype=torch.float64))) != place for place, *_ in scalar.turns):
        return None  # where it is not constant it is x less something, as softshrink is
    up, down = (torch.nextafter(value.high, torch.full_like(value.high, side)) for side in (math.inf, -math.inf))
    above_it, made, below_it = (node.apply(part) for part in (up, value.high, down))
    same, constant = (above_it == up) & (below_it == down), above_it == below_it
    if not bool((same | constant | ((value.low == 0) & (made == value.high))).all()):
        return None
    return Precise(made, torch.where(same, value.low, 0.0), 0.0)


def _added(parts: Sequence[torch.Tensor], error: torch.Tensor) -> Precise:
    """Their sum in two numbers, whatever is lost of each addition being added up beside it (Ogita, Rump and Oishi 2005).

    error: of the parts themselves, entry by entry. What is lost is at most u Σ|parts| each time, and rounded once more.
    """
    high, low, size = parts[0], torch.zeros_like(parts[0]), parts[0].abs()
    for part in parts[1:]:
        high, lost = _two_sum(high, part)
        low, size = low + lost, size + part.abs()
    high, low = _two_sum(high, low)
    summed = 4 * len(parts) ** 2 * UNIT_ROUNDOFF**2 * size
    return Precise(high, low, float(length(above(error + summed) + LOST)) + UNDERFLOW)


def _two_sum(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum, and what it lacks (Knuth)."""
    made = first + second
    part = made - first
    return made, (first - (made - part)) + (second - part)


def _two_product(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded product, and what it lacks (Dekker)."""
    made = first * second
    (upper, lower), (high, low) = _split(first), _split(second)
    return made, ((upper * high - made) + upper * low + lower * high) + lower * low


def _split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = SPLITTER * values
    upper = scaled - (scaled - values)
    return upper, values - upper
