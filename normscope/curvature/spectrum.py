"""`ns.hessian`: the spectrum of the Hessian of a loss, every number with its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from normscope.core.data import Data
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.progress import Progress, shown
from normscope.core.rendering import Text
from normscope.core.result import Result
from normscope.curvature.estimators import Density, Estimate, Quadrature, check_confidence, trace
from normscope.curvature.lanczos import ORDERS, Krylov, Operator, extremes
from normscope.curvature.matrices import MEMORY, CurvatureMatrix, matrix_of
from normscope.curvature.objective import BATCH_SIZE, Loss, Objective
from normscope.curvature.quotient import QuotientHessian, representative, symmetries_of

LARGEST_DENSE = 5000
RESOLVED = 0.1  # a Ritz value counts as an eigenvalue's when its error is at most this share of it
WIDEST_BASIS = 200  # of a search for eigenpairs; beyond it a restart costs less than a longer basis

Vector = Union[torch.Tensor, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Eigenpair:
    """An eigenvalue lies in value ± error. vector: of unit length, one tensor per parameter."""

    value: float
    error: float
    vector: dict[str, torch.Tensor]

    @property
    def interval(self) -> tuple[float, float]:
        return self.value - self.error, self.value + self.error

    def __repr__(self) -> str:
        return f"Eigenpair({self.value:.6g} ± {self.error:.1g})"


@dataclass(frozen=True)
class Condition:
    """κ = max|λ| / min|λ| over the eigenvalues with |λ| > threshold · max|λ|.

    exact: all eigenvalues are known. Else `value` is a lower bound from the eigenvalues that Lanczos has resolved, and
    1/threshold an upper bound by definition.
    """

    value: float
    threshold: float
    exact: bool

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "κ is not defined: no eigenvalue differs from 0"
        sign = "=" if self.exact else "≥"
        return f"κ {sign} {self.value:.4g} over eigenvalues above {self.threshold:g} of the largest"


class Curvature(Result):
    """A symmetric matrix of second derivatives, by its products; `ns.hessian` makes one.

    mode, matrix, loss, parameters and grouping say what was measured; `print` shows them with what has been computed so far.
    """

    schema = "normscope.curvature/1"

    def __init__(self, objective: Objective, matrix: CurvatureMatrix, symmetries: Any = None, progress: Progress = None) -> None:
        self.objective, self.matrix, self.symmetries, self.progress = objective, matrix, symmetries, progress
        self.operator: Operator = matrix if symmetries is None else QuotientHessian(matrix, symmetries)
        self.results: dict[str, Any] = {}

    @property
    def mode(self) -> str:
        return self.objective.mode

    @property
    def size(self) -> int:
        """How many parameters the matrix is about."""
        return self.objective.size

    @cached_property
    def loss(self) -> float:
        return self.matrix.objective.value()

    @property
    def grouping(self) -> tuple[int, ...]:
        """The sizes of the batches; batch statistics, where there are any, are those of each batch by itself."""
        return self.objective.sizes

    @property
    def batch_statistics(self) -> tuple[str, ...]:
        """The normalizers whose statistics are those of the batch."""
        return tuple(
            name
            for name, part in self.objective.model.named_modules()
            if isinstance(part, _NormBase) and not isinstance(part, nn.modules.instancenorm._InstanceNorm)
            if part.training or part.running_mean is None
        )

    def product(self, vector: Vector) -> Any:
        """The matrix times a vector, given and returned as one flat tensor or as a tensor per parameter."""
        layout = self.objective.layout
        if isinstance(vector, Mapping):
            return layout.unflatten(self.operator.product(layout.flatten(vector)))
        if vector.shape != (self.size,):
            raise InputError(f"the vector has {self.size} entries, not shape {tuple(vector.shape)}")
        return self.operator.product(vector)

    def gradient(self) -> dict[str, torch.Tensor]:
        """∇L at the point where the curvature is taken."""
        return self.objective.layout.unflatten(self.matrix.objective.gradient())

    @boundary
    def top(
        self,
        k: int = 1,
        which: str = "largest",
        tolerance: float = 1e-3,
        most_products: int = 1000,
        generator: torch.Generator | None = None,
    ) -> list[Eigenpair]:
        """The k algebraically largest eigenpairs (which="smallest" or "magnitude" for others), by Lanczos.

        tolerance: the error allowed, relative to each value. Each error is the residual ‖H v − λ v‖, which bounds the distance to
        an eigenvalue, and an estimate of the products' rounding. Ctrl-C ends early with wider errors. Of an eigenvalue that
        occurs several times exactly, one copy may be found.
        """
        if which not in ORDERS:
            raise InputError(f"which must be one of {', '.join(ORDERS)}, got {which!r}")
        if not 1 <= k <= self.size:
            raise InputError(f"k must be between 1 and the number of parameters, {self.size}, got {k}")
        with shown(f"{which} eigenvalues", self.progress) as progress:
            capacity = max(self._capacity(WIDEST_BASIS), min(2 * k + 2, self.size))
            found = extremes(self.operator, k, which, tolerance, capacity, most_products, _generator(generator), progress)
        layout, dtype = self.objective.layout, self.objective.point.dtype
        pairs = [
            Eigenpair(float(value), float(error), layout.unflatten(vector.to(dtype)))
            for value, error, vector in zip(found.values, found.errors, found.vectors, strict=True)
        ]
        self.results[which] = pairs
        return pairs

    def bottom(self, k: int = 1, **options: Any) -> list[Eigenpair]:
        """The k algebraically smallest eigenpairs."""
        return self.top(k, which="smallest", **options)

    @boundary
    def trace(self, products: int = 48, confidence: float = 0.95, generator: torch.Generator | None = None) -> Estimate:
        """tr H with its confidence interval, by Hutch++; exact where `products` is at least the number of parameters."""
        with shown("trace", self.progress, products) as progress:
            self.results["trace"] = trace(self.operator, products, confidence, _generator(generator), progress)
        return self.results["trace"]

    def spectral_sum(
        self,
        function: Callable[[np.ndarray], np.ndarray],
        probes: int = 10,
        steps: int = 50,
        confidence: float = 0.95,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """tr f(H) = Σ f(λ) with a confidence interval for the sampling, by stochastic Lanczos quadrature.

        For example log det(H + δ): `spectral_sum(lambda x: np.log(x + δ))`. In the quotient, the sum over its directions. Exact
        for up to 2,000 parameters where probes · steps is at least their number.
        """
        check_confidence(confidence)
        if probes < 2:
            raise InputError(f"an interval needs at least 2 probes, got {probes}")
        return self._quadrature(probes, steps, generator).estimate(function, confidence)

    @boundary
    def density(
        self, probes: int = 10, steps: int = 50, width: float | None = None, generator: torch.Generator | None = None
    ) -> Density:
        """The distribution of all eigenvalues, by stochastic Lanczos quadrature.

        Exact for up to 2,000 parameters where probes · steps is at least their number.
        """
        self.results["density"] = Density.of(self._quadrature(probes, steps, generator), width)
        return self.results["density"]

    @boundary
    def condition(self, threshold: float = 1e-3, products: int = 100, generator: torch.Generator | None = None) -> Condition:
        """The condition number on the numerically nonzero part of the spectrum, from one Lanczos run of so many products."""
        if not 0 < threshold < 1:
            raise InputError(f"threshold must be a share of the largest eigenvalue, between 0 and 1, got {threshold}")
        generator = _generator(generator)
        krylov = Krylov(self.operator, self.operator.normal(generator), self._capacity(products), generator)
        with shown("condition", self.progress, krylov.capacity) as progress:
            krylov.fill(progress)
        ritz = krylov.ritz()
        sizes, errors = ritz.values.abs(), ritz.residuals + krylov.rounding
        largest = float(sizes.max())
        counted = sizes[(sizes > threshold * largest) & (errors <= RESOLVED * sizes)]
        smallest = float(counted.min()) if len(counted) else largest
        exact = krylov.exhausted or krylov.count == self.size
        self.results["condition"] = Condition(largest / smallest if smallest else math.nan, threshold, exact)
        return self.results["condition"]

    def dense(self) -> torch.Tensor:
        """The whole matrix, for small models."""
        if self.size > LARGEST_DENSE:
            raise InputError(
                f"a dense matrix is for at most {LARGEST_DENSE} parameters, not {self.size}: name some with parameters="
            )
        units = torch.eye(self.size, dtype=self.matrix.vector_dtype, device=self.objective.point.device)
        return torch.stack([self.operator.product(unit) for unit in units])

    def blocks(self) -> dict[str, Curvature]:
        """The diagonal block of every module that has parameters of its own, the others held."""
        if self.symmetries is not None:
            raise InputError("blocks are those of the plain matrix: use quotient=False")
        names = list(dict.fromkeys(name.rpartition(".")[0] for name in self.objective.layout.shapes))
        made = {}
        for name in names:
            own = [other for other in self.objective.layout.shapes if other.rpartition(".")[0] == name]
            part = self.objective.of(own)
            made[name] = Curvature(part, type(self.matrix)(part, self.matrix.memory, self.matrix.compiled), progress=self.progress)
        return made

    def __str__(self) -> str:
        from normscope.curvature.rendering import text

        return text(self)

    def render(self) -> Text:
        return Text.of_lines(str(self).splitlines())

    def to_dict(self) -> dict[str, Any]:
        """What was measured and computed so far as plain JSON values; docs/curvature.md documents every field."""
        from normscope.curvature.rendering import content

        return content(self)

    def _quadrature(self, probes: int, steps: int, generator: torch.Generator | None) -> Quadrature:
        steps = self._capacity(steps)
        with shown("density", self.progress, min(probes * steps, self.size)) as progress:
            return Quadrature.of(self.operator, probes, steps, _generator(generator), progress)

    def _capacity(self, wanted: int) -> int:
        """How many basis vectors to hold: as many as wanted, if memory allows, but never fewer than a few."""
        itemsize = torch.finfo(self.matrix.vector_dtype).bits // 8
        affordable = max(self.matrix.memory, MEMORY) // (itemsize * self.size) - 1
        return max(2, min(wanted, max(affordable, 8), self.size))


@earlier(positional=2, batches="data")
@boundary
def hessian(
    model: nn.Module,
    loss: Loss | Sequence[Loss],
    data: Data,
    *,
    mode: str = "train",
    quotient: bool = False,
    matrix: str = "hessian",
    parameters: str | Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int = BATCH_SIZE,
    microbatch: int | None = None,
    memory: int = MEMORY,
    compiled: bool = False,
    seed: int = 0,
    progress: Progress = None,
) -> Curvature:
    """The Hessian of Σ_b (n_b/N) loss(model(x_b), y_b); by default in train mode, whose loss training descends.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    >>> data = torch.randn(64, 4).double(), torch.randint(3, (64,))
    >>> curvature = hessian(model, nn.functional.cross_entropy, data)
    >>> pair = curvature.top(1)[0]
    >>> pair.error <= 1e-3 * pair.value
    True

    loss: of (outputs, targets), a mean over the batch; of several losses the sum.
    data: (inputs, targets), a Dataset or an iterable of batches, each (inputs, targets) or a dict (docs/curvature.md); the same on
    every pass.
    mode: "train" (BN with the statistics of each batch, dropout masks fixed by `seed`) or "eval".
    quotient: with the model's symmetries divided out.
    matrix: "hessian" or "gauss-newton".
    parameters: names of parameters or modules; all that require a gradient if not given.
    dtype: of the computation; that of the model if not given.
    batch_size: where the data come as tensors or as a Dataset.
    microbatch: samples at a time, where the loss of a batch is that of its parts.
    memory: bytes of tapes to keep between products; without tapes a product costs about twice as much.
    compiled: products by compiled code (torch.compile, made at the first product).
    seed: of dropout, the same on every pass.
    progress: True for a bar on stderr, or a callable (what, done, total).
    """
    objective = Objective(model, loss, data, mode, parameters, dtype, batch_size, microbatch, seed)
    if not quotient:
        return Curvature(objective, matrix_of(matrix, objective, memory, compiled), progress=progress)
    symmetries = symmetries_of(objective)
    there = representative(objective, symmetries)
    return Curvature(objective, matrix_of(matrix, there, memory, compiled), symmetries, progress)


def _generator(given: torch.Generator | None) -> torch.Generator:
    return given or torch.Generator().manual_seed(0)
