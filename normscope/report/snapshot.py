"""A run as it is at one moment: read once and checked, so that words, figures and tables of a report agree while it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from normscope._watch.columns import METRICS, NEWER
from normscope._watch.life import FINISHED, Life
from normscope._watch.reading import Run, load_run
from normscope.core.errors import InputError
from normscope.findings.finding import Finding
from normscope.findings.over_time import Judged, last_judged, last_states

DAMAGED = (KeyError, TypeError, AttributeError, ValueError, OSError, pa.ArrowException)  # what a corrupt directory raises
ADVICE = "restore it, or leave it out"


@dataclass(frozen=True)
class Snapshot:
    """A `Recording` that does not change."""

    path: Path
    manifest: Mapping[str, Any]
    layers: list[dict[str, Any]]
    events: list[dict[str, Any]]
    held: Mapping[str, np.ndarray] = field(repr=False)
    name: str = ""
    life: Life = FINISHED
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(run: Run | str | Path, columns: Sequence[str]) -> Snapshot:
        """These columns of a run, or of the directory of one. An error says what of it cannot be read."""
        run = run if isinstance(run, Run) else load_run(run)
        try:
            there = [name for name in columns if name not in NEWER or name in run.columns]
            held, life, notes = run.arrays(*there), run.life, tuple(run.notes)
            made = Snapshot(run.path, run.manifest, run.layers, run.events(), held, run.name, life, notes)
            fits = all(isinstance(layer["name"], str) for layer in made.layers)
            fits &= all(values.shape[1:] in ((), (len(made.layers),)) for values in made.held.values())
        except InputError as error:
            raise error if str(run.path) in str(error) else InputError(f"{run.path}: {error}") from error
        except DAMAGED as error:
            raise InputError(f"{run.path} cannot be read ({type(error).__name__}: {error}): {ADVICE}") from error
        if not fits:
            raise InputError(f"{run.path} cannot be read: its manifest does not fit its rows; {ADVICE}")
        if not len(made.held["step"]):
            raise InputError(f"{run.path} holds no rows yet: the first is written after the first optimizer step")
        return made

    @property
    def findings(self) -> list[Finding]:
        steps = self.held["step"]
        events = [event for event in self.events if event["kind"] == "finding"]
        return last_states(events, int(steps[-1]) if len(steps) else None)

    @property
    def judged(self) -> dict[str, Judged]:
        return last_judged(self.events)

    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        return {name: self.held[name] if name in self.held else self._none(name) for name in ("step", *columns)}

    def _none(self, name: str) -> np.ndarray:
        """Of a column that an older run lacks."""
        if name not in NEWER:
            raise KeyError(name)
        return np.full((len(self.held["step"]), len(self.layers)) if name in METRICS else len(self.held["step"]), np.nan)
