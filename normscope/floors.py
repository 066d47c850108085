"""Floors: what no weights can bring the constant of a network with BN below (docs/laws.md, Floors, Theorems 1 and 3).

For a chain Linear → BN → 1-Lipschitz activation with the data's statistics, the constant up to the last BN is at least
‖γ_K‖/√tr Cov x: what leaves that BN has variance Σγ² over the data, and an L-Lipschitz map raises variance by at most L².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.core.magnitude import Magnitude, product
from normscope.graph.graph import Graph, Node
from normscope.ledger import LayerRow
from normscope.operators.dense import spectral_norm
from normscope.rules.readings import LinearMap, Normalizer, Reshaping
from normscope.rules.registry import registry

AGREEMENT = 1.1  # how far, as a factor, a layer's mean running variance may be from the data's


@dataclass(frozen=True)
class Floor:
    """layer: the last BN. value: the floor of the constant up to it. product: ∏‖Γ_kD_k⁻¹W_k‖ up to it, as the weights are."""

    layer: str
    value: Magnitude
    product: Magnitude

    def __str__(self) -> str:
        return (
            f"no weights with these widths and data bring the product up to {self.layer} below 10^{self.value.log10:+.1f} "
            f"(it is 10^{self.product.log10:+.1f})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"layer": self.layer, "log10": self.value.log10, "product_log10": self.product.log10}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Floor:
        value, made = (Magnitude.from_log10(content[name]) for name in ("log10", "product_log10"))
        return Floor(content["layer"], value, made)


def floor_of(graph: Graph, rows: Sequence[LayerRow]) -> Floor | None:
    """The floor, where the network has exactly that form and its running variances are, layer by layer, those of the data.

    rows: of the ledger, which has measured what enters each layer; else None.
    """
    pairs, found = chain_of(graph), {row.name: row.input_std for row in rows}
    if not pairs:
        return None
    deviation, inputs = found.get(pairs[0][0].path), pairs[0][0].input.shape[-1]
    last = registry.reading(pairs[-1][1], Normalizer)
    if not deviation or last is None or not all(_calibrated(node, found.get(node.path)) for _, node in pairs):
        return None
    size = pairs[-1][1].shape[-1] ** 0.5 if last.weight is None else float(last.weight.double().norm())
    if not size > 0:
        return None
    made = product(_gain(linear, normalizer) for linear, normalizer in pairs)
    return Floor(pairs[-1][1].path or "the last BN", Magnitude(size) / Magnitude(deviation * inputs**0.5), made)


def chain_of(graph: Graph) -> list[tuple[Node, Node]]:
    """(Linear, BN) nodes from the input on, if the network is such a chain up to its last normalizer; else none.

    Both act on vectors; between a BN and the next Linear stand entrywise functions of slope at most 1; nothing is read twice.
    """
    if len(graph.inputs) != 1 or graph.whole_batch:
        return []
    users, node, pairs = graph.users, graph.inputs[0], list[tuple[Node, Node]]()
    while len(users[node]) == 1:
        following = users[node][0]
        if len(following.inputs) != 1:
            break
        if registry.reading(following, Reshaping) is not None and not pairs:
            node = following
        elif _dense(following) and len(users[following]) == 1 and _normalizes(users[following][0]):
            node = users[following][0]
            pairs.append((following, node))
        elif pairs and _gentle(following):
            node = following
        else:
            break
    counted = sum(registry.reading(node, Normalizer) is not None for node in graph.nodes)
    return pairs if counted == len(pairs) else []


def _dense(node: Node) -> bool:
    reading = registry.reading(node, LinearMap)
    return reading is not None and reading.fixed and reading.plain and reading.kernel is None and len(node.shape) == 2


def _normalizes(node: Node) -> bool:
    """Whether it is BN of vectors with running statistics."""
    reading = registry.reading(node, Normalizer)
    return reading is not None and reading.kind == "batch" and reading.fixed and len(node.shape) == 2 and len(node.inputs) == 1


def _gentle(node: Node) -> bool:
    """Whether it is an entrywise function of slope at most 1."""
    rule = registry.find(node)
    slopes = None if rule is None else rule.slopes(node)
    return slopes is not None and max(map(abs, slopes)) <= 1 + 1e-9  # slopes are rounded up


def _calibrated(node: Node, deviation: float | None) -> bool:
    reading = registry.reading(node, Normalizer)
    if reading is None or reading.running_variance is None or not deviation:
        return False
    ratio = float(reading.running_variance.double().mean() + reading.epsilon) / (deviation**2 + reading.epsilon)
    return 1 / AGREEMENT < ratio < AGREEMENT


def _gain(linear: Node, normalizer: Node) -> Magnitude:
    """‖Γ D⁻¹ W‖."""
    weight, reading = registry.reading(linear, LinearMap), registry.reading(normalizer, Normalizer)
    assert weight is not None and reading is not None and reading.running_variance is not None
    scale = (reading.running_variance.double() + reading.epsilon).rsqrt()
    return spectral_norm((scale if reading.weight is None else scale * reading.weight.double())[:, None] * weight.matrix())
