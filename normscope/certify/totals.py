"""What J, all symbols and κ add up to at the output: the bound that affine forms give."""

from __future__ import annotations

import math

import torch

from normscope.certify.perturbed import perturbed_norm
from normscope.certify.sweep import Sweep
from normscope.certify.symbols import Contribution, Symbols, added
from normscope.core.rounding import SQUARES_LOST, SUMMED, gamma, length
from normscope.operators.dense import spectral_norm


def total(sweep: Sweep) -> tuple[float, float]:
    """A bound on the change of the whole output, and the part of it that is ‖J‖."""
    output, matrix = sweep.graph.output, sweep.jacobian.matrix
    straight = float(sweep.straight_sets(output, sweep.whole)[0])
    if matrix is not None:
        straight = min(straight, float(spectral_norm(matrix)) * sweep.unit)
    for part in sweep.parts:
        if part.relay is None:
            part.bound = added(part.symbols, part.columns) if part.columns is not None else math.inf
    found = straight + float(sweep.bent_in(output, sweep.whole)[0])
    if matrix is not None:
        found = min(found, straight + sum(part.bound for part in sweep.parts), _jointly(sweep, matrix))
    _share(sweep)
    return (found + sweep.left[output]) * SUMMED, straight


def _share(sweep: Sweep) -> None:
    """What the symbols of a relay add is shared by what came to it, from the last relay to the first."""
    for relay in reversed(sweep.plan.relays):
        own = next((part for part in sweep.parts if part.node is relay), None)
        brought = [part for part in sweep.parts if part.relay is relay]
        passed = sum(part.passed for part in brought)
        if own is None or not (0 < passed < math.inf and math.isfinite(own.bound)):
            continue
        whole = max(passed, own.symbols.length)
        for part in brought:
            part.bound = own.bound * part.passed / whole
        own.bound *= 1 - passed / whole


def _jointly(sweep: Sweep, jacobian: torch.Tensor) -> float:
    """The same with η_u = δ_u (y_u Δx + what is bent there), if known: ‖J + Σ δ_u G_u y_uᵀ‖ and a rest."""
    aligned = [part for part in sweep.parts if part.rows is not None and part.columns is not None]
    if not aligned:
        return math.inf
    columns, rows, least, most = (
        torch.cat([getattr(part, name) for part in aligned]) for name in ("columns", "rows", "least", "most")
    )
    middle, spread, matrix, lost = (least + most) / 2, (most - least) / 2 * (1 + 1e-15), jacobian, 0.0
    if bool(middle.any()):  # δ_u is between `least` and `most`: their middle becomes part of the matrix
        matrix = jacobian + (columns * middle[:, None]).T @ rows
        lost = gamma(len(rows) + 8) * float(length(columns, 1) @ length(rows, 1) + length(jacobian)) * SUMMED
    return perturbed_norm(matrix, columns * spread[:, None], rows) + lost + sum(_rest(part) for part in sweep.parts)


def _rest(part: Contribution) -> float:
    """What symbols add beyond multiples of rows of J."""
    if part.rows is None or part.rest is None or part.columns is None:
        return part.bound
    symbols, sizes = part.symbols, part.rest
    own = torch.zeros_like(symbols.group_sizes).index_add(0, symbols.groups, sizes.square()).sqrt() * SUMMED + SQUARES_LOST
    return added(Symbols(symbols.places, symbols.scale, sizes, symbols.groups, own), part.columns)
