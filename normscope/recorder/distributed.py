"""Several processes: one directory each, one schedule, and norms of weights that no process holds whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed, nn

from normscope.recorder.budget import Budget
from normscope.recorder.layers import Layer
from normscope.recorder.schedule import OwnSchedule, Schedule, SharedSchedule
from normscope.recorder.stepping import StepView

_watches = itertools.count()  # the same in every process, because each starts its watches in the same order


@dataclass
class Processes:
    """This process among those that train together."""

    directory: Path
    rank: int = 0
    size: int = 1
    store: Any = None

    @classmethod
    def here(cls, model: nn.Module, run: Path) -> Processes:
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return cls(run)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.PrefixStore(f"normscope/{next(_watches)}", distributed.distributed_c10d._get_default_store())
        return cls(run / f"rank-{rank}", rank, size, store)

    def agree(self, step: int) -> int:
        """Rank 0's number of the last step, for everybody."""
        if self.store is None:
            return step
        if self.rank == 0:
            self.store.set("start", str(step))
        self.store.wait(["start"], timedelta(seconds=60))
        return int(self.store.get("start"))

    def schedule(self, budget: Budget) -> Schedule:
        return OwnSchedule(budget) if self.store is None else SharedSchedule(budget, self.rank, self.store)

    def sharded(self, model: nn.Module, parameter: str | None) -> bool:
        return False

    def follow_spectra(self, view: StepView, layers: Sequence[Layer]) -> None:
        pass

    def complete(self, row: dict[str, Any], layers: Sequence[Layer]) -> None:
        pass

    def close(self) -> None:
        pass
