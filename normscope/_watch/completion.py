"""What happens to a row on the writer's thread, just before it is written and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from normscope._watch.budget import GROWTH
from normscope._watch.columns import PRODUCTS
from normscope._watch.distributed import ShardedSpectra
from normscope._watch.guard import Guard
from normscope._watch.preparation import LayerTable
from normscope._watch.replicas import Replicas
from normscope._watch.rows import products
from normscope.findings.finding import Finding
from normscope.findings.over_time import Chronicle, Recent, line
from normscope.findings.rows import ROW_RULES

OnRow = Callable[[Mapping[str, Any], list[str]], None]


class Completion:
    """Adds what needs other processes or other rows, looks for early warnings, and calls the user's own function."""

    def __init__(
        self, table: LayerTable, guard: Guard, said: Callable[[Finding], None], every: Chronicle, tell: Callable[..., None],
        spectra: ShardedSpectra | None, replicas: Replicas, on_row: OnRow | None,
    ) -> None:  # fmt: skip
        """every: judges every step. tell: writes an event."""
        self.table, self.guard, self.said, self.spectra, self.on_row = table, guard, said, spectra, on_row
        self.replicas = replicas
        self.chronicle = Chronicle(table.rows, ROW_RULES, every.since)
        self.every, self.tell, self._tell_at, self._last = every, tell, 0.0, 0
        self._products = {name: Recent() for name in PRODUCTS}

    @property
    def findings(self) -> list[Finding]:
        return self.chronicle.findings

    def __call__(self, row: dict[str, Any]) -> None:
        self._last = int(row["step"])
        self._add_spectral_norms(row)
        row.update(self.guard.run("trends", self._trends, row) or {})
        hashes = row.pop("hashes", None)
        self._judge(row)
        if hashes is not None:
            for step, differing in self.guard.run("hashes of replicas", self.replicas.exchange, row["step"], hashes) or []:
                row["differing_ranks"] = float(len(differing))
                self._judge({"step": step, "differing_ranks": row["differing_ranks"], "differing": differing})
        if row["step"] >= self._tell_at:
            self.guard.run("what was judged", self._tell_judged, row["step"])

    def _judge(self, row: Mapping[str, Any]) -> None:
        for finding in self.guard.run("findings", self.chronicle.look, row) or []:
            self.said(finding)

    def _tell_judged(self, step: int) -> None:
        """What clean lines of a report rest on: now and then, since a run may be killed at any time, and at the end."""
        self._tell_at = max(step * GROWTH, step + 10)
        judged = self.every.judged | self.chronicle.judged
        numbers = {rule: [one.since, one.steps, one.last, one.layers] for rule, one in sorted(judged.items())}
        self.tell("judged", step=step, rules=numbers)

    def end(self) -> None:
        """Say until when findings held that were told when they began, and what was judged."""
        self.guard.run("what was judged", self._tell_judged, self._last)
        for finding in self.guard.run("findings", self.chronicle.untold) or []:
            self.said(finding)

    def _trends(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Slope of each log10 product over the recent steps, in decades per step."""
        for name, recent in self._products.items():
            if math.isfinite(value := row.get(name, math.nan)):
                recent.add(row["step"], value)
        return {f"{name}_trend": line(list(recent.held))[0] for name, recent in self._products.items()}

    def show(self, row: Mapping[str, Any]) -> None:
        """Call the user's own function with a row that has been written: a copy, whatever it does with it."""
        if self.on_row is not None:
            self.guard.run("on_row", self._show, self.on_row, row)

    def _show(self, on_row: OnRow, row: Mapping[str, Any]) -> None:
        try:
            on_row(deepcopy(dict(row)), list(self.table.names))
        except Exception:  # the guard's to report
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
