"""What `ns.watch` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normscope._watch.completion import OnRow
from normscope._watch.probes import Probe
from normscope._watch.sinks import Sink
from normscope.symmetry.report import SymmetryReport


@dataclass(frozen=True)
class Options:
    """All but the cadence."""

    layers: str | None = None
    symmetries: SymmetryReport | None = None
    scaler: torch.amp.GradScaler | None = None
    probe: Probe | None = None
    on_row: OnRow | None = None
    start_step: int | None = None
    quiet: bool = False
    resume: bool = False
    overwrite: bool = False
    sinks: Sequence[str | Sink] = ()
    numbered: bool = False  # whether run="auto" was asked for
