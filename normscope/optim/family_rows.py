"""A family's tensors as matrices with one vector per row, which the optimizers change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from normscope.geometry.vectors import Vectors

PIECE = 1 << 19  # entries of a piece: on a CPU its matrices stay in the cache from one operation to the next
HALF = (torch.float16, torch.bfloat16)  # computed in float32


class Rows:
    """Matrices of one family, in the order in which they are added: (count, size), or (count, 1) for one value per vector.

    They are views of the tensors where strides and dtype allow; `store` writes the others back.
    """

    def __init__(self, vectors: Vectors, dtype: torch.dtype) -> None:
        self.vectors = vectors
        self.dtype = torch.float32 if dtype in HALF else dtype
        self.matrices: list[torch.Tensor] = []
        self._writes: list[Callable[[], object]] = []

    def add_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors of the parameters' shapes that are only read."""
        dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
        self.matrices.append(self.vectors.gather(dense, self.dtype))

    def add_entries(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors of the parameters' shapes."""
        matrix = self.vectors.gather(tensors, self.dtype)
        self.matrices.append(matrix)
        self._writes.append(partial(self.vectors.store, matrix, tensors))
        return matrix

    def add_values(self, values: torch.Tensor) -> None:
        """One value for each vector, (count, 1)."""
        matrix = values.to(self.dtype)
        self.matrices.append(matrix)
        if matrix is not values:
            self._writes.append(partial(values.copy_, matrix))

    def pieces(self) -> Iterator[list[torch.Tensor]]:
        """The matrices cut into runs of rows, small enough for the cache of a CPU."""
        if self.matrices[0].device.type != "cpu":
            yield self.matrices
            return
        rows = max(1, PIECE // max(1, self.vectors.size))
        yield from map(list, zip(*(matrix.split(rows) for matrix in self.matrices), strict=True))

    def store(self) -> None:
        for write in self._writes:
            write()
