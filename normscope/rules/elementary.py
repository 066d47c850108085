"""Elementary functions, entry by entry: powers, exponentials, logarithms, and those of angles."""

from __future__ import annotations

import math

import torch

from normscope.core.errors import Refusal
from normscope.core.interval import Interval
from normscope.core.rounding import FEW, FUNCTION, UNDERFLOW, UNIT_ROUNDOFF, above, below
from normscope.graph.graph import Constant, Node
from normscope.rules.activations import Entrywise, number
from normscope.rules.registry import Context, register
from normscope.rules.scalars import SATURATED, UNBOUNDED, Function, Scalar, exponential, logistic, piecewise_linear, power, smooth

NOWHERE = ((math.nan, math.nan), (math.nan, math.nan))  # ends of a function that has none
BELOW_ONE = 1 - 2.0**-53
FARTHEST = 1e6  # from zero, where the poles of the tangent are still told apart
POLE = 1e-9  # how near to one of them nothing is claimed, in units of π


def _power(node: Node) -> Scalar:
    if node.op == "pow" and isinstance(node.args[0], Constant) and node.args[0].value.numel() > 1:
        raise Refusal("no certificate: bases differ from entry to entry", [node.label], "Write it as exp(x · log(base)).")
    if node.op == "pow" and not isinstance(node.args[0], Node):
        return exponential(number(node.args[0], 1.0))
    if node.op == "pow" and isinstance(node.args[1], Node):
        raise Refusal("no certificate: an exponent depends on the input", [node.label], "Write it as exp(exponent · log(base)).")
    if node.op == "pow" and isinstance(node.args[1], Constant) and node.args[1].value.numel() > 1:
        raise Refusal("no certificate: exponents differ from entry to entry", [node.label], "Raise to one power at a time.")
    exponent = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}.get(node.op)
    if exponent is None:
        exponent = number(node.args[1], 1.0)
    return power(exponent)


def _line(slope: float) -> tuple[tuple[float, float], tuple[float, float]]:
    return ((-math.inf, slope), (math.inf, slope))


def _logarithm(function: Function, base: float) -> Scalar:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return (x * math.log(base)).reciprocal()

    return Scalar(function, slope, ends=((math.nan, math.nan), (math.inf, 0.0)), domain=(UNDERFLOW, math.inf))


def _inverse_sine(function: Function, sign: float) -> Scalar:
    """arcsin and arccos: slopes ±1/√(1 − x²)."""
    slope: Function = lambda x: sign * ((1 - x) * (1 + x)).rsqrt()  # noqa: E731
    return Scalar(function, slope, turns=[(0.0, sign, sign)], ends=NOWHERE, domain=(-BELOW_ONE, BELOW_ONE))


def _logit(node: Node) -> Scalar:
    """log(x/(1 − x)) of x clamped to [ε, 1 − ε], or on 0 < x < 1 without ε."""
    epsilon = number(node.argument(1, "eps"), 0.0)
    slope: Function = lambda x: (x * (1 - x)).reciprocal()  # noqa: E731
    if epsilon > 0.5 or 0 < epsilon < 1 - BELOW_ONE:  # what is below ε is above 1 − ε, or 1 − ε is rounded to 1, a pole
        return UNBOUNDED
    if epsilon <= 0:
        return Scalar(torch.logit, slope, [(0.5, 4.0, 4.0)], ends=NOWHERE, domain=(UNDERFLOW, BELOW_ONE), value_error=SATURATED)
    steepest = above(1 / (epsilon * (1 - epsilon)))
    top = float(torch.logit(torch.tensor(1.0, dtype=torch.float64), epsilon))

    def clamped(x: torch.Tensor) -> torch.Tensor:
        return torch.where((x < epsilon) | (x > 1 - epsilon), 0.0, slope(x)).to(torch.float64)

    turns = [(epsilon, 0.0, steepest), (0.5, 4.0, 4.0), (1 - epsilon, steepest, 0.0)]
    lost = SATURATED + UNIT_ROUNDOFF * steepest  # the latter of 1 − ε
    return Scalar(lambda x: torch.logit(x, epsilon), clamped, turns, ends=((-top, 0.0), (top, 0.0)), value_error=lost)


def _sinh(x: torch.Tensor) -> torch.Tensor:
    """2 sinh(x/2) cosh(x/2): e^x may overflow where sinh x does not."""
    return 2 * torch.sinh(x / 2) * torch.cosh(x / 2)


def _cosh(x: torch.Tensor) -> torch.Tensor:
    return 1 + 2 * torch.sinh(x / 2) * torch.sinh(x / 2)


FUNCTIONS: dict[str, Scalar] = {
    "erf": smooth(torch.erf, (0.0,), ends=((-1.0, 0.0), (1.0, 0.0))),
    "erfc": smooth(torch.erfc, (0.0,), ends=((2.0, 0.0), (0.0, 0.0))),
    "special_expit": logistic(),
    "deg2rad": Scalar(torch.deg2rad, lambda x: torch.full_like(x, math.pi / 180), ends=_line(math.pi / 180)),
    "rad2deg": Scalar(torch.rad2deg, lambda x: torch.full_like(x, 180 / math.pi), ends=_line(180 / math.pi)),
    "sinh": Scalar(_sinh, _cosh, turns=[(0.0, 1.0, 1.0)], ends=((-math.inf, math.inf), (math.inf, math.inf))),
    "cosh": Scalar(_cosh, _sinh, extrema=[0.0], ends=((math.inf, -math.inf), (math.inf, math.inf))),
    "exp2": exponential(2.0),
    "log2": _logarithm(torch.log2, 2.0),
    "log10": _logarithm(torch.log10, 10.0),
    "atan": smooth(torch.atan, (0.0,), ends=((-math.pi / 2, 0.0), (math.pi / 2, 0.0))),
    "asinh": smooth(torch.asinh, (0.0,), ends=((-math.inf, 0.0), (math.inf, 0.0))),
    "exp": Scalar(torch.exp, torch.exp, ends=((0.0, 0.0), (math.inf, math.inf))),
    "expm1": Scalar(torch.expm1, torch.exp, ends=((-1.0, 0.0), (math.inf, math.inf))),
    "log": _logarithm(torch.log, math.e),
    "log1p": Scalar(
        torch.log1p, lambda x: 1 / (1 + x), ends=((math.nan, math.nan), (math.inf, 0.0)), domain=(-1 + 2**-53, math.inf)
    ),
    "asin": _inverse_sine(torch.asin, 1.0),
    "acos": _inverse_sine(torch.acos, -1.0),
    "atanh": Scalar(
        torch.atanh,
        lambda x: ((1 - x) * (1 + x)).reciprocal(),
        turns=[(0.0, 1.0, 1.0)],
        ends=NOWHERE,
        domain=(-BELOW_ONE, BELOW_ONE),
    ),
    "acosh": Scalar(
        torch.acosh, lambda x: ((x - 1) * (x + 1)).rsqrt(), ends=(NOWHERE[0], (math.inf, 0.0)), domain=(1 + 2.0**-52, math.inf)
    ),
}
for _name, _scalar in FUNCTIONS.items():
    register(_name, Entrywise(_scalar))
for _name in ("pow", "square", "sqrt", "rsqrt", "reciprocal"):
    register(_name, Entrywise(_power))
for _name in ("logit", "special_logit"):
    register(_name, Entrywise(_logit))


class Wave(Entrywise):
    """sin and cos: slopes and values in [−1, 1], not followed any closer."""

    def __init__(self) -> None:
        super().__init__(piecewise_linear(torch.abs, [-1.0, 1.0], [0.0]))

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(bounds.shape, -1.0, dtype=torch.float64), torch.full(bounds.shape, 1.0, dtype=torch.float64)

    def interval(self, node: Node, context: Context) -> Interval:
        return Interval.constant(-1.0, 1.0, node.shape)

    def norm(self, node: Node, context: Context) -> float:
        return math.sqrt(node.shape[-1] if node.shape else 1)


class Tangent(Entrywise):
    """tan between two of its poles, with the slope 1 + tan²; nothing is bounded where values may reach a pole."""

    def __init__(self) -> None:
        super().__init__(UNBOUNDED)

    @staticmethod
    def _between_poles(bounds: Interval) -> torch.Tensor:
        turns = [side.clamp(-FARTHEST, FARTHEST) / math.pi for side in (bounds.low, bounds.high)]
        middle = turns[0].round()
        near = [(turn - middle).abs() < 0.5 - POLE for turn in turns]
        return near[0] & near[1] & (bounds.low > -FARTHEST) & (bounds.high < FARTHEST)

    def slopes_on(self, node: Node, bounds: Interval) -> tuple[torch.Tensor, torch.Tensor]:
        inside = self._between_poles(bounds)
        low, high = (side.clamp(-FARTHEST, FARTHEST) for side in (bounds.low, bounds.high))
        flattest = (low / math.pi - POLE).ceil() <= high / math.pi + POLE  # where tan is 0
        ends = [1 + side.tan().square() for side in (low, high)]
        least = torch.where(flattest, 1.0, below(torch.minimum(*ends), 2 * FUNCTION + FEW))
        return torch.where(inside, least, -math.inf), torch.where(inside, above(torch.maximum(*ends), 2 * FUNCTION + FEW), math.inf)

    def interval(self, node: Node, context: Context) -> Interval:
        bounds = context.interval(node.input)
        inside = self._between_poles(bounds)
        found = Interval(*(side.nan_to_num(0, 0, 0).tan() for side in (bounds.low, bounds.high))).widened(1e-12)
        return Interval(torch.where(inside, found.low, -math.inf), torch.where(inside, found.high, math.inf))


for _name in ("sin", "cos"):
    register(_name, Wave())
register("tan", Tangent())
