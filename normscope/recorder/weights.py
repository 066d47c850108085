"""Norms of weights and of how they move, many at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FIRST_STEPS, LATER_STEPS = 40, 2
SAFE_LOW, SAFE_HIGH = 1e-15, 1e15  # squares of float32 numbers beyond are rounded to 0 or infinity


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds: all of it unless it is sharded."""
    tensor = tensor.detach()
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.to_dense() if held.is_sparse else held


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """‖t‖₂ of each, in one vector; accurate for every scale that float32 has."""
    if not tensors:
        return torch.zeros(0)
    on_host = tensors[0].device.type == "cpu"
    dtype = torch.float64 if tensors[0].device.type == "cuda" else torch.float32
    if all(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    found = torch.stack(torch._foreach_norm(list(tensors), 2, dtype))
    if on_host and dtype == torch.float32:
        found = found.double()
        for index in (~((found > SAFE_LOW) & (found < SAFE_HIGH))).nonzero().flatten().tolist():
            found[index] = torch.linalg.vector_norm(tensors[index], dtype=torch.float64)
    return found


def dots(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    """⟨a, b⟩ of each pair, in one vector."""
    found = [_dot(a, b) for a, b in zip(left, right, strict=True)]
    return torch.stack(found) if found else torch.zeros(0)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != b.dtype or a.dtype in (torch.bfloat16, torch.float16):
        a, b = a.float(), b.float()
    if a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return (a * b).sum()


class PowerIteration:
    """The largest singular value of a weight as a matrix (out, everything else), followed while the weight moves.

    u = Wv/‖Wv‖, σ = ‖Wᵀu‖ ≤ ‖W‖, v ← Wᵀu/σ, from where the last sample left v; residual = ‖Wᵀu − ‖Wv‖v‖/‖Wv‖.
    The first vector comes from a generator of its own.
    """

    def __init__(self, weight: torch.Tensor, seed: int = 0) -> None:
        columns = weight[0].numel() if len(weight) else 0
        start = torch.randn(columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        self.vector = torch.nn.functional.normalize(start, dim=0).to(weight.device)
        self.steps = FIRST_STEPS

    def step(self, weight: torch.Tensor) -> torch.Tensor:
        """(σ, residual) of the weight as it is now."""
        matrix = weight.flatten(1)
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        for _ in range(self.steps):
            vector = self.vector.to(matrix)
            image = matrix @ vector
            length = _length(image)
            back = matrix.mT @ (image / length).to(matrix)
            norm = _length(back)
            self.vector = torch.where(torch.isfinite(norm) & (norm > 0), (back / norm).to(matrix), vector)
        self.steps = LATER_STEPS
        residual = _length(back - (length * vector).to(matrix)) / length
        return torch.stack([torch.where(length > 0, norm, length), residual])


def _length(vector: torch.Tensor) -> torch.Tensor:
    """‖v‖₂ without overflow or underflow of the squares, where the device has float64."""
    return torch.linalg.vector_norm(vector, dtype=vector.dtype if vector.device.type == "mps" else torch.float64)
