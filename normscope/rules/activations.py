"""Activations, entry by entry; elementary functions are in elementary.py, those that jump in jumps.py, softmax in softmax.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as functional

from normscope.core.interval import Interval
from normscope.core.rounding import FEW, FUNCTION, UNDERFLOW, above
from normscope.graph.graph import Constant, Node
from normscope.rules.algebra import Form, Forms
from normscope.rules.readings import Activation, Random
from normscope.rules.registry import Context, Gain, Rule, register, rule
from normscope.rules.remainder import LinearPart, Multiples, Remainder, Sets, Sizes
from normscope.rules.scalars import (
    OVERFLOWN,
    SATURATED,
    UNBOUNDED,
    Scalar,
    clamped,
    exact_gelu,
    logistic,
    piecewise_linear,
    relu_with_slope,
    sigmoid_gate,
    smooth,
    tanh_gelu,
)

STEPS = 8  # in which an interval grows from the middle, for the mean of what a slope misses
KINKED = ("relu", "leaky_relu", "prelu", "abs")  # whose slope jumps at zero
USUAL = (
    "relu", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish",
    "sigmoid", "log_sigmoid", "hardsigmoid", "tanh", "hardtanh", "softplus",
)  # fmt: skip


class Entrywise(Rule):
    """y_i = φ(x_i): the gain is the largest |slope| that the values of x allow."""

    def __init__(self, scalar: Scalar | Callable[[Node], Scalar]) -> None:
        self.scalar: Callable[[Node], Scalar] = (lambda node: scalar) if isinstance(scalar, Scalar) else scalar

    def reading(self, node: Node) -> Activation:
        return Activation(node.op in KINKED, node.op in ("relu", "leaky_relu"), node.op in USUAL, lambda: self.scalar(node))

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scalar(node).slopes(bounds.low, bounds.high)

    def slopes(self, node: Node) -> tuple[float, float]:
        low, high = self.slopes_on(node, Interval.unbounded(()))
        return float(low.min()), float(high.max())

    def gain(self, node: Node, context: Context) -> Gain:
        least, largest = self.slopes(node)
        if context.local or not math.isfinite(max(-least, largest)):  # else the values cannot matter
            low, high = self.slopes_on(node, context.interval(node.input))
            least, largest = float(low.min()), float(high.max())
        steepest = max(-least, largest)
        if math.isinf(steepest):
            return Gain.infinite(node, self.unbounded(node))
        return Gain.of(steepest, method="slope")

    def chord(self, node: Node, context: Context, away: Sizes | None) -> torch.Tensor | None:
        """The middle of the slopes within `away` of the middle: the linear part. None where slopes are not known per entry.

        Of values that can reach the node alone, so that it is no steeper than the gain, by which what is left over is carried on.
        """
        middle = context.center(node.input) if len(node.inputs) == 1 and node.input.shape == node.shape else None
        if middle is None:
            return None
        if away is None:
            low, high = self._slopes_around(node, Interval.around(middle, torch.zeros_like(middle)))
        else:
            low, high = self._slopes_around(node, self._reached(node, middle, away, context))
        return (low + high) / 2 if low.shape == node.shape and bool((low.isfinite() & high.isfinite()).all()) else None

    def linear_part(self, node: Node, context: Context, away: Sizes | None) -> LinearPart | None:
        slope = self.chord(node, context, away)
        if slope is None:
            return None
        return lambda columns: columns * slope

    def multiples(self, node: Node, context: Context, away: Sizes, chords: bool) -> Multiples | None:
        chord, middle = self.chord(node, context, away if chords else None), context.center(node.inputs[0])
        if chord is None or middle is None:
            return None
        places = torch.arange(math.prod(node.shape))
        most = torch.ones(len(places), dtype=torch.float64)
        least = -most
        if not chords:
            low, high = self._slopes_around(node, self._reached(node, middle, away, context))
            missed = torch.maximum(high - chord, chord - low)
            some = missed > 0
            least, most = (
                torch.where(some, (slope - chord) / missed, 0.0).nan_to_num(0.0).clamp(-1, 1).reshape(-1) for slope in (low, high)
            )
        return Multiples(places[:, None], torch.ones(len(places), 1, dtype=torch.float64), most.isfinite(), least, most)

    @staticmethod
    def _reached(node: Node, middle: torch.Tensor, away: Sizes, context: Context) -> Interval:
        return Interval.around(middle, away.entries(node.input)).within(context.interval(node.input))

    def _slopes_around(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self.slopes_on(node, bounds)
        return (low.expand(node.shape), high.expand(node.shape)) if low.numel() == 1 else (low, high)

    def measured(self, node: Node) -> tuple[tuple[Sets, ...], ...]:
        alone = len(node.inputs) == 1 and node.input.shape == node.shape
        return ((Sets.along(node.shape, (-1,)),),) if alone and len(node.shape) == 3 else super().measured(node)

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """φ(y) − φ(y') − c (y − y') is at most sup|φ' − c| |y − y'|; from the middle, the mean of that over growing intervals."""
        chord = self.chord(node, context, away if moves is not None and moves.chords else None)
        middle = context.center(node.inputs[0])
        if middle is None or chord is None:
            return None
        reach = away.entries(node.input)
        nothing = torch.zeros_like(reach)
        steps = range(1, STEPS + 1) if moves is None else (STEPS,)
        missed, possible = nothing, context.interval(node.input)  # which the middle is in; no slope beyond it counts
        for step in steps:
            low, high = self._slopes_around(node, Interval.around(middle, reach * (step / STEPS)).within(possible))
            missed = missed + torch.maximum(high - chord, chord - low) / len(steps)
        missed = above(missed.clamp(min=0), 2 * STEPS + FEW)
        sizes, sets = away if moves is None else moves, next(iter(self.measured(node)[0]), None)
        return Remainder(missed, sizes.entries(node.input), None if sets is None else (sets, sizes.sets(node.input, sets)))

    def tokenwise(self, node: Node) -> bool:
        return all(source.shape == node.shape for source in node.inputs)

    def unbounded(self, node: Node) -> str:
        """Why the slope has no bound."""
        return "its slope is unbounded on the values that may reach it; bound them by a region"

    def terms(self, node: Node) -> float:
        return 1

    def computed_on_the_way(self, node: Node, context: Context) -> float:
        """Values of the size of x, which may cancel: GELU's 1 + erf(x) at x ≪ 0 is all rounding."""
        middles = [context.center(source) for source in node.inputs]
        return sum(math.inf if middle is None else float(torch.linalg.vector_norm(middle)) for middle in middles)

    def interval(self, node: Node, context: Context) -> Interval:
        return self.scalar(node).range(context.interval(node.input))

    def form(self, node: Node, forms: Forms) -> Form:
        power = homogeneity(node)
        return forms.opaque() if power is None else forms.entrywise(forms.of(node.input), power, odd_linear=node.op == "neg")

    def norm(self, node: Node, context: Context) -> float:
        """|φ(x)| ≤ |φ(0)| + steepest · |x|."""
        least, largest = self.slopes(node)
        at_zero = abs(float(self.scalar(node).value(torch.zeros((), dtype=torch.float64))))  # NaN for 1/x: then nothing is known
        size = max(-least, largest) * context.norm(node.input) + at_zero * math.sqrt(node.shape[-1] if node.shape else 1)
        return above(size, FEW + FUNCTION) + UNDERFLOW


def homogeneity(node: Node) -> float | None:
    """The power p of a function with φ(c x) = c^p φ(x) for all c > 0, or None."""
    if len(node.inputs) != 1 or node.input is not node.args[0]:
        return None
    if node.op in ("relu", "leaky_relu", "rrelu", "prelu", "abs", "neg"):
        return 1.0
    if node.op in ("square", "sqrt", "rsqrt", "reciprocal"):
        return {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}[node.op]
    if node.op == "pow":
        return None if isinstance(node.args[1], Constant) and node.args[1].value.numel() > 1 else number(node.args[1], 1.0)
    if node.op in ("clamp", "clamp_min", "clamp_max", "hardtanh", "threshold"):
        limits = [limit for limit in (*node.args[1:3], *node.kwargs.values()) if limit is not None]
        plain = all(not isinstance(limit, Constant) or limit.value.numel() == 1 for limit in limits)
        return 1.0 if plain and all(number(limit, 0.0) in (0.0, math.inf, -math.inf) for limit in limits) else None
    return 0.0 if node.op in ("sign", "sgn", "heaviside") else None


class ParametricReLU(Entrywise):
    """prelu(x)_c = max(x, 0) + w_c min(x, 0)."""

    def __init__(self) -> None:
        super().__init__(relu_with_slope(0.0))

    def reading(self, node: Node) -> Activation:
        return replace(super().reading(node), scalar=None)  # each channel has a function of its own

    def form(self, node: Node, forms: Forms) -> Form:
        """Homogeneous in x, while every slope must stay as it is."""
        x, slopes = map(forms.of, node.args[:2])
        channels = (1, *slopes.shape, *[1] * (len(x.shape) - 2)) if len(x.shape) > 1 else slopes.shape
        return forms.entrywise(forms.product(x, forms.opaque_of(forms.view(slopes, channels))))

    def gain(self, node: Node, context: Context) -> Gain:
        if not isinstance(node.args[1], Constant):
            return Gain.infinite(node, "its slope depends on the input")
        return super().gain(node, context)

    def norm(self, node: Node, context: Context) -> float:
        return super().norm(node, context) if isinstance(node.args[1], Constant) else math.inf

    def _negative_slopes(self, node: Node, shape: Sequence[int]) -> torch.Tensor:
        weight = node.args[1].double()
        return weight.reshape(-1, *(1 for _ in shape[2:])) if len(shape) > 1 else weight

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(node.args[1], Constant):  # nothing is known about what may be the only input, of one entry like x
            return torch.full(bounds.shape, -math.inf, dtype=torch.float64), torch.full(bounds.shape, math.inf, dtype=torch.float64)
        weight = self._negative_slopes(node, bounds.shape if bounds.shape else ()).flatten()
        return torch.minimum(weight, torch.ones(())), torch.maximum(weight, torch.ones(()))

    def interval(self, node: Node, context: Context) -> Interval:
        if not isinstance(node.args[1], Constant):
            return Interval.unbounded(node.shape)
        bounds = context.interval(node.input)
        weight = self._negative_slopes(node, node.shape)
        below = Interval(bounds.low.clamp(max=0), bounds.high.clamp(max=0)) * Interval(weight, weight)
        return below + Interval(bounds.low.clamp(min=0), bounds.high.clamp(min=0))


def number(value: object, default: float) -> float:
    if value is None:
        return default
    return float(value.value) if isinstance(value, Constant) else float(value)  # type: ignore[arg-type]


def _clamp(node: Node) -> Scalar:
    if node.op == "clamp_min":
        return clamped(number(node.args[1], -math.inf), math.inf)
    if node.op == "clamp_max":
        return clamped(-math.inf, number(node.args[1], math.inf))
    return clamped(number(node.argument(1, "min"), -math.inf), number(node.argument(2, "max"), math.inf))


def _elu(node: Node) -> Scalar:
    if node.op == "selu":
        alpha, scale, inner = 1.6732632423543772, 1.0507009873554805, 1.0
    elif node.op == "celu":
        alpha = number(node.argument(1, "alpha"), 1.0)
        scale, inner = 1.0, 1 / alpha
    else:
        alpha = number(node.argument(1, "alpha"), 1.0)
        scale, inner = number(node.argument(2, "scale"), 1.0), number(node.argument(3, "input_scale"), 1.0)

    if inner <= 0:  # it grows like e^|x|
        return UNBOUNDED

    def value(x: torch.Tensor) -> torch.Tensor:
        return scale * torch.where(x > 0, x, alpha * torch.expm1(inner * x.clamp(max=0)))

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, scale * torch.ones_like(x), scale * alpha * inner * torch.exp(inner * x.clamp(max=0)))

    return Scalar(
        value, slope, turns=[(0.0, scale * alpha * inner, scale)], extrema=[0.0],
        ends=((-scale * alpha, 0.0), (math.inf * scale, scale)),
    )  # fmt: skip


def _gelu(node: Node) -> Scalar:
    if node.argument(1, "approximate", "none") == "tanh" or node.kwargs.get("approximate") == "tanh":
        return tanh_gelu()
    return exact_gelu()


def _softplus(node: Node) -> Scalar:
    beta = number(node.argument(1, "beta"), 1.0)
    threshold = number(node.argument(2, "threshold"), 20.0)
    value = lambda x: functional.softplus(x, beta, threshold)  # noqa: E731
    if beta == 0 or not math.isfinite(beta):
        return UNBOUNDED
    ends = ((0.0, 0.0), (math.inf, 1.0)) if beta > 0 else ((-math.inf, 1.0), (0.0, 0.0))
    if threshold >= 40:  # what graph/canonical.py makes of a threshold whose jump is rounding
        return Scalar(value, lambda x: torch.sigmoid(beta * x), ends=ends, slope_error=OVERFLOWN)
    jump = threshold / beta  # beyond it torch returns x, which is e^-threshold/β away

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.where(beta * x > threshold, 1.0, torch.sigmoid(beta * x)).to(torch.float64)

    beside = [jump * (1 - 1e-12), jump, jump * (1 + 1e-12)] if jump else [0.0]
    return Scalar(value, slope, turns=[(place, -math.inf, math.inf) for place in beside], extrema=beside, ends=ends)


class Softplus(Entrywise):
    """ln(1 + e^(βx))/β, and x where βx exceeds the threshold."""

    def unbounded(self, node: Node) -> str:
        threshold = number(node.argument(2, "threshold"), 20.0)
        return (
            f"torch returns x itself where βx > {threshold:g}, a jump that is more than the rounding of {node.dtype}; "
            "use a threshold of 40, or a region that excludes that place"
        )


def _hardswish(node: Node) -> Scalar:
    slope = lambda x: torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, x / 3 + 0.5)).to(torch.float64)  # noqa: E731
    return Scalar(
        functional.hardswish,
        slope,
        turns=[(-3.0, 0.0, -0.5), (3.0, 1.5, 1.0)],
        extrema=[-3.0, -1.5, 3.0],
        ends=((0.0, 0.0), (math.inf, 1.0)),
    )


ACTIVATIONS: dict[str, Scalar | Callable[[Node], Scalar]] = {  # or of the node, where its arguments matter
    "relu": relu_with_slope(0.0),
    "relu6": clamped(0.0, 6.0),
    "sigmoid": logistic(),
    "tanh": smooth(torch.tanh, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "silu": sigmoid_gate(1.0),
    "mish": smooth(functional.mish, (-2.256376396360793, 1.4905711794854286), (-1.1924312145154952,), value_error=OVERFLOWN),
    "hardsigmoid": piecewise_linear(functional.hardsigmoid, [0.0, 1 / 6, 0.0], [-3.0, 3.0]),
    "log_sigmoid": smooth(functional.logsigmoid, (), ends=((-math.inf, 1.0), (0.0, 0.0))),
    "softsign": smooth(functional.softsign, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "tanhshrink": smooth(functional.tanhshrink, (0.0,), ends=((-math.inf, 1.0), (math.inf, 1.0)), value_error=SATURATED),
    "abs": piecewise_linear(torch.abs, [-1.0, 1.0], [0.0]),
    "neg": piecewise_linear(torch.neg, [-1.0, -1.0], [0.0]),
    "leaky_relu": lambda node: relu_with_slope(number(node.args[1], 0.01)),
    "elu": _elu,
    "selu": _elu,
    "celu": _elu,
    "gelu": _gelu,
    "quick_gelu": lambda node: sigmoid_gate(node.args[1]),
    "hardtanh": lambda node: clamped(number(node.argument(1, "min_val"), -1.0), number(node.argument(2, "max_val"), 1.0)),
    "hardswish": _hardswish,
    "softshrink": lambda node: piecewise_linear(
        lambda x: functional.softshrink(x, number(node.args[1], 0.5)),
        [1.0, 0.0, 1.0],
        [-number(node.args[1], 0.5), number(node.args[1], 0.5)],
    ),
}

for _name, _scalar in ACTIVATIONS.items():
    register(_name, Entrywise(_scalar))
register("softplus", Softplus(_softplus))


class Clamp(Entrywise):
    """min(max(x, low), high), with limits that are numbers, tensors, or values that depend on the input."""

    def __init__(self) -> None:
        super().__init__(_clamp)

    def reading(self, node: Node) -> Activation:
        found = super().reading(node)
        return found if self._fixed(node) else replace(found, scalar=None)

    def _fixed(self, node: Node) -> bool:
        limits = [limit for limit in (*node.args[1:3], *node.kwargs.values()) if limit is not None]
        return all(
            not isinstance(limit, Node) and (not isinstance(limit, Constant) or limit.value.numel() == 1) for limit in limits
        )

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fixed(node):
            return super().slopes_on(node, bounds)
        return torch.zeros(bounds.shape, dtype=torch.float64), torch.ones(bounds.shape, dtype=torch.float64)

    def gain(self, node: Node, context: Context) -> Gain:
        if len(node.inputs) == 1 and node.input is node.args[0]:
            return Gain.of(
                max(self.slopes(node)[1], 0.0) and math.sqrt(math.prod(node.shape) / max(math.prod(node.input.shape), 1)),
                method="slope",
            )
        copies = [math.sqrt(math.prod(node.shape) / max(math.prod(source.shape), 1)) for source in node.inputs]
        return Gain.of(*copies, method="max", separate=True)

    def norm(self, node: Node, context: Context) -> float:
        return super().norm(node, context) if self._fixed(node) else math.inf

    def interval(self, node: Node, context: Context) -> Interval:
        if self._fixed(node):
            return super().interval(node, context)
        if len(node.inputs) == 1 and node.input is node.args[0]:
            return context.interval(node.input).map(node.apply)
        return Interval.unbounded(node.shape)


for _name in ("clamp", "clamp_min", "clamp_max"):
    register(_name, Clamp())
register("prelu", ParametricReLU())


@rule("dropout", "feature_dropout", "native_dropout", "rrelu_with_noise")
class Dropout(Rule):
    """Entries are kept, scaled or dropped at random, whatever their values."""

    def reading(self, node: Node) -> Random:
        rate = node.argument(1, "p") if node.op != "rrelu_with_noise" else None
        return Random(float(rate) if isinstance(rate, (int, float)) else None)

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.entrywise(forms.of(node.input))
