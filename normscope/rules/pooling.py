"""Max pooling, norms and order statistics; averages are in averages.py."""

from __future__ import annotations

import math

import torch

from normscope.core.interval import ROUNDOFF, Interval
from normscope.core.magnitude import Magnitude
from normscope.core.rounding import FEW, LARGEST, UNDERFLOW, above, gamma, root, root_of_powers_error
from normscope.graph.graph import Constant, Node
from normscope.graph.patterns.normalizers import bessel_correction
from normscope.rules.algebra import Form, Forms
from normscope.rules.convolution import _per_axis
from normscope.rules.registry import Context, Gain, Rule, rule
from normscope.rules.remainder import LinearPart, Multiples, Remainder, Sizes
from normscope.rules.shape import on_both_sides, reduced


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
class MaxPool(Rule):
    """|Δmax| ≤ ‖Δ‖ on each window, so the gain is √ of how many windows share an entry."""

    def terms(self, node: Node) -> float:
        return math.prod(_per_axis(node.args[1], 1))  # nothing is added, but for a mean of those that may win

    def gain(self, node: Node, context: Context) -> Gain:
        axes = int(next(character for character in node.op if character.isdigit()))
        kernel = _per_axis(node.args[1], axes)
        stride = _per_axis(node.argument(2, "stride") or kernel, axes)
        padding, dilation = (_per_axis(node.argument(i, name, d), axes) for i, name, d in ((3, "padding", 0), (4, "dilation", 1)))
        ceil_mode = bool(node.argument(5, "ceil_mode", False))
        reuse = 1
        for n, k, s, p, d in zip(node.input.shape[-axes:], kernel, stride, padding, dilation, strict=True):
            reach = d * (k - 1) + 1
            windows = (n + 2 * p - reach + (s - 1 if ceil_mode else 0)) // s + 1
            reads = torch.arange(windows)[:, None] * s - p + d * torch.arange(k)[None, :]
            inside = reads[(reads >= 0) & (reads < n)]
            reuse *= int(torch.bincount(inside).max()) if inside.numel() else 1
        return Gain.of(math.sqrt(reuse), method="windows")

    def linear_part(self, node: Node, context: Context, away: Sizes | None) -> LinearPart | None:
        """Between any two points the mean of those that may win."""
        found = None if away is None else self._candidates(node, context, away)
        if found is None:
            return None
        windows, _, wins, _ = found
        share = wins / wins.sum(-1, keepdim=True)

        def mean(columns: torch.Tensor) -> torch.Tensor:
            flat = torch.nn.functional.pad(columns.reshape(len(columns), -1), (0, 1))
            taps = [flat[:, windows[:, tap]] * share[:, tap] for tap in range(windows.shape[1])]
            return torch.stack(taps).sum(0).reshape(-1, *node.shape)

        return mean

    def multiples(self, node: Node, context: Context, away: Sizes, chords: bool) -> Multiples | None:
        """Of two entries that may win: max(a, b) = (a + b)/2 + |a − b|/2, or a + (b − a)⁺ where a wins at the middle."""
        found = self._candidates(node, context, away)
        if found is None:
            return None
        windows, _, wins, first = found
        two = wins.sum(-1) == 2
        order = wins.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :2]
        places, winner = windows.gather(1, order), first.gather(1, order)
        inside = places < math.prod(node.input.shape)
        places = torch.where(inside, places, 0)
        weights = torch.tensor([0.5, -0.5], dtype=torch.float64)[: places.shape[1]] * (two[:, None] & inside)
        most = torch.ones(len(places), dtype=torch.float64)
        least = -most
        if not chords:
            weights, sure = 2 * weights, winner.sum(-1) == 1  # of two winners torch may take either
            weights = torch.where((sure & winner[:, 0])[:, None], -weights, weights)
            least = torch.where(sure, 0.0, least)
        return Multiples(places, weights, two, least, most)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """From the middle, where its winner w at the middle is the linear part, max_j (y_j − y_w)⁺.

        Between two points: the change is a mean of Δy_j over those that may win, and the linear part Δy_w, or with chords another
        mean, with weights 1/n.
        """
        found = self._candidates(node, context, away)
        if found is None:
            return None
        windows, overtakes, wins, first = found
        if moves is None:
            entries = overtakes.amax(-1).clamp(min=0)
        else:
            moved = torch.nn.functional.pad(moves.entries(node.input).reshape(-1), (0, 1))[windows] * wins
            count = wins.sum(-1, keepdim=True)
            if moves.chords:
                entries = ((1 - 2 / count) * moved + moved.sum(-1, keepdim=True) / count).masked_fill(~wins, 0.0).amax(-1)
            else:  # those that overtake the winner, or any of several, and the winner itself
                sure = first & (first.sum(-1, keepdim=True) == 1)
                entries = moved.masked_fill(sure, 0.0).amax(-1) + (moved * first).amax(-1)
            entries = torch.where(count[:, 0] > 1, entries, 0.0)
        return Remainder(torch.ones(node.shape, dtype=torch.float64), above(entries).reshape(node.shape))

    def _candidates(
        self, node: Node, context: Context, away: Sizes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """For every window its places, by how much each may overtake the winner at the middle, which may win, and which does."""
        middle, windows = context.center(node.input), self._windows(node)
        if middle is None or windows is None:
            return None
        outside = torch.tensor([-math.inf], dtype=torch.float64)
        values = torch.cat([middle.reshape(-1), outside])[windows]
        reach = torch.cat([away.entries(node.input).reshape(-1), outside.new_zeros(1)])[windows]
        top = values.amax(-1, keepdim=True)
        first = values == top  # torch may take any of those
        slack = ROUNDOFF * top.abs()
        overtakes = values + reach - top + torch.where(first, reach, 0.0).amax(-1, keepdim=True) + slack
        overtakes = overtakes.masked_fill(first & (first.sum(-1, keepdim=True) == 1), -math.inf)
        surpassed = values + reach + slack < (values - reach).amax(-1, keepdim=True)
        return windows, overtakes, ~surpassed & values.isfinite(), first

    @staticmethod
    def _windows(node: Node) -> torch.Tensor | None:
        """For every output entry the places of the entries that it is the largest of; the last place is outside."""
        axes = int(next(character for character in node.op if character.isdigit()))
        if axes > 2 or node.op.endswith("indices") or bool(node.argument(5, "ceil_mode", False)):
            return None
        kernel = _per_axis(node.args[1], axes)
        stride = _per_axis(node.argument(2, "stride") or kernel, axes)
        padding, dilation = (_per_axis(node.argument(i, name, d), axes) for i, name, d in ((3, "padding", 0), (4, "dilation", 1)))
        kernel, stride, dilation = ([1] * (2 - axes) + list(part) for part in (kernel, stride, dilation))
        padding = [0] * (2 - axes) + list(padding)
        count, shape = math.prod(node.input.shape), node.input.shape
        rows = shape[-2] if axes == 2 else 1
        places = torch.arange(1, count + 1, dtype=torch.float64).reshape(-1, 1, rows, shape[-1])  # 0 is outside
        cut = torch.nn.functional.unfold(places, kernel, dilation, padding, stride).long() - 1  # (maps, taps, windows)
        return torch.where(cut < 0, count, cut).transpose(1, 2).reshape(-1, cut.shape[1])

    def interval(self, node: Node, context: Context) -> Interval:
        if node.op.endswith("indices"):
            return Interval.unbounded(node.shape)
        return context.interval(node.input).map(node.apply)

    def form(self, node: Node, forms: Forms) -> Form:
        return pooled(node, forms, int(next(character for character in node.op if character.isdigit())))


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
class AdaptiveMaxPool(Rule):
    """Windows from ⌊i n/m⌋ to ⌈(i+1) n/m⌉ along each axis; they overlap where m does not divide n."""

    def gain(self, node: Node, context: Context) -> Gain:
        axes = int(node.op[-2])
        outputs = _per_axis(node.args[1], axes)
        reuse = 1
        for n, m in zip(node.input.shape[-axes:], outputs, strict=True):
            covered = torch.zeros(n, dtype=torch.long)
            for i in range(m):
                covered[i * n // m : -(-(i + 1) * n // m)] += 1
            reuse *= int(covered.max())
        return Gain.of(math.sqrt(reuse), method="windows")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.unbounded(node.shape) if node.dtype is None else context.interval(node.input).map(node.apply)

    def form(self, node: Node, forms: Forms) -> Form:
        return pooled(node, forms, int(node.op[-2]))


@rule(
    "max",
    "min",
    "amax",
    "amin",
    "aminmax",
    "sort",
    "msort",
    "topk",
    "median",
    "nanmedian",
    "kthvalue",
    "cummax",
    "cummin",
    "logcumsumexp",
)
class OrderStatistic(Rule):
    """The sorted values move no farther than the entries: each of these keeps a part of them (1-Lipschitz)."""

    def gain(self, node: Node, context: Context) -> Gain:
        if self._of_two(node):
            return Gain.of(*(math.sqrt(_broadcast(source, node)) for source in node.inputs), method="max", separate=True)
        if node.op in ("cummax", "cummin", "logcumsumexp"):  # of n results each is 1-Lipschitz
            return Gain.of(root(max(node.input.shape, default=1)), method="repeats")
        axis = node.kwargs.get("dim")
        shape = node.input.shape
        if node.op == "aminmax" and (math.prod(shape) if axis is None or not shape else shape[axis]) == 1:
            return Gain.of(root(2), method="repeats")  # the least may be the largest
        return Gain.of(1, method="sorting")

    def interval(self, node: Node, context: Context) -> Interval:
        """Each sorted value increases with every entry."""
        unknown = node.dtype is None or node.op == "logcumsumexp"
        return Interval.unbounded(node.shape) if unknown else on_both_sides(node, context)

    @staticmethod
    def _of_two(node: Node) -> bool:
        """Whether it compares two tensors entry by entry."""
        return len(node.args) > 1 and isinstance(node.args[1], (Node, Constant))

    def form(self, node: Node, forms: Forms) -> Form:
        if self._of_two(node):
            return forms.entrywise(forms.sum(*map(forms.of, node.args[:2])))
        return reduced(node, forms, linear=False)


@rule("maximum", "minimum", "fmax", "fmin")
class Extremum(Rule):
    """|Δ max(a, b)| ≤ max(|Δa|, |Δb|) entry by entry."""

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.of(*(math.sqrt(_broadcast(source, node)) for source in node.inputs), method="max", separate=True)

    def interval(self, node: Node, context: Context) -> Interval:
        return on_both_sides(node, context)

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.entrywise(forms.sum(*map(forms.of, node.args[:2])))


def pooled(node: Node, forms: Forms, axes: int) -> Form:
    """A maximum over windows of the last axes."""
    x = forms.of(node.input)
    shape = (*x.shape[:-axes], *_output_size(node)[-axes:])
    return forms.mixed(x, range(-axes, 0), shape, shape, linear=False)


def _output_size(node: Node) -> tuple[int, ...]:
    """The shape of a node's (first) output, found by running it where it has several."""
    if node.shape:
        return node.shape
    return tuple(node.apply(torch.zeros(node.input.shape, dtype=torch.float64))[0].shape)


def _broadcast(source: Node, node: Node) -> float:
    return max(1.0, math.prod(node.shape) / max(math.prod(source.shape), 1))


@rule("linalg_vector_norm", "norm")
class VectorNorm(Rule):
    """‖x‖_p is 1-Lipschitz in ℓ2 for p ≥ 2, n^(1/p − 1/2)-Lipschitz for 1 ≤ p < 2; min|x| (p = −∞) is 1-Lipschitz."""

    def gain(self, node: Node, context: Context) -> Gain:
        order = self._order(node)
        if order == -math.inf:
            return Gain.of(1, method="min")
        if not isinstance(order, (int, float)) or not order >= 0:
            return Gain.infinite(node, f"the {order}-norm is not Lipschitz")
        if order == 0:
            return Gain.infinite(node, "the 0-norm counts entries: it jumps, so no finite constant exists")
        entries = math.prod(node.input.shape) / max(math.prod(node.shape), 1)
        if order < 1 < entries:
            return Gain.infinite(node, f"the {order:g}-norm of several entries is not Lipschitz: its slope is unbounded near 0")
        factor = 1.0 if order >= 2 or entries <= 1 else entries ** (1 / order - 0.5)
        return Gain.of(above(factor), method="norm")

    @staticmethod
    def _order(node: Node) -> object:
        order = node.argument(1, "ord" if node.op == "linalg_vector_norm" else "p")
        return 2.0 if order is None or order == "fro" else order

    def interval(self, node: Node, context: Context) -> Interval:
        """‖x‖_p ≤ n^(1/p) max|x|."""
        order = self._order(node)
        size = context.interval(node.input).magnitude
        if not isinstance(order, (int, float)) or not order >= 1 or math.isinf(size):
            return Interval.constant(0.0, math.inf, node.shape)
        entries = math.prod(node.input.shape) / max(math.prod(node.shape), 1)
        return Interval.constant(0.0, above(size * entries ** (1 / order)) + UNDERFLOW, node.shape)

    def center_error(self, node: Node, context: Context) -> float:
        order, value = self._order(node), context.center(node)
        if value is None or not isinstance(order, (int, float)):
            return super().center_error(node, context)
        return super().center_error(node, context) + root_of_powers_error(order, self.terms(node), value)

    def form(self, node: Node, forms: Forms) -> Form:
        """‖c x‖_p = c ‖x‖_p for every p but 0, which counts the entries that are not 0."""
        order = self._order(node)
        if isinstance(order, str):
            return forms.opaque()
        norm = reduced(node, forms, linear=False, constants=False, position=2)
        return forms.entrywise(norm, 0.0) if order == 0 else norm


@rule("quantile", "nanquantile")
class Quantile(Rule):
    """A mean of two neighbours among the sorted values: it moves no farther than the entry that moves farthest."""

    first_alone = "which quantile it takes depends on the input"

    def gain(self, node: Node, context: Context) -> Gain:
        count = node.args[1].value.numel() if isinstance(node.args[1], Constant) else 1
        return Gain.of(root(count), method="sorting")

    def interval(self, node: Node, context: Context) -> Interval:
        """It increases with every entry. a + w (b − a) is rounded like its terms, and w as the rank in n entries is."""
        size = context.interval(node.input).magnitude
        if not size < LARGEST / 4:
            return Interval.unbounded(node.shape)
        axis, shape = node.argument(2, "dim"), node.input.shape
        entries = math.prod(shape) if axis is None else shape[axis] if shape else 1
        lost = above(size * gamma(4 * (entries + FEW))) + FEW * UNDERFLOW
        return on_both_sides(node, context) + Interval.constant(-lost, lost, ())

    def form(self, node: Node, forms: Forms) -> Form:
        single = isinstance(node.args[1], float)
        return reduced(node, forms, linear=False, position=2) if single else forms.opaque()


@rule("std", "var")
class Spread(Rule):
    """std = ‖x − mean‖/√(n − correction) is 1/√(n − correction)-Lipschitz; var grows like a square."""

    def gain(self, node: Node, context: Context) -> Gain:
        entries = math.prod(node.input.shape) // max(math.prod(node.shape), 1)
        if entries <= bessel_correction(node):
            return Gain.infinite(node, "it divides by a count that its correction makes 0 or less")
        scale = 1 / math.sqrt(entries - bessel_correction(node))
        if node.op == "std":
            return Gain.of(above(scale), method="norm")
        size = context.interval(node.input).magnitude
        if math.isinf(size):
            return Gain.infinite(node, "a variance grows like a square; bound the values by a region")
        return Gain.of(Magnitude(size) * above(2 * math.sqrt(entries) * scale**2), method="square")

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(0.0, math.inf, node.shape)

    def center_error(self, node: Node, context: Context) -> float:
        value, found = context.center(node), super().center_error(node, context)
        return found if value is None or node.op == "var" else found + root_of_powers_error(2, self.terms(node), value)

    def form(self, node: Node, forms: Forms) -> Form:
        spread = reduced(node, forms, linear=False, constants=False)
        return spread if node.op == "std" else forms.entrywise(spread, 2.0)
