"""What happens to a row on the writer's thread, just before it is written and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
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

    def show(self, row: Mapping[str, Any]) -> None:
        """Call the user's own function with a row that has been written: a copy, whatever it does with it."""
        if self.on_row is not None:
            self.guard.run("on_row", self._show, self.on_row, row)

    def _show(self, on_row: OnRow, row: Mapping[str, Any]) -> None:
        try:
            on_row(deepcopy(dict(row)), list(self.table.names))
        except Exception:
            raise
        except BaseException as error:  # sys.exit() would end this thread, and with it the recording
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _add_spectral_norms(self, row: dict[str, Any]) -> None:
        shards = row.pop("shards", None)
        if self.spectra is None or shards is None:
            return
        found = self.guard.run("spectral norms of shards", self.spectra.norms, shards, row["step"]) or {}
        for index, (norm, residual) in found.items():
            row["spectral_norm"][index], row["spectral_residual"][index] = norm, residual
        row.update(products(row, self.table.layers))
