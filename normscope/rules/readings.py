"""What an operation is, in one typed form: outside its rule nothing else knows its name or the places of its arguments.

    registry.reading(node)               # LinearMap, Normalizer, Activation, …, or None
    registry.reading(node, LinearMap)    # the same if it is a linear map, else None

Weights, γ and β are operands as they stand in the graph: a `Constant`, or a `Node` where they depend on the input or where the
graph is a function of its parameters too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from normscope.core.magnitude import Magnitude
from normscope.graph.graph import Constant, Node
from normscope.operators.conv import Convolution
from normscope.operators.dense import spectral_norm
from normscope.rules.scalars import Scalar

Operand = Node | Constant
BELOW_ZERO = torch.tensor([-1e6, -1.0, -1e-6], dtype=torch.float64)


def learned(operand: Operand | float | None) -> bool:
    """Whether an operand is a constant that training moves."""
    return isinstance(operand, Constant) and operand.learned


@dataclass(frozen=True)
class Kernel:
    """How a convolution applies its weight; `size` is the larger side's, which a transposed convolution writes.

    pad: the padding node before it that is part of its operator, and then `padding` and `mode` are that node's.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    mode: str = "zeros"
    pad: Node | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class LinearMap:
    """x ↦ W x + b.

    outputs: the axes of the stored weight that are output channels (those of a transposed convolution are its groups too).
    input_axis, output_axis: where the channels of x and y are, counted from the end; None where they are several axes. plain:
    whether y = W x + b along these axes with W = `matrix()` or, with a kernel, `operator()`; not so where a factor, further
    constants or a weight for each sample come in.
    """

    input: Operand
    weight: Operand
    bias: Operand | None = None
    outputs: tuple[int, ...] = (0,)
    input_axis: int | None = -1
    output_axis: int | None = -1
    plain: bool = True
    kernel: Kernel | None = None

    @property
    def fixed(self) -> bool:
        """Whether weight and bias are constants, so that it is a map of its input alone."""
        return isinstance(self.input, Node) and not isinstance(self.weight, Node) and not isinstance(self.bias, Node)

    @property
    def key(self) -> object:
        """Equal for the same weight applied in the same way, which has the same norm.

        The weight is the constant itself, which a table of known norms keeps alive: neither an address that is used again nor a
        view of other numbers at the same address can be taken for it.
        """
        return self.weight, self.outputs, self.kernel

    @property
    def channels(self) -> int:
        """How many output channels it has."""
        groups = self.kernel.groups if self.kernel is not None and self.kernel.transposed else 1
        return groups * math.prod(self.weight.shape[axis] for axis in self.outputs)

    @property
    def taps(self) -> int:
        """How many positions of x one output reads."""
        return 1 if self.kernel is None else math.prod(self.weight.shape[2:])

    def matrix(self) -> torch.Tensor:
        """The weight in float64 as (output channels, everything else), however it is stored."""
        value = self._value()
        if self.kernel is not None and self.kernel.transposed:  # (in, out/groups, …): channel o of group g is g · out/groups + o
            value = value.reshape(self.kernel.groups, -1, *value.shape[1:]).transpose(1, 2)
        else:
            value = value.permute(*self.outputs, *(axis for axis in range(value.dim()) if axis not in self.outputs))
        return value.reshape(self.channels, value.numel() // max(self.channels, 1))

    def operator(self) -> Convolution:
        """The convolution that it is; a transposed one is its adjoint, and has the same norm."""
        assert self.kernel is not None
        how = self.kernel
        return Convolution(self._value(), how.size, how.stride, how.padding, how.dilation, how.groups, how.mode)

    def norm(self) -> tuple[Magnitude, str]:
        """An upper bound on its operator norm where it is `plain`, and the method that gave it."""
        return (spectral_norm(self.matrix()), "exact") if self.kernel is None else self.operator().norm()

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor | None = None) -> LinearMap:
        """y ↦ scale ⊙ y + shift behind it, one number per output channel, as a part of its weight and bias."""
        value = self._value()
        if self.kernel is not None and self.kernel.transposed:
            grouped = value.reshape(self.kernel.groups, -1, *value.shape[1:])
            weight = (grouped * scale.reshape(self.kernel.groups, 1, -1, *[1] * (value.dim() - 2))).reshape(value.shape)
        else:
            sizes = [value.shape[axis] if axis in self.outputs else 1 for axis in range(value.dim())]
            weight = value * scale.reshape(sizes)
        bias = self.bias.double() * scale if isinstance(self.bias, Constant) else None
        if shift is not None:
            bias = shift if bias is None else bias + shift
        return replace(
            self, weight=self._made(weight, self.weight), bias=None if bias is None else self._made(bias, self.bias or self.weight)
        )

    def _value(self) -> torch.Tensor:
        assert isinstance(self.weight, Constant), "its weight depends on the input"
        return self.weight.double()

    @staticmethod
    def _made(value: torch.Tensor, of: Operand) -> Constant:
        assert isinstance(of, Constant)
        return Constant(value, of.sources, of.learned)


@dataclass(frozen=True)
class Normalizer:
    """(x − mean)/√(variance + ε) γ + β, in any of its kinds.

    kind: batch, layer, group, instance, rms or l2. axes: over which statistics are taken (for groups, after splitting
    the channel axis). weight, bias: γ and β in float64 where they are constants; gamma, beta: as they stand in the graph.
    statistics: the running variance as it stands. by_hand: written out by a user; then γ and β are operations of their own
    (`rules.normalizers.completed`).
    """

    kind: str
    epsilon: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    axes: tuple[int, ...]
    groups: int = 1
    running_mean: torch.Tensor | None = None
    running_variance: torch.Tensor | None = None
    placement: str = "inside"  # of ε: √(v + ε) inside, √v + ε outside, max(√v, ε) clamp
    gamma: Operand | None = None
    beta: Operand | None = None
    statistics: Operand | None = None
    by_hand: bool = False

    @property
    def fixed(self) -> bool:
        """Whether it uses running statistics: then it is an affine map."""
        return self.running_variance is not None

    @property
    def centered(self) -> bool:
        return self.kind not in ("rms", "l2")

    @property
    def by_channel(self) -> bool:
        """Whether γ and β are one number per channel, on axis 1, and not one per entry that is normalized together."""
        return self.kind in ("batch", "group", "instance")

    @property
    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """With running statistics: s = γ/√(v + ε) and t = β − s μ of x ↦ s ⊙ x + t."""
        assert self.running_mean is not None and self.running_variance is not None
        scale = (self.running_variance + self.epsilon).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = -scale * self.running_mean
        return scale, shift if self.bias is None else shift + self.bias


@dataclass(frozen=True)
class Activation:
    """y_i = φ(x_i).

    kinked: its slope jumps at 0. relu_like: it is x ↦ max(x, s x) for some s. usual: networks use it as an activation, unlike
    exp or abs. scalar: φ itself.
    """

    kinked: bool
    relu_like: bool
    usual: bool
    scalar: Callable[[], Scalar] | None = field(default=None, compare=False, repr=False)

    @property
    def bounded(self) -> bool:
        """Whether φ has finite limits on both sides, as tanh has."""
        return self.scalar is not None and all(math.isfinite(value) for value, _ in self.scalar().ends)

    @property
    def off_below(self) -> bool:
        """Whether φ is 0 for every negative number, as ReLU is."""
        return self.scalar is not None and bool((self.scalar().value(BELOW_ZERO) == 0).all())


@dataclass(frozen=True)
class Scaling:
    """x ↦ factor ⊙ x, the factor a number, a constant or a parameter."""

    input: Node
    factor: Operand | float


@dataclass(frozen=True)
class Sum:
    """The sum of some nodes, and of a constant if there is one. plain: none of them has a factor."""

    terms: tuple[Node, ...]
    constant: Constant | None = None
    plain: bool = True


@dataclass(frozen=True)
class Attention:
    """softmax(scale · q kᵀ + mask) v."""

    query: Operand
    key: Operand
    value: Operand
    scale: float
    fixed: bool  # no mask that depends on the input, nothing dropped


@dataclass(frozen=True)
class Reshaping:
    """The same entries in the same order."""


@dataclass(frozen=True)
class Permuting:
    """The same entries in another order, as in a transposition."""


@dataclass(frozen=True)
class Joining:
    """Values laid end to end along an axis."""

    axis: int


@dataclass(frozen=True)
class Softmax:
    """exp(x)/Σ exp(x) along an axis, or its logarithm."""

    input: Node
    axis: int


@dataclass(frozen=True)
class Random:
    """It draws random numbers, as dropout does in training. rate: the share of entries that dropout sets to 0, else None."""

    rate: float | None = None


Reading = LinearMap | Normalizer | Activation | Scaling | Sum | Attention | Reshaping | Permuting | Joining | Softmax | Random
