"""The ledger: what each layer contributes, under every definition that the papers use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from normscope.certify.depth import separation_along, upper_along
from normscope.certify.links import Link
from normscope.certify.upper import Upper
from normscope.core.bracket import Witness
from normscope.core.data import Call
from normscope.core.magnitude import Magnitude
from normscope.core.statistics import RunningVariance
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import frobenius_norm, spectral_norm
from normscope.rules.affine import weight_of
from normscope.rules.normalizers import completed, gains, set_variances
from normscope.rules.readings import LinearMap, Normalizer
from normscope.rules.registry import registry


@dataclass(frozen=True)
class LayerRow:
    """One weight layer or one normalizer; what does not apply is None.

    spectral_norm: of the layer as an operator on its input's shape, an upper bound. matrix_norm: of the weight reshaped
    to (out, everything else), as papers have it; None where that is not known. parameters: what the weight or γ and β are made of,
    by name. gain, gain_paper, gain_paper_affine, gain_layer: a normalizer's gain by
    the definitions of docs/audit.md (tight, paper, paper_affine, layer). input_std: √ of the mean channel variance of
    what enters, on the data. share_of_log_upper: this layer's part of log(upper), negative where it lowers the bound.
    upper_here: bound on the constant from the input to this layer's output, composed layer by layer. upper_without_gains: the same
    with every normalizer's gain taken as 1. separation: how many times as far apart the witness's two points are here.
    reads: the rows whose outputs reach this one, through operations that have no row.
    """

    name: str
    kind: str
    spectral_norm: Magnitude | None = None
    matrix_norm: Magnitude | None = None
    frobenius_norm: Magnitude | None = None
    gain: Magnitude | None = None
    gain_paper: Magnitude | None = None
    gain_paper_affine: Magnitude | None = None
    gain_layer: Magnitude | None = None
    input_std: float | None = None
    share_of_log_upper: float | None = None
    upper_here: Magnitude | None = None
    upper_without_gains: Magnitude | None = None
    separation: Magnitude | None = None
    reads: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> LayerRow:
        """The row that an audit's JSON holds."""

        def read(name: str, kind: str) -> Any:
            value = content.get(name, ())  # audits of before have no `parameters`
            if value is None or kind == "str":
                return value
            return tuple(value) if "tuple" in kind else Magnitude.parse(value) if "Magnitude" in kind else float(value)

        return LayerRow(**{item.name: read(item.name, str(item.type)) for item in fields(LayerRow)})


GAIN_COLUMNS = ("gain", "gain_paper", "gain_paper_affine", "gain_layer")  # in the order of `gains`
SMALLEST_LOG = 0.05  # of upper: below it, shares of the logarithm are quotients of two small numbers

PRODUCTS = {
    "weights_spectral": "spectral_norm",
    "weights_matrix": "matrix_norm",
    "weights_frobenius": "frobenius_norm",
    "normalizers_tight": "gain",
    "normalizers_paper": "gain_paper",
    "normalizers_paper_affine": "gain_paper_affine",
    "normalizers_layer": "gain_layer",
}


def products(rows: Sequence[LayerRow]) -> dict[str, float]:
    """log10 of the product of each quantity over all layers that have it; 0 where none has."""
    return {
        name: sum(getattr(row, column).log10 for row in rows if getattr(row, column) is not None)
        for name, column in PRODUCTS.items()
    }


def layers_in_products(rows: Sequence[LayerRow]) -> dict[str, int]:
    """Over how many layers each product runs."""
    return {name: sum(getattr(row, column) is not None for row in rows) for name, column in PRODUCTS.items()}


def ledger(graph: Graph, above: Upper, batches: Iterable[Call], witness: Witness | None = None) -> list[LayerRow]:
    """A row for every weight layer and normalizer, in the order of computation, with statistics from `batches`."""
    nodes = _layers(graph)
    statistics = measure(graph, nodes, batches)
    shares = shares_of_log_upper(above)
    names, users = _names(nodes), graph.users
    bounds, bare = upper_along(above), upper_along(above, normalizers=False)
    apart = separation_along(graph, nodes, witness) if witness is not None else {}
    reads = _reads(graph, names)
    known: dict[object, tuple[Magnitude | None, Magnitude]] = {}
    rows: list[LayerRow] = []
    for node in nodes:
        common: dict[str, Any] = {
            "input_std": statistics[node].input_std,
            "share_of_log_upper": shares.get(node),
            "upper_here": bounds.get(node),
            "upper_without_gains": bare.get(node),
            "separation": apart.get(node),
            "reads": reads[node],
        }
        normalizer, weight = completed(node, users), weight_of(node)
        if normalizer is not None:
            affine = (part for part in (normalizer.gamma, normalizer.beta) if isinstance(part, Constant))
            common["parameters"] = tuple(name for part in affine for name in part.sources)
            gains = gains_of(node, normalizer, statistics[node])
            rows.append(LayerRow(names[node], f"{normalizer.kind}_norm", **common, **gains))
        elif weight is not None:
            applied = registry.reading(node, LinearMap)
            key = weight if applied is None else applied.key
            norm = above.norms.get(node)
            if norm is None and applied is not None and applied.plain:
                norm = applied.norm()[0]
            if key not in known:
                dense = applied is not None and applied.plain and applied.kernel is None  # then the operator is the matrix
                known[key] = norm if dense else _matrix_norm(weight, applied), frobenius_norm(weight.value)
            rows.append(LayerRow(names[node], node.op, norm, *known[key], **common, parameters=weight.sources))
    return rows


def _layers(graph: Graph) -> list[Node]:
    return [node for node in graph if weight_of(node) is not None or registry.reading(node, Normalizer) is not None]


def _matrix_norm(weight: Constant, applied: LinearMap | None) -> Magnitude | None:
    """The norm of a weight as (out, everything else); of a matrix whichever axis is the output's."""
    if applied is None and len(weight.shape) != 2:
        return None
    return spectral_norm(weight.value if applied is None else applied.matrix(), slack=1e-6)


def weights_without_row(graph: Graph) -> dict[str, str]:
    """Learned tensors of two or more axes that no row shows, and the operation that reads each."""
    users, shown = graph.users, set()
    for node in _layers(graph):
        normalizer = completed(node, users)
        parts = node.constants if normalizer is None else (*node.constants, normalizer.gamma, normalizer.beta)
        shown |= {name for part in parts if isinstance(part, Constant) for name in part.sources}
    read = ((node, constant) for node in graph for constant in node.constants if constant.learned)
    found = {name: node.label for node, part in read if max(part.rank, len(part.shape)) > 1 for name in part.sources}
    return {name: reader for name, reader in found.items() if name not in shown}


def _names(nodes: Sequence[Node]) -> dict[Node, str]:
    """Module paths, numbered where a module is used more than once."""
    count: dict[str, int] = {}
    names = {}
    for node in nodes:
        base = node.path or node.name
        count[base] = count.get(base, 0) + 1
        names[node] = base if count[base] == 1 else f"{base}#{count[base]}"
    return names


def _reads(graph: Graph, names: Mapping[Node, str]) -> dict[Node, tuple[str, ...]]:
    """For every node, the nearest rows before it on any path."""
    nearest: dict[Node, tuple[str, ...]] = {}
    for node in graph:
        before = (names[source] for source in node.inputs if source in names)
        beyond = (name for source in node.inputs if source not in names for name in nearest[source])
        nearest[node] = tuple(dict.fromkeys((*before, *beyond)))
    return nearest


# statistics ----------------------------------------------------------------------------------------------------------


@dataclass
class InputStatistics:
    """What entered one node: variance a channel, and for a normalizer the variance of each set that it normalizes."""

    channels: RunningVariance = field(default_factory=RunningVariance)
    smallest: torch.Tensor | None = None  # per group, over all samples
    total: float = 0.0
    sets: int = 0

    @property
    def input_std(self) -> float | None:
        return float(self.channels.variance.mean().sqrt()) if self.channels.count else None


def measure(graph: Graph, nodes: Sequence[Node], batches: Iterable[Call]) -> dict[Node, InputStatistics]:
    """Statistics of the inputs of `nodes` over all batches, one pass."""
    sources = list(dict.fromkeys(node.input for node in nodes if len(node.inputs) == 1))
    found = {node: InputStatistics() for node in nodes}
    if not sources:
        return found
    capture = graph.batched_capture(sources)
    with torch.no_grad():
        for call in batches:
            inputs = [value[None] for value in call.floats()] if graph.whole_batch else call.floats()
            values = dict(zip(sources, capture(*inputs), strict=True))
            for node in nodes:
                if len(node.inputs) == 1:
                    value = values[node.input]
                    # the traced batch axis joins ours; a vector has none, so every sample comes by itself
                    for part in [value.flatten(0, 1)] if value.dim() > 2 else value:
                        _update(found[node], node, part)
    return found


def _update(statistics: InputStatistics, node: Node, value: torch.Tensor) -> None:
    """value: (samples, …) as the node reads it, with its own batch axis at 0, or one vector."""
    reading = registry.reading(node)
    if value.dim() == 0 or not value.is_floating_point():
        return
    axis: int | None = 1
    if isinstance(reading, LinearMap):
        axis = reading.input_axis
    elif isinstance(reading, Normalizer) and not reading.by_channel and value.dim() - 1 in reading.axes:
        axis = -1
    place = -1 if axis is None else axis % value.dim()
    statistics.channels.update(value, place if 0 < place < value.dim() else value.dim() - 1)
    if not isinstance(reading, Normalizer) or reading.kind == "batch":
        return
    spread = set_variances(reading, value)
    least = (spread if reading.kind in ("group", "instance") else spread.reshape(-1, 1)).amin(0)
    statistics.smallest = least if statistics.smallest is None else torch.minimum(statistics.smallest, least)
    statistics.total += float(spread.sum())
    statistics.sets += spread.numel()


def gains_of(node: Node, normalizer: Normalizer, statistics: InputStatistics) -> dict[str, Any]:
    """The normalizer's gain by each definition of docs/audit.md; None where its input is no number or beyond all numbers."""
    if normalizer.fixed:
        variance = normalizer.running_variance
    elif normalizer.kind == "batch":
        variance = statistics.channels.variance if statistics.channels.count else None
    else:
        variance = statistics.smallest
    if variance is None:
        return dict.fromkeys(GAIN_COLUMNS)
    by_channel = normalizer.fixed or normalizer.kind in ("batch", "instance")
    mean = variance.mean() if by_channel else torch.tensor(statistics.total / max(statistics.sets, 1), dtype=torch.float64)
    width = 1 if normalizer.kind == "group" else math.prod(node.shape[axis] for axis in normalizer.axes)
    found = map(float, gains(normalizer, variance, mean, width))
    return {column: None if math.isnan(gain) else Magnitude(gain) for column, gain in zip(GAIN_COLUMNS, found, strict=True)}


# shares --------------------------------------------------------------------------------------------------------------


def shares_of_log_upper(above: Upper) -> dict[Node, float]:
    """Each layer's part of log(upper), as a fraction.

    The bound U is a function of all gains g. Along g_k^t, t from 0 to 1, log U changes by ∫ Σ_k e_k(t) log g_k dt with
    e_k the elasticity of U in g_k, so layer k is given log g_k ∫ e_k dt (Aumann–Shapley). On a chain that is log g_k;
    in a residual network the rest, log U at t = 0, belongs to the sums.
    """
    whole = above.bound.log
    if not math.isfinite(whole) or abs(whole) < SMALLEST_LOG:
        return {}
    nodes, weights = np.polynomial.legendre.leggauss(8)
    average: dict[Link, float] = dict.fromkeys(above.links, 0.0)
    for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        for link, elasticity in _elasticities(above, float(t)).items():
            average[link] += float(weight) * elasticity
    return {node: average[link] * log / whole for link in above.links for node, log in link.shares.items() if math.isfinite(log)}


def _elasticities(above: Upper, t: float) -> dict[Link, float]:
    """∂ log U/∂ log g of every link at gains g^t: forward for the bound at each node, backward for the parts."""
    at = dict.fromkeys(above.graph.inputs, 0.0)  # logarithms
    parts: dict[Link, list[float]] = {}
    for link in above.links:
        arriving = [t * factor.log + at[source] for factor, source in zip(link.gain.factors, link.sources, strict=True)]
        power = 2.0 if link.gain.separate else 1.0
        top = max(arriving)
        if not math.isfinite(top):
            at[link.node], parts[link] = top, [0.0] * len(arriving)
            continue
        terms = [math.exp(power * (a - top)) for a in arriving]
        at[link.node] = top + math.log(sum(terms)) / power
        parts[link] = [term / sum(terms) for term in terms]
    weight = {above.graph.output: 1.0}
    elasticity = {}
    for link in reversed(above.links):
        reach = weight.get(link.node, 0.0)
        elasticity[link] = reach
        for source, part in zip(link.sources, parts[link], strict=True):
            weight[source] = weight.get(source, 0.0) + reach * part
    return elasticity
