"""Chains of dense layers with entrywise activations, bounded as a whole and usually well below the product of norms.

y ↦ W_K φ_{K−1}(W_{K−1} … φ_1(W_1 y)), each φ_i entrywise with slopes in [a_i, b_i]. All bounds are homogeneous in every
W_i and are computed on W_i/‖W_i‖, so no scale of the weights and no depth overflows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from normscope.core.magnitude import ZERO, Magnitude, product, total
from normscope.operators.dense import UNIT_ROUNDOFF, largest_eigenpair, spectral_norm

UNIT_NORM = 1 + 1e-6  # of W/‖W‖ as float64 computes it, at most
PATTERN_NEURONS = 12  # every activation pattern is enumerated up to here
PATTERN_WORK = 3e10  # multiplications of all patterns together: a few seconds
PATTERN_ENTRIES = 2**20  # of the matrices that are held at once, 8 MB each time, of which there are about five
LIPLT_DEPTH = 32
LIPLT_WORK = 2e9  # depth² × width³ of the chains that LipLT is tried on
SDP_SIZE = 40  # inputs and hidden neurons together: the solver takes a second here and minutes at 150


@dataclass(frozen=True)
class Layer:
    """One affine map of a chain and the slopes of the activation that follows it, (1, 1) for none.

    `norm` is a certified bound on ‖W‖; `matrix` makes W (out, in) in float64 when it is needed.
    """

    matrix: Callable[[], torch.Tensor]
    norm: Magnitude
    width: int
    slopes: tuple[float, float] = (1.0, 1.0)
    neurons: tuple[torch.Tensor, torch.Tensor] | None = None  # slopes neuron by neuron, where a region tells them apart

    def unit(self) -> torch.Tensor:
        """W/‖W‖, so of norm at most 1."""
        matrix = self.matrix()
        largest = float(matrix.abs().max())
        return (matrix / largest) / float(self.norm / largest)

    @property
    def ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(least, largest) slope of every neuron."""
        if self.neurons is not None:
            return self.neurons
        low, high = (torch.full((self.width,), slope, dtype=torch.float64) for slope in self.slopes)
        return low, high

    @property
    def steepest(self) -> float:
        return max(abs(self.slopes[0]), abs(self.slopes[1]))


def bound(layers: Sequence[Layer]) -> tuple[Magnitude, str]:
    """The smallest of all bounds that apply to the chain, and its name."""
    plain = product(layer.norm * layer.steepest for layer in layers)
    inner, last = layers[:-1], layers[-1]
    if not plain or not plain.finite or not inner:
        return plain, "product"
    scale = product(layer.norm for layer in layers) * last.steepest
    found = {"product": product(Magnitude(layer.steepest) for layer in inner)}
    for name, method in METHODS.items():
        value = method(layers)
        if value is not None:
            found[name] = value
            if name == "patterns":
                break  # nothing that bounds all patterns at once can be smaller
    name = min(found, key=lambda key: found[key])
    return scale * found[name], name


def patterns(layers: Sequence[Layer]) -> Magnitude | None:
    """max ‖W_K D_{K−1} … D_1 W_1‖ over all diagonal D_i with entries a_i or b_i.

    The norm is convex in each D_i, so its maximum over all slopes in [a_i, b_i] is at such a corner. Not every corner
    is reached by an input, but no method that treats neurons one by one (LipSDP included) can go below it.
    """
    ranges = [layer.ranges for layer in layers[:-1]]
    count = sum(int((low < high).sum()) for low, high in ranges)
    if count > PATTERN_NEURONS:
        return None
    units = [layer.unit() for layer in layers]
    first, last = _narrowed(units[0].mT), _narrowed(units[-1])
    units[0], units[-1], error = first[0].mT, last[0], first[1] + last[1]
    sizes = [math.prod(unit.shape) for unit in units]
    outputs, inputs = len(units[-1]), units[0].shape[1]
    if 2**count * (sum(sizes[1:]) * inputs + outputs * inputs * min(outputs, inputs)) > PATTERN_WORK:
        return None
    bound = ZERO
    for some in torch.arange(2**count).split(max(1, PATTERN_ENTRIES // max(max(map(len, units)) * inputs, outputs * inputs))):
        bound = _largest_of(some, layers, units, error, bound)
    return bound


def _largest_of(
    numbers: torch.Tensor, layers: Sequence[Layer], units: Sequence[torch.Tensor], error: float, at_least: Magnitude
) -> Magnitude:
    """The largest norm of the patterns with these numbers, whose bits are the choices, if it is above `at_least`."""
    stack = units[0][None]
    for layer, unit in zip(layers[:-1], units[1:], strict=True):
        low, high = layer.ranges
        free = (low < high).nonzero().flatten()
        corners = low.repeat(len(numbers), 1)
        corners[:, free] = torch.where((numbers[:, None] >> torch.arange(len(free))) & 1 > 0, high[free], low[free])
        numbers = numbers >> len(free)
        error = _product_error(unit, stack, error) * layer.steepest
        stack = unit @ (corners[:, :, None] * stack)
    return spectral_norm(stack, error, at_least)


def _narrowed(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """R with ‖matrix · B‖ = ‖R · B‖ for every B, of no more rows than columns, and how far R is from one (Frobenius).

    Householder's QR factorizes a matrix within γ̃_mn ‖A‖_F of A (Higham 2002, Theorem 19.4), with an exactly orthogonal Q.
    """
    rows, columns = matrix.shape
    if rows <= columns:
        return matrix, 0.0
    factor = torch.linalg.qr(matrix, mode="r").R
    return factor, 16 * (rows * columns + 8) * UNIT_ROUNDOFF * float(torch.linalg.vector_norm(matrix))


def liplt(layers: Sequence[Layer]) -> Magnitude | None:
    """LipLT (Fazlyab et al. 2023): φ(y) = c y + r ψ(y) with c = (a+b)/2, r = (b−a)/2 and ψ 1-Lipschitz gives

    m_k = ‖W_k c_{k−1} W_{k−1} ⋯ c_1 W_1‖ + Σ_{j<k} ‖W_k c_{k−1} ⋯ c_{j+1} W_{j+1}‖ r_j m_j.
    """
    depth = len(layers)
    width = max(max(layer.width for layer in layers), layers[0].matrix().shape[1])
    if depth > LIPLT_DEPTH or depth**2 * width**3 > LIPLT_WORK:
        return None
    units = [layer.unit() for layer in layers]
    centers = [(low + high) / 2 for low, high in (layer.slopes for layer in layers)]
    radii = [(high - low) / 2 * (1 + 4 * UNIT_ROUNDOFF) for low, high in (layer.slopes for layer in layers)]
    products: list[tuple[torch.Tensor, float]] = []  # after step k: W_k c ⋯ W_{j+1} for j = 0 … k−1, each with its error
    reached: list[Magnitude] = []
    for k, unit in enumerate(units):
        products = [(centers[k - 1] * (unit @ p), abs(centers[k - 1]) * _product_error(unit, p, e)) for p, e in products]
        products.append((unit, 0.0))
        norms = [spectral_norm(p, e) for p, e in products]
        reached.append(norms[0] + total(norms[j] * radii[j - 1] * reached[j - 1] for j in range(1, k + 1)))
    return reached[-1]


def eclipse_fast(layers: Sequence[Layer]) -> Magnitude | None:
    """ECLipsE-Fast (Xu & Sivaranjani 2024), for slopes in [0, b_i].

    X_0 = I, M_i = W_i X_{i−1}^{-1} W_iᵀ, X_i = λ_i I − λ_i² M_i/4 with λ_i = 2/‖M_i‖, L² = ‖W_K X_{K−1}^{-1} W_Kᵀ‖. The
    proof needs no exact λ_i, only X_i ⪯ λ_i I − λ_i² M_i/4 (docs/laws.md), so adding a bound on the rounding of M_i
    keeps it a theorem. X_i/λ_i has eigenvalues in [1/2, 1], which is what makes that bound small.
    """
    if any(layer.slopes[0] < 0 for layer in layers[:-1]):
        return None
    result = product(Magnitude(layer.slopes[1]) for layer in layers[:-1])
    if not result:
        return ZERO
    whiten: Callable[[torch.Tensor], torch.Tensor] = torch.t  # Wᵀ in the metric X_{i−1}/λ_{i−1}
    for layer in layers[:-1]:
        half = whiten(layer.unit())
        gram = half @ half.mT if half.shape[0] < half.shape[1] else half.mT @ half  # of both, the smaller: their norms are equal
        largest = max(_largest(gram), 1e-150)
        rounding = 64 * (max(half.shape) + 8) ** 2 * UNIT_ROUNDOFF
        above = -gram
        above.diagonal().add_(1.01 * largest)
        if torch.linalg.cholesky_ex(above).info != 0:  # far too low: the metric would be worse conditioned than proved
            return None
        metric, least = -gram / (2 * largest), 1 - rounding / (2 * largest)
        metric.diagonal().add_(least)
        factor, info = torch.linalg.cholesky_ex(metric)
        if info != 0 or rounding > 1e-3 * largest:
            return None
        whiten = _whitening(half / math.sqrt(2 * largest), factor, least)
        result = result * Magnitude(largest / 2).sqrt()
    half = whiten(layers[-1].unit())
    return result * (spectral_norm(half) ** 2 + 64 * (max(half.shape) + 8) ** 2 * UNIT_ROUNDOFF).sqrt()


def _whitening(half: torch.Tensor, factor: torch.Tensor, least: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """W ↦ H with HᵀH = W X^{-1} Wᵀ, where X = `least` I − halfᵀ half.

    X is factor factorᵀ; but where half has fewer rows than columns, as in front of a layer that widens, half halfᵀ takes the place
    of halfᵀ half there, and X^{-1} is (I + halfᵀ (factor factorᵀ)^{-1} half)/least (Woodbury).
    """
    if half.shape[0] >= half.shape[1]:
        return lambda unit: torch.linalg.solve_triangular(factor, unit.mT, upper=False)

    def whiten(unit: torch.Tensor) -> torch.Tensor:
        extra = torch.linalg.solve_triangular(factor, half @ unit.mT, upper=False)
        return torch.cat([unit.mT, extra]) / math.sqrt(least)

    return whiten


def _largest(gram: torch.Tensor) -> float:
    """The largest eigenvalue, estimated: ECLipsE's proof does not need it exact."""
    if len(gram) <= 64:
        return float(torch.linalg.eigvalsh(gram)[-1])
    return largest_eigenpair(lambda vector: gram @ vector, len(gram), gram.dtype, 1e-6)[0]


def lipsdp_neuron(layers: Sequence[Layer]) -> Magnitude | None:
    """LipSDP-Neuron (Fazlyab et al. 2019), where cvxpy and Clarabel are installed.

    The solver proposes multipliers T ≥ 0; the bound is the smallest ρ for which the matrix inequality with that T is
    then proved by a Cholesky factorization, so the solver need not be trusted.
    """
    widths = [layers[0].matrix().shape[1], *(layer.width for layer in layers[:-1])]
    if sum(widths) > SDP_SIZE or len(layers) < 2:
        return None
    try:
        import cvxpy
    except ImportError:
        return None
    units = [layer.unit().numpy() for layer in layers]
    size, ends = sum(widths), np.cumsum([0, *widths])
    multiplier = cvxpy.Variable(sum(widths[1:]), nonneg=True)
    squared = cvxpy.Variable(nonneg=True)
    pieces = _sdp_pieces(units, [layer.ranges for layer in layers], ends, size)
    first = np.diag((np.arange(size) < widths[0]).astype(float))
    inequality = squared * first - pieces[0] - sum(multiplier[i] * piece for i, piece in enumerate(pieces[1:]))
    problem = cvxpy.Problem(cvxpy.Minimize(squared), [(inequality + inequality.T) / 2 >> 0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an inaccurate solution only loosens what is then proved
            problem.solve(solver=cvxpy.CLARABEL)
    except (cvxpy.SolverError, ValueError, ArithmeticError):
        return None
    if multiplier.value is None or squared.value is None:
        return None
    fixed = pieces[0] + sum(max(t, 0.0) * piece for t, piece in zip(multiplier.value, pieces[1:], strict=True))
    return _smallest_proved(first, fixed, float(squared.value))


def _sdp_pieces(units: Sequence[Any], slopes: Sequence[tuple[torch.Tensor, torch.Tensor]], ends: Any, size: int) -> list[Any]:
    """The output's energy, then one matrix per neuron: its quadratic constraint (z − a y)(b y − z) ≥ 0, y = w·z_before."""
    energy = np.zeros((size, size))
    energy[ends[-2] :, ends[-2] :] = units[-1].T @ units[-1]
    pieces = [energy]
    for k, unit in enumerate(units[:-1]):
        lows, highs = (side.tolist() for side in slopes[k])
        for neuron, (row, low, high) in enumerate(zip(unit, lows, highs, strict=True)):
            y, z = np.zeros(size), np.zeros(size)
            y[ends[k] : ends[k + 1]] = row
            z[ends[k + 1] + neuron] = 1.0
            piece = np.outer(z - low * y, high * y - z)
            pieces.append(piece + piece.T)
    return pieces


def _smallest_proved(first: Any, fixed: Any, squared: float) -> Magnitude | None:
    """√ of the smallest ρ ≥ squared, on a growing grid, for which ρ·first − fixed is proved positive semidefinite."""
    size = len(fixed)
    for slack in (10.0 ** (power / 8) for power in range(-72, -15)):
        rho = squared * (1 + slack) + slack * 1e-3
        candidate = rho * first - fixed
        shift = 16 * (size + 2) * UNIT_ROUNDOFF * (np.abs(candidate).sum() + 1)
        if torch.linalg.cholesky_ex(torch.from_numpy(candidate - shift * np.eye(size))).info == 0:
            return Magnitude(rho).sqrt().widened(1e-12)
    return None


def _product_error(left: torch.Tensor, right: torch.Tensor, error: float) -> float:
    """‖fl(AB') − AB‖_F for ‖A‖ ≤ UNIT_NORM and ‖B' − B‖_F ≤ error."""
    inner = left.shape[-1]
    frobenius = float(torch.linalg.vector_norm(left)) * float(torch.linalg.matrix_norm(right).max())
    return error * UNIT_NORM + 4 * (inner + 4) * UNIT_ROUNDOFF * frobenius


METHODS: dict[str, Callable[[Sequence[Layer]], Magnitude | None]] = {
    "patterns": patterns,
    "LipLT": liplt,
    "ECLipsE-Fast": eclipse_fast,
    "LipSDP-Neuron": lipsdp_neuron,
}
