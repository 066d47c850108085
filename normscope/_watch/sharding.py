"""Reading a run whose weights lie in shards: norms of the whole from norms of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from normscope._watch.columns import DOTS, SUMS, matrix
from normscope._watch.motion import derived

LEAST, MOST = ("gamma_min", "beta_min"), ("gamma_max", "beta_max")
MERGED = (*SUMS, *DOTS, *LEAST, *MOST, "update_ratio", "angle", "radial_gradient", "effective_lr")  # what merging reads and writes


def merge_ranks(tables: Sequence[pa.Table], layers: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The first rank's rows, with ‖w‖² = Σ_r ‖w_r‖² and ⟨a,b⟩ = Σ_r ⟨a_r,b_r⟩ for sharded weights, and the range of ranges.

    Only steps that every rank recorded can be merged; at the others sharded weights are NaN.
    """
    first = tables[0]
    sharded = np.array([bool(layer.get("sharded")) for layer in layers])
    steps = first["step"].to_numpy()
    replicas = np.array([layer.get("replicas", 1) for layer in layers])
    parts = {name: np.stack([_at(table, name, steps) for table in tables]) for name in (*SUMS, *DOTS, *LEAST, *MOST)}
    sums = {name: (parts[name] ** (2 if name in SUMS else 1)).sum(0) / replicas for name in (*SUMS, *DOTS)}
    sums |= {name: np.sqrt(sums[name]) for name in SUMS}
    merged = {**sums, **derived(sums)}
    merged |= {name: np.fmin.reduce(parts[name]) for name in LEAST} | {name: np.fmax.reduce(parts[name]) for name in MOST}
    local = matrix(first["frobenius_norm"]).astype(np.float64)
    powers = np.array([layer.get("effective_power") or 0 for layer in layers])
    with np.errstate(all="ignore"):
        merged["effective_lr"] = matrix(first["effective_lr"]) * (local / merged["frobenius_norm"]) ** powers
    for name, values in merged.items():
        whole = np.where(sharded, values, matrix(first[name])).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(whole.ravel()), len(layers))
        first = first.set_column(first.column_names.index(name), first.schema.field(name), column)
    return first


def _at(table: pa.Table, name: str, steps: np.ndarray) -> np.ndarray:
    """A metric at the given steps, NaN where the table has none."""
    place = {step: index for index, step in enumerate(table["step"].to_numpy())}
    index = np.array([place.get(step, -1) for step in steps], dtype=int)
    values = np.concatenate([matrix(table[name]).astype(np.float64), np.full((1, table[name].type.list_size), np.nan)])
    return values[index]
