"""Than 2025, Corollaries 18 and 19 as calculators: what the paper's products of norms would say about the cost of training.

They are numbers of the theory, not predictions. Ω and O hide constants. Corollary 18 is a lower bound over all Lipschitz functions:
it says that some function is slow, not that this loss is. Corollary 19 is an upper bound, and a smaller upper bound does not make
training faster. `normscope claims` runs both beside steps that were counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.upper import upper
from normscope.core.codec import logarithm, named, number, plain
from normscope.core.data import Call, Data, Example, calls_of_graph
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.magnitude import Magnitude, Real, product
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import ResultSequence
from normscope.ledger import LayerRow, ledger

CAVEATS = (
    "constants hidden in Ω and O are left out: compare numbers, do not read them as steps",
    "Corollary 18 holds for the worst Lipschitz function, not for this loss: a start may be stationary at step 0",
    "Corollary 19 has the rate L/α², the authors' slides L²/α³; an upper bound that shrinks does not make training faster",
)
RESIDUAL = "branches meet in this network: the products are the paper's numbers, and bound nothing here"


def least_iterations(constant: Real, alpha: float) -> Magnitude:
    """L/α, Corollary 18: Ω of it, for any method that uses generalized gradients, in the worst case."""
    return Magnitude(constant) / alpha


def evaluations(constant: Real, alpha: float) -> Magnitude:
    """L/α², Corollary 19 as it is printed."""
    return Magnitude(constant) / alpha**2


def cited_evaluations(constant: Real, alpha: float) -> Magnitude:
    """L²/α³, from the slides: error ∛(L²/T) after T evaluations."""
    return Magnitude(constant) ** 2 / alpha**3


@dataclass(frozen=True)
class LayerCost:
    """A weight layer i of K: `behind` is s_{i+1}⋯s_K, and `normalizers` σ^{-(K-i+1)} with σ = min_k ‖1/σ_k‖⁻¹, 1 without any."""

    name: str
    behind: Magnitude
    normalizers: Magnitude
    alpha: float

    @property
    def least_iterations(self) -> Magnitude:
        """Without normalizers, Corollary 18."""
        return least_iterations(self.behind, self.alpha)

    @property
    def evaluations(self) -> Magnitude:
        """Without normalizers, Corollary 19."""
        return evaluations(self.behind, self.alpha)

    @property
    def evaluations_normalized(self) -> Magnitude:
        """With them, Corollary 19."""
        return evaluations(self.behind * self.normalizers, self.alpha)

    @property
    def cited_evaluations(self) -> Magnitude:
        """With them, by the rate of the slides."""
        return cited_evaluations(self.behind * self.normalizers, self.alpha)


@dataclass(frozen=True, repr=False)
class TrainingCost(ResultSequence[LayerCost]):
    """One row for every weight layer but the last, in the order of computation."""

    schema = "normscope.training_cost/1"

    layers: tuple[LayerCost, ...]
    alpha: float
    caveats: tuple[str, ...] = CAVEATS

    def to_dict(self) -> dict[str, Any]:
        """Every layer with its products, and the paper's numbers from them."""
        return {
            "schema": self.schema,
            "alpha": self.alpha,
            "layers": [
                {
                    "name": row.name,
                    "behind_log10": plain(row.behind.log10),
                    "normalizers_log10": plain(row.normalizers.log10),
                    **named(row, "least_iterations", "evaluations", "evaluations_normalized", "cited_evaluations"),
                }
                for row in self.layers
            ],
            "caveats": list(self.caveats),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainingCost:
        """The table that `to_dict` described."""
        alpha = number(content["alpha"])
        rows = (
            LayerCost(row["name"], logarithm(row["behind_log10"]), logarithm(row["normalizers_log10"]), alpha)
            for row in content["layers"]
        )
        return cls(tuple(rows), alpha, tuple(content["caveats"]))

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("layer", overflow="ellipsis", max_width=27)
        for title in ("s behind", "Ω(s/α)", "O(s/α²)", "normalizers", "O(σs/α²)", "slides"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.layers:
            numbers = (
                row.behind,
                row.least_iterations,
                row.evaluations,
                row.normalizers,
                row.evaluations_normalized,
                row.cited_evaluations,
            )
            table.add_row(row.name, *map(str, numbers))
        return Group(Text(f"to an α-stationary point, α = {self.alpha:g}\n"), table, *(Text(f"· {line}") for line in self.caveats))


@earlier(positional=2)
@boundary
def training_cost(model: nn.Module, example: Example, *, alpha: float = 0.01, data: Data | None = None) -> TrainingCost:
    """Iterations and evaluations to an α-stationary point by Than 2025, Corollaries 18 and 19, layer by layer.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> with torch.no_grad():
    ...     _ = model[2].weight.copy_(3 * torch.eye(2))
    >>> training_cost(model, torch.zeros(1, 2), alpha=0.1)[0].least_iterations
    Magnitude(30.0)

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch.
    alpha: the norm of the gradient at which a point counts as stationary.
    data: where variances are measured for normalizers without running statistics; the example if not given.
    """
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha must be a number above 0, got {alpha}")
    graph = certifiable_graph(model, example, "eval", None)
    above = upper(graph)
    call = Call.of(example)
    rows = ledger(graph, above, calls_of_graph(data, call))
    weights = [number for number, row in enumerate(rows) if row.spectral_norm is not None]
    costs = tuple(_cost(rows, number, alpha) for number in weights[:-1])
    residual = any(len(link.sources) > 1 for link in above.links)
    return TrainingCost(costs, alpha, (*CAVEATS, RESIDUAL) if residual else CAVEATS)


def _cost(rows: Sequence[LayerRow], number: int, alpha: float) -> LayerCost:
    gains = [row.gain_paper for row in rows if row.gain_paper is not None]
    after = [row for row in rows[number + 1 :] if row.gain_paper is not None]
    behind = product(row.spectral_norm for row in rows[number + 1 :] if row.spectral_norm is not None)
    return LayerCost(rows[number].name, behind, max(gains) ** len(after) if gains else Magnitude(1), alpha)
