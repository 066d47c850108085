"""The constant against the number of normalizers: the same network with more and more of them removed (Than's question 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.lipschitz import bracket
from normscope.certify.upper import upper
from normscope.core.bracket import Bracket
from normscope.core.data import Call, Example
from normscope.core.errors import boundary
from normscope.core.region import Region
from normscope.core.text import visible
from normscope.rules.readings import Normalizer
from normscope.rules.registry import registry


@dataclass(frozen=True)
class Ablated:
    """A network without its first `removed` normalizers, weights unchanged; `last` is the one removed last."""

    removed: int
    last: str
    bracket: Bracket

    def __str__(self) -> str:
        return f"{self.removed:>4} removed  {self.bracket}  {visible(self.last)}"


@boundary
def normalizer_ablation(
    model: torch.nn.Module,
    example: Example,
    region: Region | None = None,
    output: str | int | None = None,
    effort: float = 0.2,
) -> list[Ablated]:
    """Bracket a network with 0, 1, …, all of its normalizers replaced by the identity, from the input on.

    Attention without a normalizer before it has no finite constant on all inputs, so the upper side may become infinite.
    """
    graph = certifiable_graph(model, example, "eval", output)
    normalizers = [node for node in graph if registry.reading(node, Normalizer) is not None and len(node.inputs) == 1]
    call = Call.of(example)
    rows = []
    for removed in range(len(normalizers) + 1):
        reduced = graph.replace({node: node.input for node in normalizers[:removed]})
        found = bracket(reduced, upper(reduced, region=region, effort=effort), call, region, effort=effort)
        last = normalizers[removed - 1] if removed else None
        rows.append(Ablated(removed, "" if last is None else last.path or last.name, found))
    return rows
