"""A run as Parquet or CSV."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from normscope._watch.columns import METRICS
from normscope._watch.reading import Run


def to_parquet(run: Run, path: Path) -> list[Path]:
    """One file: the run's table as it is, lists included; the layers' names are in the schema's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(run.table(), path)
    return [path]


def to_csv(run: Run, directory: Path) -> list[Path]:
    """Two files: steps.csv with a row per sampled step, layers.csv with a row per sampled step and layer."""
    directory.mkdir(parents=True, exist_ok=True)
    table = run.table()
    scalars = table.select([name for name in table.column_names if name not in METRICS])
    files = {"steps.csv": scalars, "layers.csv": by_layer(table, run.layer_names)}
    for name, content in files.items():
        csv.write_csv(content, directory / name)
    return [directory / name for name in files]


def by_layer(table: pa.Table, names: list[str]) -> pa.Table:
    """The list columns as one row per step and layer: step, layer, then every metric."""
    steps = pa.chunked_array([pc.list_parent_indices(table[METRICS[0]].combine_chunks())])
    columns = {
        "step": pc.take(table["step"], steps),
        "layer": pa.array(names * len(table), pa.string()),
        **{name: pc.list_flatten(table[name].combine_chunks()) for name in METRICS},
    }
    return pa.table(columns)
