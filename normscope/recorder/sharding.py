"""Reading a run whose weights lie in shards: norms of the whole from norms of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from normscope.recorder.columns import DOTS, SUMS, matrix
from normscope.recorder.motion import derived


def merge_ranks(tables: Sequence[pa.Table], layers: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The first rank's rows, with ‖w‖² = Σ_r ‖w_r‖² and ⟨a,b⟩ = Σ_r ⟨a_r,b_r⟩ for sharded weights.

    Only steps that every rank recorded can be merged; at the others sharded weights are NaN.
    """
    first = tables[0]
    sharded = np.array([bool(layer.get("sharded")) for layer in layers])
    steps = first["step"].to_numpy()
    sums = {name: np.zeros((len(steps), len(layers))) for name in (*SUMS, *DOTS)}
    for table in tables:
        place = {step: index for index, step in enumerate(table["step"].to_numpy())}
        index = np.array([place.get(step, -1) for step in steps], dtype=int)
        for name, total in sums.items():
            part = matrix(table[name]).astype(np.float64)[index] if len(table) else np.full(total.shape, np.nan)
            part[index < 0] = np.nan
            total += part**2 if name in SUMS else part
    for name in SUMS:
        sums[name] = np.sqrt(sums[name])
    merged = {**sums, **derived(sums)}
    local = matrix(first["frobenius_norm"]).astype(np.float64)
    powers = np.array([layer.get("effective_power") or 0 for layer in layers])
    with np.errstate(all="ignore"):
        merged["effective_lr"] = matrix(first["effective_lr"]) * (local / merged["frobenius_norm"]) ** powers
    for name, values in merged.items():
        whole = np.where(sharded, values, matrix(first[name])).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(whole.ravel()), len(layers))
        first = first.set_column(first.column_names.index(name), first.schema.field(name), column)
    return first
