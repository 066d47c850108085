"""Norms of weights and of how they move, many at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

VECTORS, FIRST_STEPS, LATER_STEPS = 8, 20, 1
LARGE = 1 << 17  # entries above which a float32 sum on the host loses digits
PIECE, LONG_PIECE = 1 << 12, 1 << 16  # entries that are summed in float32, for norms and for dot products
SAFE_LOW, SAFE_HIGH = 1e-15, 1e15  # squares of float32 numbers beyond are rounded to 0 or infinity


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds: all of it unless it is sharded. Complex entries are pairs of real ones."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_complex()):
        return tensor  # a gradient, as a rule
    tensor = tensor.detach()
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    held = held if held.layout == torch.strided else held.to_dense()
    return torch.view_as_real(held.resolve_conj()) if held.is_complex() else held


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """‖t‖₂ of each, in one vector; accurate for every scale that float32 has."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    on_host = tensors[0].device.type == "cpu"
    dtype = torch.float64 if tensors[0].device.type == "cuda" else torch.float32
    if all(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    if not (on_host and dtype == torch.float32):
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype))
    large = [index for index, tensor in enumerate(tensors) if tensor.numel() > LARGE or tensor.dtype == torch.float64]
    apart = set(large)
    together = [tensor for index, tensor in enumerate(tensors) if index not in apart] if large else list(tensors)
    found = torch.stack(torch._foreach_norm(together, 2, dtype)).double() if together else torch.zeros(0, dtype=torch.float64)
    values = found.numpy()
    if large:
        values = np.insert(values, np.array(large) - np.arange(len(large)), [_norm_of_pieces(tensors[index]) for index in large])
        found = torch.from_numpy(values)
    if not SAFE_LOW < values.min() <= values.max() < SAFE_HIGH:
        for index in np.flatnonzero(~((values > SAFE_LOW) & (values < SAFE_HIGH))).tolist():
            values[index] = float(torch.linalg.vector_norm(tensors[index], dtype=torch.float64))
    return found


def _norm_of_pieces(tensor: torch.Tensor) -> float:
    """Of a large tensor: float32 within pieces, float64 over them."""
    ordered = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))  # a norm needs no order
    flat = ordered.reshape(-1)  # no copy where the entries lie side by side
    whole = flat.numel() // PIECE * PIECE
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return math.hypot(float(torch.linalg.vector_norm(pieces, dtype=torch.float64)), float(rest))


def dots(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    """⟨a, b⟩ of each pair, in one vector."""
    found = [_dot(a, b) for a, b in zip(left, right, strict=True)]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != b.dtype or a.dtype in (torch.bfloat16, torch.float16):
        a, b = a.float(), b.float()
    if not (a.is_contiguous() and b.is_contiguous()):
        return (a * b).sum()
    a, b = a.reshape(-1), b.reshape(-1)
    if a.device.type != "cpu" or a.numel() <= LONG_PIECE:
        return torch.dot(a, b)
    pieces = zip(a.split(LONG_PIECE), b.split(LONG_PIECE), strict=True)
    return torch.stack([torch.dot(*pair) for pair in pieces]).sum(dtype=torch.float64)


class PowerIteration:
    """The largest singular value of a weight as a matrix (out, everything else), followed while the weight moves.

    A few orthonormal vectors V are kept from sample to sample: Y = WV, then V ← orth(WᵀY). With v the combination of V that W
    stretches most, ‖Wv‖² the largest eigenvalue of YᵀY, and u = Wv/‖Wv‖, σ = ‖Wᵀu‖ ≤ ‖W‖. With more than one vector, a
    singular value that overtakes the largest is in V before it does. Vectors are rows, which is much faster for a few.
    The first vectors come from a generator of their own.
    """

    def __init__(self, weight: torch.Tensor, seed: int = 0) -> None:
        self.vectors = first_vectors(weight, seed).to(weight.device)
        self.steps = FIRST_STEPS

    def step(self, weight: torch.Tensor) -> torch.Tensor:
        """(σ, residual ‖WᵀWv − ‖Wv‖²v‖/‖Wv‖²) of the weight as it is now."""
        matrix = weight.flatten(1)
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        for _ in range(self.steps):
            vectors = self.vectors.to(matrix)
            images = vectors @ matrix.mT
            scale = _largest(images)
            images = images / scale
            back = images @ matrix
            basis = orthonormal(back / _largest(back))
            self.vectors = torch.where(basis.isfinite().all() & (scale > 0), basis, vectors)
        self.steps = LATER_STEPS
        sigma, residual = top_singular_value(images @ images.mT, back, vectors, scale)
        return torch.stack([torch.where(scale == 0, 0.0, sigma), residual])


def first_vectors(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """A few random orthonormal rows to start from."""
    rows, columns = weight.shape[0], weight.shape[1:].numel()  # an entry of a sharded weight would be asked of all processes
    shape = min(VECTORS, columns, rows), columns
    return orthonormal(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"))


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows with the same span."""
    return torch.linalg.qr(rows.mT).Q.mT.contiguous()


def top_singular_value(
    gram: torch.Tensor, back: torch.Tensor, vectors: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """σ and residual from YᵀY/s², WᵀY/s (as rows), V (as rows) and a scale s of Y; NaN where something is not finite."""
    values, rotations = torch.linalg.eigh(gram.nan_to_num(0.0, 0.0, 0.0))
    length, top = values[-1].clamp(min=0).sqrt(), rotations[:, -1]  # ‖Wv‖/s
    raised = top @ back  # WᵀWv/s
    sigma = torch.linalg.vector_norm(raised / length)
    residual = torch.linalg.vector_norm(raised / (length.square() * scale) - top @ vectors)
    return torch.where(gram.isfinite().all(), sigma, torch.nan), residual


def _largest(matrix: torch.Tensor) -> torch.Tensor:
    """max |entry|, to divide by: squares of what is left neither overflow nor vanish."""
    return torch.linalg.vector_norm(matrix, float("inf"))
