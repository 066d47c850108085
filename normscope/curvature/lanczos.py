"""Extreme eigenpairs of a symmetric matrix that is known by its products: thick-restart Lanczos (Wu & Simon 2000).

The basis is reorthogonalized in full, so that no eigenvalue is found twice, and every value has the residual that bounds its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.core.errors import InputError
from normscope.core.progress import Meter

ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "largest": lambda values: values,
    "smallest": lambda values: -values,
    "magnitude": lambda values: values.abs(),
}
SEARCHED_IN_FULL = 100  # entries: in a space so small the basis is completed, so that repeated eigenvalues are all found
PIECE = 2**14
SMALL_SHARE = 1e-3  # an eigenvalue below this share of the largest magnitude is not resolved relative to itself


class Operator(Protocol):
    """A symmetric linear map of vectors with `size` entries, and random vectors of the space that it acts on."""

    size: int

    def product(self, vector: torch.Tensor) -> torch.Tensor: ...
    def normal(self, generator: torch.Generator) -> torch.Tensor: ...
    def signs(self, generator: torch.Generator) -> torch.Tensor: ...


@dataclass(frozen=True)
class Ritz:
    """Eigenvalues of the projected matrix, ascending, and ‖H v − θ v‖ of each; an eigenvalue of H lies as close to θ."""

    values: torch.Tensor
    residuals: torch.Tensor
    coordinates: torch.Tensor  # (basis, values)


class Krylov:
    """Rows Q of an orthonormal basis with H Qᵀ = Qᵀ T + q bᵀ: T the projected matrix, b the coupling to the next vector q."""

    def __init__(self, operator: Operator, start: torch.Tensor, capacity: int, generator: torch.Generator) -> None:
        self.operator, self.generator = operator, generator
        self.capacity = min(capacity, operator.size)
        self.basis = start.new_zeros(self.capacity + 1, operator.size)
        self.basis[0] = start / start.norm()
        self.projected = torch.zeros(self.capacity, self.capacity, dtype=torch.float64)
        self.coupling = torch.zeros(self.capacity, dtype=torch.float64)
        self.count = 0
        self.products = 0
        self.exhausted = False
        self._asymmetry = 0.0

    @property
    def full(self) -> bool:
        return self.exhausted or self.count == self.capacity

    @property
    def rounding(self) -> float:
        """What rounding of the products may do to a Ritz value, estimated by ‖T − Tᵀ‖_F before symmetry is imposed."""
        size = float(self.projected[: self.count, : self.count].abs().max()) if self.count else 0.0
        return math.sqrt(self._asymmetry) + 4 * torch.finfo(torch.float64).eps * self.count * size

    def fill(self, progress: Meter) -> bool:
        """Extend until full; False where Ctrl-C came first and left a basis of at least one vector."""
        try:
            while not self.full:
                self.extend()
                progress.advance()
        except KeyboardInterrupt:
            if not self.count:
                raise
            return False
        return True

    def extend(self) -> None:
        """One more product, and one more vector in the basis."""
        j = self.count
        own = self.basis[: j + 1]
        image = self.operator.product(self.basis[j])
        self.products += 1
        scale = float(image.norm())
        if not math.isfinite(scale):
            raise InputError("a product with the matrix is not finite: use dtype=torch.float64, or look for infinite derivatives")
        column = self._orthogonalize(image, own)
        self._asymmetry += float((column[:j] - self.coupling[:j]).square().sum())
        self.projected[: j + 1, j] = self.projected[j, : j + 1] = column
        self.coupling.zero_()
        self.count += 1
        length = float(image.norm())
        if length <= 100 * torch.finfo(image.dtype).eps * max(scale, float(self.projected.abs().max())):
            self._start_anew(own)
        else:
            self.coupling[j] = length
            self.basis[j + 1] = image / length

    def ritz(self) -> Ritz:
        n = self.count
        values, coordinates = torch.linalg.eigh(self.projected[:n, :n])
        return Ritz(values, (self.coupling[:n] @ coordinates).abs(), coordinates)

    def vector(self, coordinates: torch.Tensor) -> torch.Tensor:
        return coordinates.to(self.basis) @ self.basis[: self.count]

    def restart(self, ritz: Ritz, kept: torch.Tensor) -> None:
        """Shrink the basis to some of the Ritz vectors and the next vector, which couples to each of them."""
        chosen, p, n = ritz.coordinates[:, kept].to(self.basis), len(kept), self.count
        for columns in self.basis.split(2**18, dim=1):  # by pieces: no second basis in memory
            columns[:p] = chosen.mT @ columns[:n]
        self.basis[p] = self.basis[n]
        self.coupling[:p] = self.coupling[:n] @ ritz.coordinates[:, kept]
        self.coupling[p:] = 0
        self.projected.zero_()
        self.projected.diagonal()[:p] = ritz.values[kept]
        self.count = p

    def _orthogonalize(self, vector: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Take from a vector, in place, its part in the span of the rows; twice is enough. Returns the coordinates of that part."""
        total = torch.zeros(len(rows), dtype=torch.float64)
        for _ in range(2):
            coordinates = _inner_products(rows, vector)
            vector.sub_(coordinates.to(vector) @ rows)
            total += coordinates
        return total

    def _start_anew(self, rows: torch.Tensor) -> None:
        """The basis spans an invariant space: go on with a random vector outside it, if there is any."""
        vector = self.operator.normal(self.generator)
        before = float(vector.norm())
        self._orthogonalize(vector, rows)
        self._orthogonalize(vector, rows)
        after = float(vector.norm())
        self.exhausted = after <= 1e-6 * before
        if not self.exhausted:
            self.basis[self.count] = vector / after


def _inner_products(rows: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Sums of pieces added up in float64, lest the rounding of long sums in float32 pass for that of the products."""
    pieces = zip(rows.split(PIECE, dim=1), vector.split(PIECE), strict=True)
    return torch.stack([own @ part for own, part in pieces]).double().sum(0).cpu()


@dataclass(frozen=True)
class Extremes:
    """The wanted Ritz pairs. errors: residual and rounding; an eigenvalue lies in value ± error. finished: to the tolerance."""

    values: torch.Tensor
    errors: torch.Tensor
    vectors: list[torch.Tensor]
    products: int
    finished: bool


def extremes(
    operator: Operator,
    count: int,
    which: str,
    tolerance: float,
    capacity: int,
    most_products: int,
    generator: torch.Generator,
    progress: Meter,
) -> Extremes:
    """The `count` extreme eigenpairs, each with a residual of at most `tolerance` relative to its value.

    An interrupt, or `most_products`, ends the search with what there is: wider intervals, `finished` False.
    """
    krylov = Krylov(operator, operator.normal(generator), max(capacity, count + 2), generator)
    finished = False
    try:
        while not finished and krylov.products < most_products:
            krylov.extend()
            ritz = krylov.ritz()
            order = ORDERS[which](ritz.values).argsort(descending=True)
            gap = _distance(ritz, order, count, tolerance, krylov.rounding) if krylov.count > count else math.inf
            complete = krylov.exhausted or krylov.count == operator.size
            finished = complete or (gap <= 1 and not (krylov.capacity == operator.size <= SEARCHED_IN_FULL))
            progress.converging(krylov.products, gap)
            if krylov.full and not finished:
                krylov.restart(ritz, _kept(ritz, which, count, krylov.capacity))
    except KeyboardInterrupt:
        if krylov.count < count:
            raise
    ritz = krylov.ritz()
    wanted = ORDERS[which](ritz.values).argsort(descending=True)[:count]
    vectors = [krylov.vector(ritz.coordinates[:, i]) for i in wanted]
    return Extremes(ritz.values[wanted], ritz.residuals[wanted] + krylov.rounding, vectors, krylov.products, finished)


def _distance(ritz: Ritz, order: torch.Tensor, count: int, tolerance: float, rounding: float) -> float:
    """The largest residual as a multiple of what is allowed.

    The wanted pairs must meet the tolerance. The next pair must not reach over the last of them, or an eigenvalue that is still
    emerging would be missed; where the two are too close for that, ten times the tolerance will do.
    """
    wanted, follower = order[:count], order[count : count + 1]
    sizes = ritz.values.abs()
    allowed = (tolerance * sizes[wanted].clamp(min=SMALL_SHARE * float(sizes.max()))).clamp(min=max(2 * rounding, 1e-300))
    apart = (ritz.values[wanted[-1]] - ritz.values[follower]).abs().clamp(min=10 * float(allowed[-1]))
    return float(torch.cat([ritz.residuals[wanted] / allowed, ritz.residuals[follower] / apart]).max())


def _kept(ritz: Ritz, which: str, count: int, capacity: int) -> torch.Tensor:
    """What to take into the next round: the wanted pairs, and those next to them as far as half of the room goes."""
    number = min(count + (capacity - count) // 2, capacity - 1)
    return ORDERS[which](ritz.values).argsort(descending=True)[:number]
