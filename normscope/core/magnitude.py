"""Non-negative reals kept as logarithms, so that 10^500 neither overflows nor loses its digits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Union

Real = Union["Magnitude", float, int]


class Magnitude:
    """A non-negative real x, stored as ln x; zero and infinity included.

    >>> Magnitude(2) * Magnitude.from_log10(500)
    Magnitude(2.00e+500)
    >>> Magnitude(3) + 4, Magnitude(8) > 7, Magnitude(8) ** (1 / 3)
    (Magnitude(7.00), True, Magnitude(2.00))
    """

    __slots__ = ("log",)
    log: float

    def __init__(self, value: Real) -> None:
        if isinstance(value, Magnitude):
            log = value.log
        else:
            value = float(value)
            if math.isnan(value) or value < 0:
                raise ValueError(f"a magnitude must be a non-negative number, got {value}")
            log = math.log(value) if value > 0 else -math.inf
        object.__setattr__(self, "log", log)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Magnitude is immutable")

    def __reduce__(self) -> tuple[object, ...]:
        return Magnitude.from_log, (self.log,)

    @classmethod
    def from_log(cls, log: float) -> Magnitude:
        """The magnitude e^log."""
        if math.isnan(log):
            raise ValueError("the logarithm of a magnitude cannot be NaN")
        made = cls.__new__(cls)
        object.__setattr__(made, "log", float(log))
        return made

    @classmethod
    def from_log10(cls, log10: float) -> Magnitude:
        """The magnitude 10^log10."""
        return cls.from_log(log10 * math.log(10))

    @classmethod
    def parse(cls, value: float | str) -> Magnitude:
        """From a number, or from text as `str` writes it, beyond the range of floats too.

        >>> Magnitude.parse("3.20e+412"), Magnitude.parse("inf"), Magnitude.parse(2.5)
        (Magnitude(3.20e+412), Magnitude(inf), Magnitude(2.50))
        """
        if not isinstance(value, str):
            return cls(value)
        mantissa, _, exponent = value.partition("e")
        return cls(float(mantissa)) * cls.from_log10(float(exponent or 0))

    @property
    def log10(self) -> float:
        return self.log / math.log(10)

    @property
    def finite(self) -> bool:
        return self.log < math.inf

    def __float__(self) -> float:
        try:
            return math.exp(self.log)
        except OverflowError:
            return math.inf

    @property
    def ceiling(self) -> float:
        """A float that is not below this value: the logarithm is rounded, and so is its exponential, a subnormal one by up to η."""
        return 0.0 if self.log == -math.inf else float(self.widened(0.0)) * (1 + 2.0**-50) + math.ulp(0.0)

    def __mul__(self, other: Real) -> Magnitude:
        other = Magnitude(other)
        if -math.inf in (self.log, other.log):  # 0 · ∞ = 0: a constant map ignores what precedes it
            return ZERO
        return Magnitude.from_log(self.log + other.log)

    __rmul__ = __mul__

    def __truediv__(self, other: Real) -> Magnitude:
        other = Magnitude(other)
        if other.log == -math.inf:
            raise ZeroDivisionError("division of a Magnitude by zero")
        return ZERO if self.log == -math.inf else Magnitude.from_log(self.log - other.log)

    def __rtruediv__(self, other: Real) -> Magnitude:
        return Magnitude(other) / self

    def __add__(self, other: Real) -> Magnitude:
        small, large = sorted((self.log, Magnitude(other).log))
        if small == -math.inf or large == math.inf:
            return Magnitude.from_log(large)
        return Magnitude.from_log(large + math.log1p(math.exp(small - large)))

    __radd__ = __add__

    def __pow__(self, exponent: float) -> Magnitude:
        if exponent == 0:
            return ONE
        return Magnitude.from_log(self.log * exponent)

    def sqrt(self) -> Magnitude:
        return self**0.5

    def widened(self, relative: float) -> Magnitude:
        """This value times (1 + relative), with the logarithm's own rounding added on top."""
        if not math.isfinite(self.log):
            return self
        return Magnitude.from_log(self.log + math.log1p(relative) + 4 * _ulp(self.log, relative))

    def narrowed(self, relative: float) -> Magnitude:
        """This value times (1 − relative), never below zero, with the logarithm's own rounding taken off."""
        if relative >= 1:
            return ZERO
        if not math.isfinite(self.log):
            return self
        return Magnitude.from_log(self.log + math.log1p(-relative) - 4 * _ulp(self.log, math.log1p(-relative)))

    def raised(self, *parts: Real) -> Magnitude:
        """An upper bound on the exact product, quotient or sum of these parts, of which this is the computed one.

        Each part's logarithm and each operation errs by an ulp of a logarithm, at most 2 u times the sum of all |logarithms|.
        """
        return self.widened(_lost(parts))

    def lowered(self, *parts: Real) -> Magnitude:
        """A lower bound on it."""
        return self.narrowed(_lost(parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Magnitude, int, float)):
            return NotImplemented
        return not _negative(other) and self.log == Magnitude(other).log

    def __lt__(self, other: Real) -> bool:
        return not _negative(other) and self.log < Magnitude(other).log

    def __gt__(self, other: Real) -> bool:
        return other == other and not self <= other

    def __ge__(self, other: Real) -> bool:
        return other == other and not self < other

    def __le__(self, other: Real) -> bool:
        return self < other or self == other

    def __hash__(self) -> int:
        value = float(self)  # equal to a plain number where there is one
        return hash(value) if Magnitude(value).log == self.log else hash(("Magnitude", self.log))

    def __bool__(self) -> bool:
        return self.log > -math.inf

    def __str__(self) -> str:
        return format(self, "")

    def __format__(self, spec: str) -> str:
        """Width and precision as for floats: `{m:.3}` has three significant digits, the default."""
        width, _, precision = spec.partition(".")
        digits = int(precision.rstrip("efg") or 3) if precision else 3
        if self.log == -math.inf:
            text = "0"
        elif self.log == math.inf:
            text = "inf"
        elif -2 <= self.log10 < 4:
            exponent = int(f"{float(self):.{digits - 1}e}".partition("e")[2])  # of the rounded number: 0.9999 prints as 1.00
            text = f"{float(self):.{max(digits - 1 - exponent, 0)}f}"
        else:
            exponent = math.floor(self.log10)
            mantissa = f"{10 ** (self.log10 - exponent):.{digits - 1}f}"
            if mantissa.startswith("10"):
                mantissa, exponent = f"{1:.{digits - 1}f}", exponent + 1
            text = f"{mantissa}e{exponent:+03d}"
        return format(text, width) if width else text

    def __repr__(self) -> str:
        return f"Magnitude({self})"


def _ulp(*values: float) -> float:
    return max(math.ulp(value) for value in values)


def _lost(parts: tuple[Real, ...]) -> float:
    logs = [abs(Magnitude(part).log) for part in parts]
    return 2 * (len(parts) + 2) * (2 + sum(log for log in logs if math.isfinite(log))) * 2.0**-53


def _negative(value: Real) -> bool:
    return not isinstance(value, Magnitude) and (value < 0 or value != value)


ZERO = Magnitude(0)
ONE = Magnitude(1)
INFINITY = Magnitude(math.inf)


def json_number(value: float) -> float | str | None:
    """A JSON number, or "inf", "-inf" and None where JSON has none."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def total(values: Iterable[Magnitude]) -> Magnitude:
    """Σ values."""
    result = ZERO
    for value in values:
        result = result + value
    return result


def product(values: Iterable[Magnitude]) -> Magnitude:
    """∏ values."""
    result = ONE
    for value in values:
        result = result * value
    return result


def root_sum_square(values: Iterable[Magnitude]) -> Magnitude:
    """√Σ values²."""
    return total(value**2 for value in values).sqrt()
