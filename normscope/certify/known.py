"""What bounds on several regions of one graph share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from normscope.certify.columns import Linearized
from normscope.certify.jacobian import Jacobian
from normscope.certify.precise import PreciseMiddle
from normscope.graph.graph import Graph
from normscope.rules.registry import Context, Gain


@dataclass(frozen=True, eq=False)
class Derivative:
    """A graph linearized at a point, errors of its values there, and J, once it was made: none depends on the region around it."""

    graph: Graph
    middle: Sequence[torch.Tensor]
    linearized: Linearized
    precise: PreciseMiddle
    jacobian: Jacobian = field(default_factory=Jacobian)

    def of(self, graph: Graph, middle: Sequence[torch.Tensor]) -> bool:
        """Whether it is the one of this graph at this point."""
        return graph is self.graph and all(map(torch.equal, middle, self.middle))


class Known(dict[object, Gain]):
    """Gains of linear maps by signature, and the derivative that was made last, of which a search over radii needs only one."""

    derivative: Derivative | None = None

    def derivative_at(self, graph: Graph, middle: Sequence[torch.Tensor], facts: Context) -> Derivative:
        """As far as it was made, or made now as far as its linear parts."""
        if self.derivative is None or not self.derivative.of(graph, middle):
            self.derivative = Derivative(graph, middle, Linearized(graph, facts), PreciseMiddle(graph))
        return self.derivative

    def forget(self) -> None:
        """Let go of the derivative, which may be large."""
        self.derivative = None
