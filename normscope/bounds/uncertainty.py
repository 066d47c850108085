"""How far the cells' frequencies in a sample may be from their probabilities, for all losses at once.

With q_i = m_i/m the frequency and p_i the probability of cell i, and any a_i in [0, C], Σ (p_i − q_i) a_i ≤ C Σ_{i∈T} (q_i − p_i)₊,
for both positive parts of p − q have the same sum, and q_i > p_i only where there are samples. Nothing here depends on the model:
the bounds hold for all models at once, also for one that was trained on the sample. Proofs: docs/laws.md.
"""

from __future__ import annotations

import math

import torch


def stated_uncertainty(seen: int, cells: int, size: int, loss_bound: float, delta: float) -> float:
    """g(D, δ) = C(√2 + 1)√(|T| ln(2N/δ)/m) + 2C|T| ln(2N/δ)/m, as Than 2025, Theorem 20 has it."""
    part = seen * math.log(2 * cells / delta) / size
    return loss_bound * ((math.sqrt(2) + 1) * math.sqrt(part) + 2 * part)


def sharper_uncertainty(counts: torch.Tensor, cells: int, loss_bound: float, delta: float) -> float:
    """C · min(√(2 ln(2N/δ)/m) Σ_T √(m_i/m), ½√((N − 1)/m) + √(ln(2/δ)/2m)): each holds with probability at least 1 − δ/2.

    The first by Chernoff's bound in each cell, at most √(2|T| ln(2N/δ)/m) and so less than the stated g; the second by
    McDiarmid's inequality for the total variation distance, whose mean is at most ½Σ√(p_i(1 − p_i)/m).
    """
    size = float(counts.sum())
    by_cell = math.sqrt(2 * math.log(2 * cells / delta) / size) * float((counts / size).sqrt().sum())
    together = math.sqrt((cells - 1) / size) / 2 + math.sqrt(math.log(2 / delta) / (2 * size))
    return loss_bound * min(by_cell, together)
