"""The constant against the number of normalizers: the same network with more and more of them removed (Than's question 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.lipschitz import bracket
from normscope.certify.upper import upper
from normscope.core.bracket import Bracket
from normscope.core.data import Call, Example
from normscope.core.deprecation import earlier
from normscope.core.errors import boundary
from normscope.core.magnitude import Magnitude
from normscope.core.papers import Plot
from normscope.core.region import Region
from normscope.core.rendering import Table
from normscope.core.result import ResultSequence
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
        return f"{self.removed:>4} removed  {self.bracket.sides}  {visible(self.last)}"


@dataclass(frozen=True, repr=False)
class Ablation(ResultSequence[Ablated]):
    """The network with 0, 1, …, all of its normalizers removed."""

    schema = "normscope.ablation/1"

    rows: tuple[Ablated, ...]

    def to_dict(self) -> dict[str, Any]:
        """How many were removed, the last of them, and the bracket."""
        rows = [{"removed": row.removed, "last": row.last, "bracket": row.bracket.to_dict()} for row in self.rows]
        return {"schema": self.schema, "rows": rows}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Ablation:
        """The brackets that `to_dict` described, without their witnesses."""
        return cls(tuple(Ablated(row["removed"], row["last"], Bracket.from_dict(row["bracket"])) for row in content["rows"]))

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """bracket: both sides against the number of normalizers that were removed."""
        from normscope.report.plots import plot

        counts = [row.removed for row in self.rows]
        sides: dict[str, list[Magnitude | None]] = {
            "at most": [row.bracket.upper for row in self.rows],
            "at least": [row.bracket.lower for row in self.rows],
        }
        series = {
            name: (counts, [side.log10 if side is not None and side.finite and side else math.nan for side in values])
            for name, values in sides.items()
        }
        drawn = Plot("The constant without the first normalizers", "normalizers removed", "log10 of L", series, "lines+points")
        return {"bracket": partial(plot, drawn)}

    def render(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("removed", justify="right")
        table.add_column("bracket", overflow="fold")
        table.add_column("the last one", overflow="fold")
        for row in self.rows:
            table.add_row(str(row.removed), row.bracket.sides, row.last)
        return table


@earlier(positional=3)
@boundary
def normalizer_ablation(
    model: torch.nn.Module,
    example: Example,
    *,
    region: Region | None = None,
    output: str | int | None = None,
    effort: float = 0.2,
) -> Ablation:
    """Bracket a network with 0, 1, …, all of its normalizers replaced by the identity, from the input on.

    region: a `Ball` or `Box` of inputs; None for all of them.
    output: name or position of the output that is meant, where the model returns several.
    effort: how long to search for each lower bound, and how much each upper bound may cost.

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
    return Ablation(tuple(rows))
