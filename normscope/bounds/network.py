"""A network as theorems on norms see it: linear maps with their norms, and what stands between them.

The theorems speak of chains x → A_L φ(A_{L−1} … φ(A_1 x)) of matrices and fixed maps with φ(0) = 0. A convolution is the matrix
that it is on its input's shape. Biases are entries of the matrix [[A, b], [0, 1]] that acts on (x, 1). What keeps a model from
being such a chain is listed, and then no bound is certified.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import checked_pass
from normscope.core.data import Example
from normscope.core.errors import Refusal
from normscope.core.magnitude import ONE, ZERO, Magnitude, product, root_sum_square
from normscope.core.rounding import length
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import frobenius_norm
from normscope.rules.activations import homogeneity
from normscope.rules.affine import constant_map
from normscope.rules.readings import Activation, LinearMap, Normalizer, Scaling, Sum
from normscope.rules.registry import registry


@dataclass(frozen=True)
class MatrixLayer:
    """A linear map A with bias b, as a matrix (outputs, inputs) on the entries of one sample.

    spectral: ‖A‖₂, certified. frobenius: ‖A‖_F. rows: Σ_i ‖A_i‖₂ over its rows, ‖Aᵀ‖_{2,1}. bias: ‖b‖₂ over all entries added.
    Norms of convolutions count the kernel at every position, also where padding cuts it off. parameters: free numbers in A and b.
    """

    name: str
    spectral: Magnitude
    frobenius: Magnitude
    rows: Magnitude
    bias: Magnitude
    inputs: int
    outputs: int
    parameters: int
    shared: bool = False  # one number stands at several places of A

    def augmented(self, last: bool) -> MatrixLayer:
        """[[A, b], [0, 1]], or [A b] for the last layer, whose constant output nothing reads."""
        carry = ZERO if last else ONE
        frobenius = root_sum_square([self.frobenius, self.bias, carry])
        rows = self.rows + self.bias * math.sqrt(self.outputs) + carry
        spectral = min(_largest_of_block(self.spectral, self.bias, carry), frobenius)
        return replace(
            self, spectral=spectral, frobenius=frobenius, rows=rows, bias=ZERO, inputs=self.inputs + 1,
            outputs=self.outputs + (not last),
        )  # fmt: skip


@dataclass(frozen=True)
class Network:
    """The layers of a model in order, and what the theorems need to know about the rest.

    gains: Lipschitz constants of the maps that stand between layers. obstacles: why this is no chain of matrices and fixed maps
    with φ(0) = 0. not_homogeneous, not_piecewise: maps that are not entrywise with φ(cx) = cφ(x), or not ReLU-like.
    """

    layers: tuple[MatrixLayer, ...]
    gains: tuple[Magnitude, ...] = ()
    obstacles: tuple[str, ...] = ()
    not_homogeneous: tuple[str, ...] = ()
    not_piecewise: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def biased(self) -> bool:
        return any(layer.bias for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def width(self) -> int:
        """The largest number of entries between layers, input and output included."""
        return max(max(layer.inputs, layer.outputs) for layer in self.layers)

    @property
    def without_biases(self) -> Network:
        """The same function of (x, 1), without biases; maps between layers pass on the 1, so none has a constant below 1."""
        if not self.biased:
            return self
        last = len(self.layers) - 1
        layers = tuple(layer.augmented(i == last) for i, layer in enumerate(self.layers))
        return replace(self, layers=layers, gains=tuple(max(gain, ONE) for gain in self.gains))

    @property
    def slope(self) -> Magnitude:
        """∏ of the constants of the maps between layers."""
        return product(self.gains)

    def product(self, norm: str) -> Magnitude:
        """slope · ∏ of one norm of the layers."""
        return self.slope * product(getattr(layer, norm) for layer in self.layers)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about every number made from these norms."""
        return (*(f"not covered by the theorem: {obstacle}" for obstacle in self.obstacles), *self.remarks)


def network(model: nn.Module, example: Example, remarks: Sequence[str] = ()) -> Network:
    """The layers of a model without running statistics (`bounds.folding.folded`), in eval mode.

    >>> found = network(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    >>> [(layer.name, layer.outputs) for layer in found.layers], found.obstacles
    ([('0', 3), ('2', 2)], ())

    remarks: what is to be said beside every number made from the norms.
    """
    graph = certifiable_graph(model, example, "eval", None)
    found = _Reading(graph)
    if not found.layers:
        raise Refusal("no layer to bound", ["the model has no linear map or convolution"], "")
    obstacles, bent, curved = (tuple(dict.fromkeys(part)) for part in (found.obstacles, found.bent, found.curved))
    buffers = dict.fromkeys(name for node in graph for c in node.constants if not c.learned for name in c.sources)
    fixed = [f"buffers do not depend on the training data: {', '.join(buffers)}"] if buffers else []
    return Network(tuple(found.layers), tuple(found.gains), obstacles, bent, curved, (*remarks, *fixed))


class _Reading:
    """One walk through a graph, sorting its nodes into layers and what stands between them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.facts = graph, checked_pass(graph)
        self.layers: list[MatrixLayer] = []
        self.gains: list[Magnitude] = []
        self.obstacles: list[str] = []
        self.bent: list[str] = []  # not entrywise and positively homogeneous
        self.curved: list[str] = []  # not piecewise linear of two pieces
        self.last: Node | None = None  # the node of the last layer, while a bias may still be added to it
        self.trailing: list[str] = []  # maps behind the last layer that are not linear
        weights = Counter(mark for node in graph for constant in node.constants for mark in _marks(constant))
        self.reused = {mark for mark, count in weights.items() if count > 1}
        for node in graph:
            if not node.is_input:
                self._read(node)
        self.curved += [f"{label}, behind the last layer," for label in self.trailing]
        self.obstacles += [f"{name} is a parameter or buffer of an activation or normalizer" for name in graph.absorbed]
        readers = {node: len(users) for node, users in graph.users.items() if node is not graph.output}
        if len(graph.inputs) > 1 or any(count > 1 for count in readers.values()):
            self.obstacles.append("the graph is not a chain, so a product over its layers does not bound the whole")

    def _read(self, node: Node) -> None:
        learned = [constant for constant in node.constants if constant.learned]
        reading, applied = registry.reading(node), constant_map(node)
        if len(node.inputs) != 1:
            self.obstacles.append(f"{node.label} has {len(node.inputs)} inputs")
        elif applied is not None:
            self._add(self._map(node, applied), node)
        elif isinstance(reading, Normalizer):
            self.gains.append(self._gain(node))
            self.obstacles.append(f"{node.label} divides by statistics of its input")
        elif isinstance(reading, Scaling) and learned:
            self._add(_diagonal(node, learned[0], self._gain(node)), node)
        elif isinstance(reading, Sum) and learned and node.input is self.last and node.input.shape == node.shape:
            self._shift(node, learned[0])
        elif learned:
            self.obstacles.append(f"{node.label} has parameters but is not a layer")
        else:
            self._between(node)

    def _add(self, layer: MatrixLayer, node: Node) -> None:
        shared = layer.shared or any(mark in self.reused for constant in node.constants for mark in _marks(constant))
        self.layers.append(replace(layer, shared=shared))
        self.last, self.trailing = node, []

    def _shift(self, node: Node, constant: Constant) -> None:
        own, layer = frobenius_norm(_at_zero(node)), self.layers[-1]
        self.layers[-1] = replace(layer, bias=layer.bias + own, parameters=layer.parameters + constant.value.numel())
        self.last = node

    def _between(self, node: Node) -> None:
        rule = registry.find(node)
        assert rule is not None
        gain = self._gain(node)
        self.gains.append(gain)
        if not gain.finite:
            self.obstacles.append(f"{node.label} has no finite Lipschitz constant")
        elif bool(torch.as_tensor(_at_zero(node)).any()):
            self.obstacles.append(f"{node.label} does not map 0 to 0")
        if not rule.linear(node):
            self.trailing.append(node.label)
            if rule.slopes(node) is None or homogeneity(node) != 1.0:
                self.bent.append(node.label)
            reading = registry.reading(node, Activation)
            if reading is None or not reading.relu_like:
                self.curved.append(node.label)

    def _gain(self, node: Node) -> Magnitude:
        return self.facts.gain(node).factors[0]

    def _map(self, node: Node, applied: LinearMap) -> MatrixLayer:
        weight, bias, kernel = applied.weight, applied.bias, applied.kernel
        assert isinstance(weight, Constant)
        inputs, outputs = (math.prod(part.shape[1:]) for part in (node.input, node))
        transposed = kernel is not None and kernel.transposed
        repeats = math.prod(node.input.shape[2:]) if transposed else outputs // applied.channels
        frobenius = frobenius_norm(weight.value) * math.sqrt(repeats)
        rows = frobenius * math.sqrt(outputs)  # by Cauchy and Schwarz
        if not transposed:
            rows = min(rows, Magnitude(float(length(applied.matrix(), 1).sum())) * repeats)
        shift = ZERO
        if isinstance(bias, Constant):
            shift = frobenius_norm(bias.value) * math.sqrt(outputs // bias.value.numel())
        parameters = sum(part.value.numel() for part in (weight, bias) if isinstance(part, Constant))
        spectral = min(self._gain(node), frobenius)
        return MatrixLayer(node.path or node.name, spectral, frobenius, rows, shift, inputs, outputs, parameters, repeats > 1)


def _diagonal(node: Node, constant: Constant, spectral: Magnitude) -> MatrixLayer:
    """Multiplication by a parameter, entry by entry."""
    value = constant.double()
    size = math.prod(node.shape[1:])
    entries = value.abs().expand(node.shape[1:] if value.dim() < len(node.shape) else node.shape)
    return MatrixLayer(
        node.path or node.name, spectral, frobenius_norm(entries), Magnitude(float(entries.sum())), ZERO,
        math.prod(node.input.shape[1:]), size, value.numel(), size > value.numel(),
    )  # fmt: skip


def _at_zero(node: Node) -> torch.Tensor:
    found = node.apply(torch.zeros(node.input.shape, dtype=torch.float64))
    return found[0] if isinstance(found, (tuple, list)) else found


def _largest_of_block(spectral: Magnitude, bias: Magnitude, carry: Magnitude) -> Magnitude:
    """‖[[s, b], [0, c]]‖₂, which is at least ‖[[A, b], [0, c]]‖₂ for any A of norm s and b of norm b."""
    total = spectral**2 + bias**2 + carry**2
    if not total:
        return ZERO
    determinant = float((spectral * carry) ** 2 / total / total)  # of the Gram matrix, over its squared trace
    return (total * (0.5 + 0.5 * math.sqrt(max(1 - 4 * determinant, 0.0)))).sqrt().widened(2**-45)


def _marks(constant: Constant) -> set[object]:
    """What two uses of one weight have in common: the names that it comes from, or its place in memory, if names are tied."""
    return {*constant.sources, constant.value.data_ptr()} if constant.learned else set()
