"""Runs as the recorder writes them, of any size and at once: the tests of reports need no training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normscope._watch.columns import METRICS, SCALARS, schema
from normscope._watch.life import FINISHED
from normscope._watch.store import Writer
from normscope.report.summary import CLEAN

ROWS_AT_ONCE = 500


def layer(name: str, role: str = "weight") -> dict[str, Any]:
    return {
        "name": name,
        "kind": "Linear",
        "role": role,
        "shape": [8, 8],
        "scale_free": role == "weight",
        "in_product": role == "weight",
    }


def write_run(
    path: Path, steps: int, names: Sequence[str], *, finding: dict[str, Any] | None = None, closed: bool = True, seed: int = 0
) -> Path:
    """A run whose metrics wander, each layer's about a level of its own."""
    random = np.random.default_rng(seed)
    layers = [layer(name) for name in names]
    writer = Writer(path, on_failure=_fail)
    manifest = {
        "schema": "normscope.run/1", "created": 0.0, "model": "Sequential", "outline": {}, "layers": layers,
        "optimizer": {"kind": "SGD", "groups": [{"lr": 0.1}]}, "config": {"budget": 0.01, "every": None},
        "process": {"rank": 0, "world_size": 1}, "versions": {"normscope": "0", "torch": "0", "python": "0"},
    }  # fmt: skip
    writer.begin(manifest, schema(layers))
    writer.event("started", step=0, process=0)
    levels = {name: random.normal(size=len(names)) for name in METRICS}
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "time": float(step)}
        row.update({name: float(random.lognormal()) for name in SCALARS})
        row.update(samples=step, losses_read=step, gradients_read=step)
        row.update({name: np.exp(levels[name] + 0.1 * random.normal(size=len(names))) for name in METRICS})
        writer.row(row)
        while writer._waiting.qsize() > ROWS_AT_ONCE:  # rows beyond the queue's limit would be dropped
            pass
    writer.event("judged", process=0, step=steps, rules={rule: [0, steps, steps, len(names)] for rule in CLEAN})
    if finding is not None:
        writer.event("finding", **finding)
    if closed:
        writer.event("closed", step=steps, steps=steps, sampled_steps=steps, overhead=0.01, setup_seconds=0.1, probe_seconds=0.0)
    writer.close(FINISHED if closed else None)
    return path


def _fail(error: BaseException) -> None:
    raise error
