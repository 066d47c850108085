"""How the entries of one or several tensors form the vectors of a product of spheres."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from normscope.core.errors import InputError


@dataclass(frozen=True)
class Part:
    """One tensor's share of every vector: vectors differ along `axes`, `block` consecutive indices at a time.

    order: the remaining axes as they lie in memory, so that a dense tensor becomes a matrix without a copy.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    block: int
    order: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, axes: Sequence[int], block: int = 1) -> Part:
        shape, rank = tuple(tensor.shape), tensor.dim()
        if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
            raise InputError(f"axes {tuple(axes)} are not distinct axes of a tensor of shape {shape}")
        axes = tuple(axis % rank for axis in axes)
        if block != 1 and (len(axes) != 1 or block < 1 or shape[axes[0]] % block):
            raise InputError(f"blocks of {block} along axes {axes} do not divide a tensor of shape {shape}")
        others = (axis for axis in range(rank) if axis not in axes)
        return cls(shape, axes, block, tuple(sorted(others, key=lambda axis: -tensor.stride(axis))))

    @cached_property
    def count(self) -> int:
        """How many vectors there are."""
        return math.prod(self.shape[axis] for axis in self.axes) // self.block

    @cached_property
    def size(self) -> int:
        """How many entries of each vector lie in this tensor."""
        return math.prod(self.shape[axis] for axis in self.order) * self.block

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """(count, size); a view wherever strides allow."""
        if tuple(tensor.shape) != self.shape:
            raise InputError(f"a tensor of shape {tuple(tensor.shape)} stands where one of shape {self.shape} was expected")
        return tensor.permute((*self.axes, *self.order)).reshape(self.count, self.size)

    def tensor(self, matrix: torch.Tensor) -> torch.Tensor:
        """The inverse of `matrix`."""
        axes = (*self.axes, *self.order)
        inverse = [axes.index(axis) for axis in range(len(axes))]
        return matrix.reshape([self.shape[axis] for axis in axes]).permute(inverse)


@dataclass(frozen=True)
class Vectors:
    """Vectors that run through one or several tensors: row j of every part joins into vector j.

    >>> weight, bias = torch.ones(3, 2, 5), torch.ones(3)
    >>> Vectors.of((weight, bias), axes=((0,), (0,))).gather((weight, bias)).shape
    torch.Size([3, 11])
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], axes: Sequence[Sequence[int]], blocks: Sequence[int] | None = None) -> Vectors:
        blocks = [1] * len(tensors) if blocks is None else blocks
        parts = tuple(Part.of(*described) for described in zip(tensors, axes, blocks, strict=True))
        counts = {part.count for part in parts}
        if len(counts) != 1:
            raise InputError(f"tensors that share their vectors must have equally many of them, got {sorted(counts)}")
        return cls(parts)

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def size(self) -> int:
        """The dimension of the space that the vectors live in."""
        return sum(part.size for part in self.parts)

    def gather(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The vectors as rows, (count, size): a view of a single dense tensor, else a copy."""
        matrices = [part.matrix(tensor) for part, tensor in zip(self.parts, tensors, strict=True)]
        joined = matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)
        return joined.to(dtype or joined.dtype)

    def scatter(self, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors whose vectors are the rows."""
        pieces = matrix.split([part.size for part in self.parts], 1)
        return tuple(part.tensor(piece) for part, piece in zip(self.parts, pieces, strict=True))

    def store(self, matrix: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Write gathered rows back, unless they are a view of the tensors."""
        if len(tensors) == 1 and matrix.dtype == tensors[0].dtype and matrix.data_ptr() == tensors[0].data_ptr():
            return
        for tensor, values in zip(tensors, self.scatter(matrix), strict=True):
            tensor.copy_(values)
