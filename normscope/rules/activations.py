"""Entrywise functions; the softmax family is in softmax.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from normscope.core.errors import Refusal
from normscope.core.interval import Interval
from normscope.core.rounding import UNDERFLOW
from normscope.graph.graph import Constant, Node
from normscope.rules.forms import Form, Forms
from normscope.rules.registry import Context, Gain, Rule, register, rule
from normscope.rules.scalars import (
    SATURATED,
    UNBOUNDED,
    Function,
    Scalar,
    clamped,
    exact_gelu,
    exponential,
    piecewise_linear,
    power,
    relu_with_slope,
    sigmoid_gate,
    smooth,
    tanh_gelu,
)


class Entrywise(Rule):
    """y_i = φ(x_i): the gain is the largest |slope| that the values of x allow."""

    def __init__(self, scalar: Callable[[Node], Scalar]) -> None:
        self.scalar = scalar

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
        return size * (1 + 1e-12) + UNDERFLOW if math.isfinite(size) else math.inf


def homogeneity(node: Node) -> float | None:
    """The power p of a function with φ(c x) = c^p φ(x) for all c > 0, or None."""
    if len(node.inputs) != 1 or node.input is not node.args[0]:
        return None
    if node.op in ("relu", "leaky_relu", "rrelu", "prelu", "abs", "neg"):
        return 1.0
    if node.op in ("square", "sqrt", "rsqrt", "reciprocal"):
        return {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}[node.op]
    if node.op == "pow":
        return None if isinstance(node.args[1], Constant) and node.args[1].value.numel() > 1 else _number(node.args[1], 1.0)
    if node.op in ("clamp", "clamp_min", "clamp_max", "hardtanh", "threshold"):
        limits = [limit for limit in (*node.args[1:3], *node.kwargs.values()) if limit is not None]
        plain = all(not isinstance(limit, Constant) or limit.value.numel() == 1 for limit in limits)
        return 1.0 if plain and all(_number(limit, 0.0) in (0.0, math.inf, -math.inf) for limit in limits) else None
    return 0.0 if node.op in ("sign", "sgn", "heaviside") else None


class ParametricReLU(Entrywise):
    """prelu(x)_c = max(x, 0) + w_c min(x, 0)."""

    def __init__(self) -> None:
        super().__init__(lambda node: relu_with_slope(0.0))

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
        weight = self._negative_slopes(node, bounds.shape if bounds.shape else ()).flatten()
        return torch.minimum(weight, torch.ones(())), torch.maximum(weight, torch.ones(()))

    def interval(self, node: Node, context: Context) -> Interval:
        if not isinstance(node.args[1], Constant):
            return Interval.unbounded(node.shape)
        bounds = context.interval(node.input)
        weight = self._negative_slopes(node, node.shape)
        below = Interval(bounds.low.clamp(max=0), bounds.high.clamp(max=0)) * Interval(weight, weight)
        return below + Interval(bounds.low.clamp(min=0), bounds.high.clamp(min=0))


def _number(value: object, default: float) -> float:
    if value is None:
        return default
    return float(value.value) if isinstance(value, Constant) else float(value)  # type: ignore[arg-type]


def _leaky(node: Node) -> Scalar:
    return relu_with_slope(_number(node.args[1], 0.01))


def _hardtanh(node: Node) -> Scalar:
    low, high = _number(node.argument(1, "min_val"), -1.0), _number(node.argument(2, "max_val"), 1.0)
    return clamped(low, high)


def _clamp(node: Node) -> Scalar:
    if node.op == "clamp_min":
        return clamped(_number(node.args[1], -math.inf), math.inf)
    if node.op == "clamp_max":
        return clamped(-math.inf, _number(node.args[1], math.inf))
    return clamped(_number(node.argument(1, "min"), -math.inf), _number(node.argument(2, "max"), math.inf))


def _elu(node: Node) -> Scalar:
    if node.op == "selu":
        alpha, scale, inner = 1.6732632423543772, 1.0507009873554805, 1.0
    elif node.op == "celu":
        alpha = _number(node.argument(1, "alpha"), 1.0)
        scale, inner = 1.0, 1 / alpha
    else:
        alpha = _number(node.argument(1, "alpha"), 1.0)
        scale, inner = _number(node.argument(2, "scale"), 1.0), _number(node.argument(3, "input_scale"), 1.0)

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
    beta = _number(node.argument(1, "beta"), 1.0)
    threshold = _number(node.argument(2, "threshold"), 20.0)
    value = lambda x: functional.softplus(x, beta, threshold)  # noqa: E731
    if beta == 0 or not math.isfinite(beta):
        return UNBOUNDED
    ends = ((0.0, 0.0), (math.inf, 1.0)) if beta > 0 else ((-math.inf, 1.0), (0.0, 0.0))
    if threshold >= 40:  # what graph/canonical.py makes of a threshold whose jump is rounding
        return Scalar(value, lambda x: torch.sigmoid(beta * x), ends=ends)
    jump = threshold / beta  # beyond it torch returns x, which is e^-threshold/β away

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.where(beta * x > threshold, 1.0, torch.sigmoid(beta * x)).to(torch.float64)

    beside = [jump * (1 - 1e-12), jump, jump * (1 + 1e-12)] if jump else [0.0]
    return Scalar(value, slope, turns=[(place, -math.inf, math.inf) for place in beside], extrema=beside, ends=ends)


class Softplus(Entrywise):
    """ln(1 + e^(βx))/β, and x where βx exceeds the threshold."""

    def unbounded(self, node: Node) -> str:
        threshold = _number(node.argument(2, "threshold"), 20.0)
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


def _power(node: Node) -> Scalar:
    if node.op == "pow" and isinstance(node.args[0], Constant) and node.args[0].value.numel() > 1:
        raise Refusal("no certificate: bases differ from entry to entry", [node.label], "Write it as exp(x · log(base)).")
    if node.op == "pow" and not isinstance(node.args[0], Node):
        return exponential(_number(node.args[0], 1.0))
    if node.op == "pow" and isinstance(node.args[1], Node):
        raise Refusal("no certificate: an exponent depends on the input", [node.label], "Write it as exp(exponent · log(base)).")
    if node.op == "pow" and isinstance(node.args[1], Constant) and node.args[1].value.numel() > 1:
        raise Refusal("no certificate: exponents differ from entry to entry", [node.label], "Raise to one power at a time.")
    exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}.get(node.op)
    if exponent is None:
        exponent = _number(node.args[1], 1.0)
    return power(exponent)


def _jump(reason: str) -> Rule:
    class Discontinuous(Rule):
        def gain(self, node: Node, context: Context) -> Gain:
            return Gain.infinite(node, reason)

        def form(self, node: Node, forms: Forms) -> Form:
            power = homogeneity(node)
            return forms.opaque() if power is None else forms.entrywise(forms.of(node.input), power)

    return Discontinuous()


def _line(slope: float) -> tuple[tuple[float, float], tuple[float, float]]:
    return ((-math.inf, slope), (math.inf, slope))


def _logarithm(function: Function, base: float) -> Scalar:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return (x * math.log(base)).reciprocal()

    return Scalar(function, slope, ends=((math.nan, math.nan), (math.inf, 0.0)), domain=(UNDERFLOW, math.inf))


FIXED: dict[str, Callable[[], Scalar]] = {
    "relu": lambda: relu_with_slope(0.0),
    "relu6": lambda: clamped(0.0, 6.0),
    "sigmoid": lambda: smooth(torch.sigmoid, (0.0,), ends=((0.0, 0.0), (1.0, 0.0))),
    "tanh": lambda: smooth(torch.tanh, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "silu": lambda: sigmoid_gate(1.0),
    "mish": lambda: smooth(functional.mish, (-2.256376396360793, 1.4905711794854286), (-1.1924312145154952,)),
    "hardsigmoid": lambda: piecewise_linear(functional.hardsigmoid, [0.0, 1 / 6, 0.0], [-3.0, 3.0]),
    "log_sigmoid": lambda: smooth(functional.logsigmoid, (), ends=((-math.inf, 1.0), (0.0, 0.0))),
    "softsign": lambda: smooth(functional.softsign, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "tanhshrink": lambda: smooth(functional.tanhshrink, (0.0,), ends=((-math.inf, 1.0), (math.inf, 1.0)), value_error=SATURATED),
    "abs": lambda: piecewise_linear(torch.abs, [-1.0, 1.0], [0.0]),
    "neg": lambda: piecewise_linear(torch.neg, [-1.0, -1.0], [0.0]),
    "erf": lambda: smooth(torch.erf, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "erfc": lambda: smooth(torch.erfc, (0.0,), ends=((2.0, 0.0), (0.0, 0.0))),
    "special_expit": lambda: smooth(torch.sigmoid, (0.0,), ends=((0.0, 0.0), (1.0, 0.0))),
    "deg2rad": lambda: Scalar(torch.deg2rad, lambda x: torch.full_like(x, math.pi / 180), ends=_line(math.pi / 180)),
    "rad2deg": lambda: Scalar(torch.rad2deg, lambda x: torch.full_like(x, 180 / math.pi), ends=_line(180 / math.pi)),
    "sinh": lambda: Scalar(torch.sinh, torch.cosh, turns=[(0.0, 1.0, 1.0)], ends=((-math.inf, math.inf), (math.inf, math.inf))),
    "cosh": lambda: Scalar(torch.cosh, torch.sinh, extrema=[0.0], ends=((math.inf, -math.inf), (math.inf, math.inf))),
    "exp2": lambda: exponential(2.0),
    "log2": lambda: _logarithm(torch.log2, 2.0),
    "log10": lambda: _logarithm(torch.log10, 10.0),
    "atan": lambda: smooth(torch.atan, (0.0,), ends=((-math.pi / 2, 0.0), (math.pi / 2, 0.0))),
    "asinh": lambda: smooth(torch.asinh, (0.0,), ends=((-math.inf, 0.0), (math.inf, 0.0))),
    "exp": lambda: Scalar(torch.exp, torch.exp, ends=((0.0, 0.0), (math.inf, math.inf))),
    "expm1": lambda: Scalar(torch.expm1, torch.exp, ends=((-1.0, 0.0), (math.inf, math.inf))),
    "log": lambda: _logarithm(torch.log, math.e),
    "log1p": lambda: Scalar(
        torch.log1p, lambda x: 1 / (1 + x), ends=((math.nan, math.nan), (math.inf, 0.0)), domain=(-1 + 2**-53, math.inf)
    ),
}


class Fixed(Entrywise):
    """A function without parameters, made once."""

    def __init__(self, make: Callable[[], Scalar]) -> None:
        made = make()
        super().__init__(lambda node: made)


for _name, _make in FIXED.items():
    register(_name, Fixed(_make))


class Wave(Entrywise):
    """sin and cos: slopes and values in [−1, 1], not followed any closer."""

    def __init__(self) -> None:
        super().__init__(lambda node: piecewise_linear(torch.abs, [-1.0, 1.0], [0.0]))

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(bounds.shape, -1.0, dtype=torch.float64), torch.full(bounds.shape, 1.0, dtype=torch.float64)

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(-1.0, 1.0, node.shape)

    def norm(self, node: Node, context: Context) -> float:
        return math.sqrt(node.shape[-1] if node.shape else 1)


for _name in ("sin", "cos"):
    register(_name, Wave())
register("leaky_relu", Entrywise(_leaky))
register("softplus", Softplus(_softplus))
for _names, _scalar in {
    ("elu", "selu", "celu"): _elu,
    ("gelu",): _gelu,
    ("quick_gelu",): lambda node: sigmoid_gate(node.args[1]),
    ("hardtanh",): _hardtanh,
    ("hardswish",): _hardswish,
    ("softshrink",): lambda node: piecewise_linear(
        lambda x: functional.softshrink(x, _number(node.args[1], 0.5)),
        [1.0, 0.0, 1.0],
        [-_number(node.args[1], 0.5), _number(node.args[1], 0.5)],
    ),
    ("pow", "square", "sqrt", "rsqrt", "reciprocal"): _power,
}.items():
    for _name in _names:
        register(_name, Entrywise(_scalar))


class Clamp(Entrywise):
    """min(max(x, low), high), with limits that are numbers, tensors, or values that depend on the input."""

    def __init__(self) -> None:
        super().__init__(_clamp)

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
for _name in (
    "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "hardshrink", "heaviside", "remainder", "fmod",
):  # fmt: skip
    register(_name, _jump("it jumps, so no finite constant exists"))
for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
    "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
    "argmax", "argmin", "isnan", "isinf", "isfinite",
):  # fmt: skip
    register(_name, _jump("its answer depends on the input's values and jumps, so no finite constant exists"))


@rule("threshold")
class Threshold(Rule):
    """x where x > t, else v: continuous only if t = v, and then a clamp."""

    def form(self, node: Node, forms: Forms) -> Form:
        power = homogeneity(node)
        return forms.opaque() if power is None else forms.entrywise(forms.of(node.input), power)

    def gain(self, node: Node, context: Context) -> Gain:
        if _number(node.args[1], 0.0) != _number(node.args[2], 0.0):
            return Gain.infinite(node, "it jumps at its threshold, so no finite constant exists")
        return Gain.of(1, method="slope")


@rule("dropout", "feature_dropout", "native_dropout", "rrelu_with_noise")
class Dropout(Rule):
    """Entries are kept, scaled or dropped at random, whatever their values."""

    def form(self, node: Node, forms: Forms) -> Form:
        return forms.entrywise(forms.of(node.input))
