"""What normscope knows about each operation, open to users: one rule per operation, looked up by name.

A rule states, for one node: how much it can stretch distances (`gain`), which values it can take (`interval`), where it
acts entry by entry, between which slopes (`slopes`), what it is as algebra (`form`, for symmetries), and what it is in words
(`reading`: a linear map with this weight, a normalizer with this γ, …). An operation without a gain has no certificate; one
without a form is passed by no symmetry; one without a reading is no layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, overload

import torch

from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.interval import Interval
from normscope.core.magnitude import INFINITY, Magnitude, Real
from normscope.core.rounding import FEW, UNDERFLOW, UNIT_ROUNDOFF, above, length
from normscope.graph.graph import Node
from normscope.graph.naming import operation_name
from normscope.rules.algebra import Form, Forms
from normscope.rules.readings import Random, Reading
from normscope.rules.remainder import LinearPart, Multiples, Remainder, Sets, Sizes

R = TypeVar("R")


@dataclass(frozen=True)
class Gain:
    """‖Δoutput‖ ≤ Σ_i factor_i ‖Δinput_i‖, or √Σ (factor_i ‖Δinput_i‖)² where the inputs go to separate entries.

    One factor for each of `node.inputs`; `method` names the law that gives it, `reason` says why it is infinite.
    """

    factors: tuple[Magnitude, ...]
    method: str = "exact"
    separate: bool = False
    reason: str = ""

    @classmethod
    def of(cls, *factors: Real, method: str = "exact", separate: bool = False) -> Gain:
        return cls(tuple(map(Magnitude, factors)), method, separate)

    @classmethod
    def infinite(cls, node: Node, reason: str) -> Gain:
        return cls((INFINITY,) * len(node.inputs), "unbounded", reason=f"{node.label}: {reason}")


class Context(Protocol):
    """What a rule may ask about the surroundings of its node."""

    whole_batch: bool
    local: bool  # whether there is a region

    def interval(self, node: Node) -> Interval:
        """Bounds on the values of `node`."""

    def norm(self, node: Node) -> float:
        """The largest ℓ2 norm of a vector along the last axis of `node`."""

    def gain(self, node: Node) -> Gain:
        """The gain of another node, computed once."""

    def center(self, node: Node) -> torch.Tensor | None:
        """The value of `node` at the middle of the region, if there is one."""

    def deviation(self, node: Node) -> float:
        """How far (ℓ2, all entries together) `node` can be from its computed value at the middle of the region."""

    def distances(self, node: Node) -> torch.Tensor | None:
        """How far each entry of `node` can be from its computed value at the middle of the region, if there is one."""

    def error(self, node: Node) -> float:
        """How far (ℓ2) the computed value at the middle may be from the exact one."""


class Rule:
    """Base class of all rules; a user's rule overrides `gain`, and more where it knows more.

    first_alone: set where the bounds are about nodes whose first operand alone depends on the input, and readings about nodes whose
    first operand does; it says why others have no bound.
    """

    first_alone: ClassVar[str] = ""

    def gain(self, node: Node, context: Context) -> Gain:
        """A bound on how much the node stretches the distance between two values of its inputs."""
        raise NotImplementedError(f"{type(self).__name__} gives no gain")

    def interval(self, node: Node, context: Context) -> Interval:
        """Bounds on the values the node can take; nothing is known unless a rule says so."""
        return Interval.unbounded(node.shape)

    def norm(self, node: Node, context: Context) -> float:
        """The largest ℓ2 norm of a vector along the last axis, where this is sharper than what the interval gives."""
        return math.inf

    def center_error(self, node: Node, context: Context) -> float:
        """A bound on the error of the node's value at the middle of the region; see certify/passing.py."""
        value = context.center(node)
        factors = context.gain(node).factors
        carried = sum(gain.ceiling * context.error(source) for gain, source in zip(factors, node.inputs, strict=True))
        if value is None:  # several outputs at once, or values that are not finite
            return carried if node.dtype is None else math.inf
        count, kappa = max(value.numel(), 1), self.roundoff(node)
        lost = math.sqrt(count) * (self.terms(node) + 8) * UNDERFLOW  # each of a kernel's operations may underflow
        return carried + kappa * (float(length(value)) + self.computed_on_the_way(node, context)) + lost

    def roundoff(self, node: Node) -> float:
        """κ: the relative rounding of the node's float64 kernel, in ℓ2."""
        return 2 * UNIT_ROUNDOFF * (self.terms(node) + 8)

    def terms(self, node: Node) -> float:
        """How many terms the node's longest sum has, at most."""
        return max((math.prod(source.shape) for source in node.inputs), default=1)

    def computed_on_the_way(self, node: Node, context: Context) -> float:
        """The ℓ2 size of what the node's kernel computes beside its output and multiples of its inputs by its gain."""
        return 0.0

    def curvature(self, node: Node, context: Context) -> tuple[float, ...] | None:
        """On a region, how far the node is from its derivative J at the computed middle, one factor per input, or None.

        ‖f(y) − f(y') − J (y − y')‖ ≤ Σ_i factor_i ‖y_i − y'_i‖ for all values y, y' that can reach the node.
        """
        return None

    def measured(self, node: Node) -> tuple[tuple[Sets, ...], ...]:
        """For each of `node.inputs` the sets of entries whose sizes in ℓ2 `remainder` asks for."""
        return ((),) * len(node.inputs)

    def linear_part(self, node: Node, context: Context, away: Sizes | None) -> LinearPart | None:
        """The linear part that `remainder` is about, where that is not the derivative at the computed middle.

        away: distances from the middle, for changes between any two points; None for changes from the middle.
        """
        return None

    def multiples(self, node: Node, context: Context, away: Sizes, chords: bool) -> Multiples | None:
        """Which changes of the input the remainder between any two points is a multiple of, where it is one.

        chords: as in `Sizes`.
        Then Δf = SΔy with ‖S‖ no larger than the gain, S the linear part and that multiple together.
        """
        return None

    def remainder(self, node: Node, context: Context, away: Sizes, moves: Sizes | None) -> Remainder | None:
        """What the linear part leaves out of a change of the node, or None where this is not known.

        The linear part is the derivative at the computed middle, unless `linear_part` gives another: for `away` if `moves.chords`.

        away: distances from the computed middle. moves: changes between any two points of the region, per distance of the inputs;
        None for the change from the computed middle itself, of which `away` is the size.
        """
        factors = None if node.is_foreign else self.curvature(node, context)  # forward mode takes a foreign derivative for 0
        if factors is None:
            return None
        sizes = away if moves is None else moves
        parts = [factor * sizes.sets(source, Sets.whole(source.shape)) for factor, source in zip(factors, node.inputs, strict=True)]
        size = above(torch.stack(parts).sum(0), len(parts) + FEW)
        return Remainder(torch.ones(node.shape, dtype=torch.float64), size.expand(node.shape), (Sets.whole(node.shape), size))

    def tokenwise(self, node: Node) -> bool:
        """Whether each vector along the last axis depends on the vectors at the same place of the inputs alone."""
        return False

    def slopes(self, node: Node) -> tuple[float, float] | None:
        """(least, largest) slope of an entrywise node on all of ℝ, or None if it is not entrywise."""
        return None

    def linear(self, node: Node) -> bool:
        """Whether the node is affine in its inputs."""
        return False

    def form(self, node: Node, forms: Forms) -> Form:
        """What the node is in the vocabulary of `rules/algebra.py`; no symmetry passes it unless a rule says so."""
        return forms.opaque()

    def reading(self, node: Node) -> Reading | None:
        """What the node is, with its weight, γ or operands by name, in the vocabulary of `rules/readings.py`."""
        return None

    @property
    def certifies(self) -> bool:
        """Whether the rule bounds a gain; some operations only have a form."""
        return type(self).gain is not Rule.gain


@dataclass
class Uncovered(Rule):
    """Of a node whose rule bounds it only where other operands depend on the input."""

    reason: str

    def gain(self, node: Node, context: Context) -> Gain:
        return Gain.infinite(node, self.reason)


@dataclass
class KnownGain(Rule):
    """A rule made from a number or from a function of the node, for operations with one input."""

    stated: Real | Callable[[Node], Real]

    def gain(self, node: Node, context: Context) -> Gain:
        value = self.stated(node) if callable(self.stated) else self.stated
        return Gain.of(*(value for _ in node.inputs), method="stated by its rule")


@dataclass
class Registry:
    """The table of rules, from operation name to rule."""

    rules: dict[str, Rule] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{len(self.rules)} rules>"

    @earlier(positional=1)
    def register(self, op: str | Any, rule: Rule | Real | Callable[[Node], Real], *, overwrite: bool = False) -> None:
        """Give operation `op` a rule: a `Rule`, or the gain itself as a number or a function of the node.

        op: a torch operation (`torch.ops.mylib.op`), or its name as a refusal ("mylib.op") or torch ("mylib::op") prints it.
        overwrite: replace the rule that the operation has.
        """
        name = op.replace("::", ".").removeprefix("aten.") if isinstance(op, str) else operation_name(op)
        if name in self.rules and not overwrite:
            raise InputError(f"{name} has a rule already ({type(self.rules[name]).__name__}); pass overwrite=True to replace it")
        if not isinstance(rule, Rule):
            if not callable(rule) and (math.isnan(float(rule)) or float(rule) < 0):
                raise InputError(f"a gain must be a number ≥ 0, got {rule}")
            rule = KnownGain(rule)
        self.rules[name] = rule

    def find(self, node: Node) -> Rule | None:
        """The rule that bounds the gain of a node."""
        found = self._of_real_numbers(node)
        if found is not None and found.first_alone and node.inputs != node.args[:1]:
            return Uncovered(found.first_alone)
        return found if found is not None and found.certifies else None

    def form(self, node: Node, forms: Forms) -> Form:
        found = self._of_real_numbers(node)
        return forms.opaque() if found is None else found.form(node, forms)

    @overload
    def reading(self, node: Node) -> Reading | None: ...

    @overload
    def reading(self, node: Node, kind: type[R]) -> R | None: ...

    def reading(self, node: Node, kind: type = object) -> Any:
        """What a node is, if it is of this kind; an operation without a rule is known for random if torch says so."""
        found = self._of_real_numbers(node)
        if found is not None:
            elsewhere = bool(found.first_alone) and not isinstance(node.args[0], Node)
            read: Reading | None = None if elsewhere else found.reading(node)
        else:
            read = Random() if node.draws else None
        return read if isinstance(read, kind) else None

    def _of_real_numbers(self, node: Node) -> Rule | None:
        """Rules are about real numbers: complex ones that were not taken apart (graph/complex_numbers.py) have none."""
        read = any(part.dtype is not None and part.dtype.is_complex for part in (node, *node.inputs))
        return None if read else self.rules.get(node.op)

    def __getitem__(self, op: str) -> Rule:
        return self.rules[op]


registry = Registry()
register = registry.register


def rule(*operations: str) -> Callable[[type[Rule]], type[Rule]]:
    """Class decorator: register one instance of a rule for each operation named."""

    def decorate(kind: type[Rule]) -> type[Rule]:
        instance = kind()
        for operation in operations:
            register(operation, instance)
        return kind

    return decorate
