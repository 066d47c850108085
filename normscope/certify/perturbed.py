"""The norm of a matrix with uncertain rank-one parts: sup ‖J + Σ_u δ_u g_u y_uᵀ‖ over all |δ_u| ≤ 1.

With E = Σ δ_u g_u y_uᵀ and w_u = J y_u,

    (J + E)(J + E)ᵀ = JJᵀ + Σ_u δ_u (w_u g_uᵀ + g_u w_uᵀ) + EEᵀ ⪯ JJᵀ + Σ_u (t_u w_u w_uᵀ + g_u g_uᵀ/t_u) + ‖E‖² I

for any t_u > 0, because t w wᵀ + g gᵀ/t ∓ (w gᵀ + g wᵀ) = (√t w ∓ g/√t)(√t w ∓ g/√t)ᵀ. With t_u = |v·g_u|/|v·w_u|, v the first
left singular vector of J, this is exact to first order: a part counts by how far it is aligned with what J stretches most. And ‖E‖
is at most Σ ‖g_u‖‖y_u‖, and at most ‖G S‖ ‖S⁻¹ Y‖ for any diagonal S > 0.
"""

from __future__ import annotations

import math

import torch

from normscope.core.rounding import gamma, length
from normscope.operators.dense import gram_norms, spectral_norm

ROUNDS = 6
SLACK = 1e-9
MOST_ROWS = 1500  # of Y up to which the norm of S⁻¹Y is found exactly


def perturbed_norm(jacobian: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> float:
    """An upper bound. jacobian: (outputs, d). columns: g_u in rows, (symbols, outputs). rows: y_u, (symbols, d)."""
    plain = float(spectral_norm(jacobian))
    sizes = length(columns, 1), length(rows, 1)
    used = (sizes[0] > 0) & (sizes[1] > 0)
    if not bool(used.any()):
        return plain
    g, y, size_g, size_y = columns[used], rows[used], sizes[0][used], sizes[1][used]
    apart = float((size_g * size_y).sum()) * (1 + SLACK)
    w = y @ jacobian.T
    lost = 4 * gamma(jacobian.shape[1] + 8) * float(length(jacobian)) * apart  # of w
    least = math.inf
    tilt = size_g / (length(w, 1) + 1e-300)
    blend = 1.0
    for _ in range(ROUNDS):
        quadratic = jacobian @ jacobian.T + (w * tilt[:, None]).T @ w + (g / tilt[:, None]).T @ g
        trace = float(quadratic.diagonal().sum())
        if not math.isfinite(float(quadratic.abs().sum())):  # squares overflow
            break
        vectors = torch.linalg.eigh((quadratic + quadratic.T) / 2).eigenvectors
        norm = float(gram_norms(quadratic[None], jacobian.shape[1] + len(g))[0])
        least = min(least, norm * norm + 1e-11 * trace)
        top = vectors[:, -1]
        blend = max(blend / 3, 0.01)  # of the whole lengths, so that no t is extreme
        tilt = ((g @ top).abs() + blend * size_g) / ((w @ top).abs() + blend * length(w, 1) + 1e-300)
    squared = least + lost + _square_of_rest(g, y, size_g, size_y, apart)
    return min(plain + apart, math.sqrt(squared)) * (1 + SLACK)  # squares may overflow


def _square_of_rest(g: torch.Tensor, y: torch.Tensor, size_g: torch.Tensor, size_y: torch.Tensor, apart: float) -> float:
    """‖E‖²."""
    balance = (size_y / size_g).sqrt()[:, None]
    left, right = g * balance, y / balance
    first = float(gram_norms((left.T @ left)[None], len(left))[0])
    second = float(spectral_norm(right)) if min(right.shape) <= MOST_ROWS else float(length(right))
    norm = min(apart, first * second * (1 + SLACK))
    return norm * norm
