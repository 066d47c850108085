"""Writers of runs, without a training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from normscope._watch import store
from normscope._watch.columns import schema
from tests.watch.fuzzing import LAYERS, fail, row

MANIFEST = {"layers": LAYERS, "model": "Sequential"}


def opened(path: Path, **options: Any) -> store.Writer:
    writer = store.Writer(path, **{"on_failure": fail, **options})
    writer.event("started")
    writer.begin(MANIFEST, schema(LAYERS))
    return writer


def write(writer: store.Writer, steps: range) -> None:
    for step in steps:
        writer.row(row(step))


def flushed(writer: store.Writer, rows: int) -> None:
    while writer.rows < rows and not writer.failed:
        time.sleep(0.001)
