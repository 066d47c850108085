"""Products with the Hessian and the generalized Gauss-Newton matrix, batch by batch, on tapes that are kept while memory allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from normscope.core.errors import InputError, first_line
from normscope.curvature.compilation import PartialProduct, Parts, without_tape
from normscope.curvature.objective import Objective, Term, derivative

MEMORY = 2**30  # bytes of tapes, and as many of vectors
EXACT_VECTORS = 2_000_000  # up to so many entries, vectors are float64 whatever the model's dtype


class CurvatureMatrix(ABC):
    """A symmetric matrix that is a mean over batches; `product` is exact up to rounding in the model's dtype.

    memory: bytes of tapes to keep between products. compiled: turn the tapes, which must fit, into compiled code.
    """

    name: str

    def __init__(self, objective: Objective, memory: int = MEMORY, compiled: bool = False) -> None:
        self.objective, self.memory, self.compiled = objective, memory, compiled
        self.size = objective.size
        self.vector_dtype = torch.float64 if self.size <= EXACT_VECTORS else objective.point.dtype
        self._kept: list[tuple[int, PartialProduct]] | None = None
        self._fits = memory > 0 or compiled

    @abstractmethod
    def on(self, term: Term) -> PartialProduct:
        """The product of one batch's matrix; may be called again and again."""

    @torch.enable_grad()
    def product(self, vector: torch.Tensor) -> torch.Tensor:
        """H v, in the dtype of v."""
        parts = [part.to(dtype) for part, dtype in zip(self.objective.layout.split(vector), self.objective.dtypes, strict=True)]
        try:
            return self._product(vector, parts)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            raise InputError(f"an operation cannot be differentiated twice: {first_line(error)}") from error

    def _product(self, vector: torch.Tensor, parts: Parts) -> torch.Tensor:
        if self._kept is None and self._fits:
            self._keep(parts)
        total = torch.zeros_like(vector)
        samples = sum(self.objective.sizes)
        for size, partial in self._kept or self._pieces():
            total.add_(self.objective.layout.join(partial(parts)).to(vector), alpha=size / samples)
        return total

    def normal(self, generator: torch.Generator) -> torch.Tensor:
        """A random vector with independent normal entries."""
        entries = torch.randn(self.size, generator=generator, dtype=torch.float64)
        return entries.to(self.objective.point.device, self.vector_dtype)

    def signs(self, generator: torch.Generator) -> torch.Tensor:
        """A random vector of ±1."""
        return self.normal(generator).sign()

    def _pieces(self) -> Any:
        return ((term.size, self.on(term)) for term in self.objective.terms())

    def _keep(self, example: Parts) -> None:
        """Record all batches once, unless their tapes take more memory than allowed."""
        try:
            with _SavedBytes(self.memory):
                tapes = list(self._pieces())
        except _TooMuch:
            if self.compiled:
                raise InputError(
                    f"the tapes to compile take more than memory={self.memory}: raise it, give fewer samples or use compiled=False"
                ) from None
            self._fits = False
            return
        self._kept = [(size, without_tape(partial, example)) for size, partial in tapes] if self.compiled else tapes


class Hessian(CurvatureMatrix):
    """H v = ∂⟨∇L, v⟩/∂θ, a second backward pass through the first."""

    name = "Hessian"

    def on(self, term: Term) -> PartialProduct:
        gradient = term.gradient(create_graph=True)
        return lambda parts: derivative(gradient, term.leaves, parts, keep=True)


class GaussNewton(CurvatureMatrix):
    """G v = Jᵀ H_ℓ J v, with J the Jacobian of the outputs and H_ℓ the Hessian of the loss in them; J v by differentiating Jᵀw."""

    name = "Gauss-Newton matrix"

    def on(self, term: Term) -> PartialProduct:
        flat, structure = tree_flatten(term.outputs)
        places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
        outputs = [flat[i] for i in places]
        free = [output.detach().requires_grad_() for output in outputs]
        for i, tensor in zip(places, free, strict=True):
            flat[i] = tensor
        slopes = derivative([term.loss_of(tree_unflatten(flat, structure))], free, None, create_graph=True)
        weights = [torch.zeros_like(output, requires_grad=True) for output in outputs]
        transposed = derivative(outputs, term.leaves, weights, create_graph=True)

        def product(parts: Parts) -> Parts:
            moved = derivative(transposed, weights, parts, keep=True)
            pulled = derivative(slopes, free, moved, keep=True)
            return derivative(outputs, term.leaves, pulled, keep=True)

        return product


MATRICES: dict[str, type[CurvatureMatrix]] = {"hessian": Hessian, "gauss-newton": GaussNewton}


def matrix_of(kind: str, objective: Objective, memory: int = MEMORY, compiled: bool = False) -> CurvatureMatrix:
    """The matrix of that name for an objective."""
    if kind not in MATRICES:
        raise InputError(f"matrix must be one of {', '.join(MATRICES)}, got {kind!r}")
    return MATRICES[kind](objective, memory, compiled)


class _TooMuch(Exception):
    """The tapes do not fit."""


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a tape holds on to, and stops its recording beyond a limit."""

    def __init__(self, limit: int) -> None:
        seen: set[int] = set()
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
            if total > limit:
                raise _TooMuch
            return tensor

        super().__init__(pack, lambda tensor: tensor)
