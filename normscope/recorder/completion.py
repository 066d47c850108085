"""What happens to a row on the writer's thread, just before it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from normscope.recorder.distributed import ShardedSpectra
from normscope.recorder.findings import EarlyWarning, Watchman
from normscope.recorder.guard import Guard
from normscope.recorder.preparation import Table
from normscope.recorder.rows import products

OnRow = Callable[[Mapping[str, Any], list[str]], None]


class Completion:
    """Adds what needs other processes or other rows, looks for early warnings, and calls the user's own function."""

    def __init__(
        self, table: Table, guard: Guard, event: Callable[..., None], spectra: ShardedSpectra | None, on_row: OnRow | None
    ) -> None:
        self.table, self.guard, self.event, self.spectra, self.on_row = table, guard, event, spectra, on_row
        self.watchman = Watchman(table.rows)
        self.findings: list[EarlyWarning] = []

    def __call__(self, row: dict[str, Any]) -> None:
        self._add_spectral_norms(row)
        row.update(self.guard.run("trends", self.watchman.trends, row) or {})
        for warning in self.guard.run("findings", self.watchman.look, row) or []:
            self.findings.append(warning)
            self.event("finding", **warning.to_dict())
        if self.on_row is not None:
            self.guard.run("on_row", self.on_row, row, self.table.names)

    def _add_spectral_norms(self, row: dict[str, Any]) -> None:
        shards = row.pop("shards", None)
        if self.spectra is None or shards is None:
            return
        found = self.guard.run("spectral norms of shards", self.spectra.norms, shards, row["step"]) or {}
        for index, (norm, residual) in found.items():
            row["spectral_norm"][index], row["spectral_residual"][index] = norm, residual
        row.update(products(row, self.table.layers))
