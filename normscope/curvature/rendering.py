"""What was measured, and what came out, as text and as JSON."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from normscope.core.text import inert, visible
from normscope.curvature.lanczos import ORDERS

if TYPE_CHECKING:
    from normscope.curvature.spectrum import Curvature

SHOWN = 10  # eigenvalues on a line


def text(curvature: Curvature) -> str:
    """What was measured, then what was computed so far."""
    lines = [
        f"{curvature.matrix.name} of {_model(curvature)}, {curvature.size:,} parameters, {curvature.mode} mode",
        f"loss {curvature.loss:.6g} over {_samples(curvature.grouping)}; {_statistics(curvature)}",
        _quotient(curvature),
    ]
    names = {"largest": "largest", "smallest": "smallest", "magnitude": "largest by magnitude"}
    for which in ORDERS:
        pairs = curvature.results.get(which, [])
        if pairs:
            values = ", ".join(f"{pair.value:.5g} ± {pair.error:.1g}" for pair in pairs[:SHOWN])
            lines.append(f"{names[which]}: {values}{', …' if len(pairs) > SHOWN else ''}")
    if "trace" in curvature.results:
        lines.append(f"trace: {curvature.results['trace']}")
    if "condition" in curvature.results:
        lines.append(f"condition: {curvature.results['condition']}")
    if "density" in curvature.results:
        density = curvature.results["density"]
        lines.append(
            f"density: from {density.nodes.min():.4g} to {density.nodes.max():.4g}, sampling error {density.sampling_error:.2%}"
        )
    return inert("\n".join(visible(line) for line in lines if line))


def content(curvature: Curvature) -> dict[str, Any]:
    """What was computed so far, for JSON."""
    results = curvature.results
    found: dict[str, Any] = {
        "schema": curvature.schema,
        "model": _model(curvature),
        "matrix": curvature.matrix.name,
        "mode": curvature.mode,
        "quotient": curvature.symmetries is not None,
        "parameters": curvature.size,
        "loss": curvature.loss,
        "batch_sizes": list(curvature.grouping),
        "batch_statistics": list(curvature.batch_statistics),
        "eigenvalues": {
            which: [{"value": pair.value, "error": pair.error} for pair in results[which]] for which in ORDERS if which in results
        },
    }
    for name in ("trace", "condition"):
        if name in results:
            found[name] = dict(vars(results[name]))
    if "density" in results:
        density = results["density"]
        found["density"] = {"nodes": density.nodes.tolist(), "weights": density.weights.tolist(), "width": density.width}
    return found


def _model(curvature: Curvature) -> str:
    return type(curvature.objective.model).__name__


def _samples(sizes: tuple[int, ...]) -> str:
    """797 samples in batches: 3 of 256, 1 of 29."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    parts = [f"{count} of {size}" for size, count in runs[:4]]
    return f"{sum(sizes):,} samples in batches: " + ", ".join(parts) + (", …" if len(runs) > 4 else "")


def _statistics(curvature: Curvature) -> str:
    layers = curvature.batch_statistics
    return f"{len(layers)} normalizers with the statistics of each batch" if layers else "no batch statistics"


def _quotient(curvature: Curvature) -> str:
    if curvature.symmetries is None:
        return ""
    moved = sum(group.count for group in curvature.symmetries.groups)
    before = curvature.objective.value()
    return (
        f"quotient: {moved:,} directions of {len(curvature.symmetries.groups)} symmetries projected out, at the canonical "
        f"representative (loss there {curvature.loss:.6g}, here {before:.6g})"
    )
