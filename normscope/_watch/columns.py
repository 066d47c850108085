"""What a run holds: one row per sampled step, scalars and one fixed-size list a metric, in the layer order of the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

PRODUCTS = {  # log10 of a product over layers ← the metric that is multiplied
    "log10_weight_product": "spectral_norm",
    "log10_gain_tight": "gain_tight",
    "log10_gain_paper": "gain_paper",
    "log10_gain_paper_affine": "gain_paper_affine",
    "log10_gain_layer": "gain_layer",
}
TRENDS = {f"{name}_trend": name for name in PRODUCTS}  # decades per step, over the recent steps

LATER = (  # the three in the middle only grow
    "total_gradient_norm", "losses_read", "gradients_read", "samples", "differing_ranks", "effective_lr_spread",
)  # fmt: skip
SCALARS = (
    "loss", "accuracy", *PRODUCTS, *TRENDS, "learning_rate", "loss_scale", "overhead",
    *LATER, "sharpness", "gradient_predictiveness", "jacobian_norm",
)  # fmt: skip

WEIGHT_METRICS = (
    "spectral_norm",
    "spectral_residual",
    "rms_to_max_norm",
    "frobenius_norm",
    "gamma_min",
    "gamma_max",
    "beta_min",
    "beta_max",
)
MAGNITUDES = ("largest_input", "input_p99", "massive_channels")
GAIN_METRICS = ("gain_tight", "gain_paper", "gain_paper_affine", "gain_layer")
INPUT_METRICS = (
    "input_variance", "input_variance_min", "input_variance_median", "input_variance_max", *MAGNITUDES, "dead_fraction",
    "running_shift", "running_divergence", "batch_size", *GAIN_METRICS,
)  # fmt: skip
SUMS = ("frobenius_norm", "gradient_norm", "update_norm")  # roots of sums of squares over shards
DOTS = ("gradient_dot_weight", "update_dot_weight")  # sums over shards
MOTION_METRICS = (*SUMS[1:], *DOTS, "update_ratio", "angle", "radial_gradient", "effective_lr", "update_rms", "equilibrium_angle")
BLOCK_METRICS = ("stream_rms", "write_ratio", *MAGNITUDES)  # of what enters a block
ATTENTION_METRICS = ("attention_logit", "attention_entropy")
MOVED_METRICS = ("gamma_moved", "gamma_moved_from_start")
METRICS = tuple(dict.fromkeys(
    [*WEIGHT_METRICS, *INPUT_METRICS, *MOTION_METRICS, *BLOCK_METRICS, "backward_gain", *ATTENTION_METRICS, *MOVED_METRICS]
))  # fmt: skip

NEWER = (  # which older runs lack
    *LATER, *MAGNITUDES[1:], *BLOCK_METRICS[:2], "backward_gain", *ATTENTION_METRICS, *MOVED_METRICS, "update_rms",
    "rms_to_max_norm", "equilibrium_angle", "batch_size",
)  # fmt: skip

Row = Mapping[str, Any]


def schema(layers: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The Arrow schema of a run; its metadata names the layers, so that a segment explains itself."""
    scalars = [pa.field("step", pa.int64()), pa.field("time", pa.float64()), *(pa.field(name, pa.float64()) for name in SCALARS)]
    lists = [pa.field(name, pa.list_(pa.float32(), len(layers))) for name in METRICS]
    return pa.schema([*scalars, *lists], metadata={"layers": json.dumps([layer["name"] for layer in layers])})


def record_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as one batch; what a row lacks is NaN."""
    return pa.record_batch([_column(rows, field) for field in schema], schema=schema)


def row_messages(rows: Sequence[Row], schema: pa.Schema) -> list[pa.Buffer]:
    """Rows as messages of one row each, all of one form."""
    if len(rows) == 1:
        return [record_batch(rows, schema).serialize()]
    batch = record_batch([rows[0], *rows], schema)  # the first slice of a batch would keep the room of all
    return [batch.slice(index, 1).serialize() for index in range(1, len(rows) + 1)]


def _column(rows: Sequence[Row], field: pa.Field) -> pa.Array:
    if not pa.types.is_fixed_size_list(field.type):
        return pa.array([row.get(field.name, np.nan) for row in rows], field.type)
    size = field.type.list_size
    missing = np.full(size, np.nan, np.float32)
    values = np.concatenate([np.asarray(row.get(field.name, missing), np.float32) for row in rows])
    return pa.FixedSizeListArray.from_arrays(pa.array(values), size) if size else pa.array([[]] * len(rows), field.type)


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A list column as an array (rows, layers)."""
    size = column.type.list_size
    chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
    return np.concatenate(chunks).reshape(len(column), size) if chunks else np.empty((0, size), np.float32)
