"""A run in TensorBoard, as it is recorded or afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normscope._watch.columns import METRICS, SCALARS
from normscope._watch.reading import Run
from normscope.core.errors import InputError


class TensorBoard:
    """Writes rows as scalars: `run/loss`, and `spectral_norm/layer1.conv`, one tag per metric and layer.

        ns.watch(model, optimizer, run="runs/name", on_row=TensorBoard("tensorboard/name"))

    metrics: only these lists, because TensorBoard is slow beyond some ten thousand tags.
    """

    def __init__(self, directory: str | Path, metrics: Sequence[str] = METRICS) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError("tensorboard is not installed: pip install 'normscope[tensorboard]'") from error
        self.writer, self.metrics = SummaryWriter(str(directory)), tuple(metrics)

    def __call__(self, row: Mapping[str, Any], layers: Sequence[str]) -> None:
        for tag, value in tagged(row, layers, self.metrics):
            self.writer.add_scalar(tag, value, row["step"], walltime=row["time"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def tagged(row: Mapping[str, Any], layers: Sequence[str], metrics: Sequence[str] = METRICS) -> list[tuple[str, float]]:
    """(tag, value) of everything that a row holds and that is a number; infinity stays, NaN is left out."""
    found = [(f"run/{name}", float(row[name])) for name in SCALARS if name in row]
    found += [(f"{name}/{layer}", float(v)) for name in metrics if name in row for layer, v in zip(layers, row[name], strict=True)]
    return [(tag, value) for tag, value in found if not math.isnan(value)]


def to_tensorboard(run: Run, directory: Path) -> list[Path]:
    """All rows of a run."""
    writer = TensorBoard(directory)
    table, layers = run.table(), run.layer_names
    for batch in table.to_batches():
        for row in batch.to_pylist():
            writer(row, layers)
    writer.close()
    return [directory]
