"""What bounds on several regions of one graph share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normscope.certify.columns import Linearized
from normscope.certify.jacobian import Jacobian
from normscope.graph.graph import Graph
from normscope.rules.registry import Gain


@dataclass(frozen=True, eq=False)
class Derivative:
    """A graph linearized at a point, and J there: they depend on the point, not on the region around it."""

    graph: Graph
    middle: Sequence[torch.Tensor]
    linearized: Linearized
    jacobian: Jacobian

    def of(self, graph: Graph, middle: Sequence[torch.Tensor]) -> bool:
        """Whether it is the one of this graph at this point."""
        return graph is self.graph and all(map(torch.equal, middle, self.middle))


class Known(dict[object, Gain]):
    """Gains of linear maps by signature, and the derivative that was made last, of which a search over radii needs only one."""

    derivative: Derivative | None = None

    def forget(self) -> None:
        """Let go of the derivative, which may be large."""
        self.derivative = None
