"""What a sample does in each cell: how many samples, how far apart, how steep the loss, one row per pair of cell and label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from normscope.bounds.losses import Loss
from normscope.bounds.partition import Cells
from normscope.bounds.sample import ObservedBatch


@dataclass(frozen=True, eq=False)
class Locator:
    """A probe: where every sample of a batch lies, and how much its loss differs from that at its cell's centre."""

    name: str
    cells: Cells
    loss: Loss
    outputs: torch.Tensor  # (count, classes): the model at the centres
    held_out: torch.Tensor  # (count,): mean distance of the held-out points of a cell from its centre, 0 where there are none

    def __call__(self, seen: ObservedBatch) -> Mapping[str, torch.Tensor]:
        cell, distance = self.cells.locate(seen.points)
        inside = cell < self.cells.count
        ratio = torch.zeros_like(distance)
        if bool(inside.any()):
            at_center = self.loss(self.outputs[cell[inside]], seen.targets[inside]).double()
            ratio[inside] = ((seen.losses[inside] - at_center).abs() / distance[inside]).nan_to_num(0, 0, 0)  # 0/0 at the centre
        return {self.column("cell"): cell, self.column("distance"): distance, self.column("ratio"): ratio}

    def column(self, name: str) -> str:
        return f"{self.name}: {name}"


@dataclass(frozen=True, eq=False)
class Cellwise:
    """One row for every pair of cell and label that has samples, T of the N pairs, and one for the remainder if it has any."""

    locator: Locator
    columns: Mapping[str, torch.Tensor]
    classes: int
    chances: int = 1  # partitions tried, each with its share of δ

    @property
    def cells(self) -> Cells:
        return self.locator.cells

    @property
    def pairs(self) -> int:
        """N, the remainder included."""
        return self.cells.count * self.classes + 1

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of the pairs that occur, the row of every sample, and m_i."""
        cell, label = self._column("cell"), self.columns["label"]
        code = torch.where(cell < self.cells.count, cell * self.classes + label, self.cells.count * self.classes)
        return torch.unique(code, return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def counts(self) -> torch.Tensor:
        """m_i, of every row."""
        return self._rows[2].double()

    @property
    def weights(self) -> torch.Tensor:
        """m_i/m."""
        return self.counts / self.counts.sum()

    @property
    def cell(self) -> torch.Tensor:
        """The cell of every row; `cells.count` for the remainder."""
        return self._rows[0] // self.classes

    @property
    def label(self) -> torch.Tensor:
        return self._rows[0] % self.classes

    @property
    def remainder(self) -> torch.Tensor:
        """Which row is the remainder's."""
        return self.cell == self.cells.count

    @cached_property
    def losses(self) -> torch.Tensor:
        """F(D_i, h)."""
        return self._mean(self.columns["loss"])

    @cached_property
    def largest_distance(self) -> torch.Tensor:
        """The mean over D_i of the farthest that a point of the cell's ball can be, ‖s − c_i‖ + r_i, at most the diameter."""
        return self._mean(self._column("distance")) + self._of_cell(self.cells.radii)

    @cached_property
    def estimated_distance(self) -> torch.Tensor:
        """λ_i as held-out points have it, through the cell's centre: mean ‖s − c_i‖ + mean ‖x − c_i‖."""
        return self._mean(self._column("distance")) + self._of_cell(self.locator.held_out)

    @cached_property
    def slopes(self) -> torch.Tensor:
        """The largest ‖∇_x f‖ of a row's samples."""
        return self._largest(self.columns["slope"])

    @cached_property
    def ratios(self) -> torch.Tensor:
        """The largest |f(s, y) − f(c_i, y)|/‖s − c_i‖ of a row's samples."""
        return self._largest(self._column("ratio"))

    def by_cell(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every cell with samples and its rows, the fullest first; the remainder is left out."""
        inside = torch.where(~self.remainder)[0]
        full = torch.zeros(self.cells.count, dtype=torch.float64).index_add(0, self.cell[inside], self.counts[inside])
        for cell in full.argsort(descending=True, stable=True)[: int((full > 0).sum())].tolist():
            yield cell, torch.where(self.cell == cell)[0]

    def _column(self, name: str) -> torch.Tensor:
        return self.columns[self.locator.column(name)]

    def _of_cell(self, values: torch.Tensor) -> torch.Tensor:
        """One value per cell as one per row; 0 for the remainder."""
        return torch.cat([values, torch.zeros(1, dtype=values.dtype)])[self.cell]

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(self.counts).index_add(0, self._rows[1], values.double()) / self.counts

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(self.counts).scatter_reduce(0, self._rows[1], values.double(), "amax")
