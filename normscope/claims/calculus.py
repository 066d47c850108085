"""What the claims compute with: normalizers as the papers write them, chains of layers, Jacobians. All in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

EPSILON = 1e-5
ROUGH_EPSILON = 0.1

Map = Callable[[Tensor], Tensor]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def scalar(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def standardize(x: Tensor, axis: int, epsilon: float = EPSILON) -> Tensor:
    """(x − mean)/√(var + ε) along an axis: BN of a batch along 0, LN of a sample along the last."""
    centred = x - x.mean(axis, keepdim=True)
    return centred / (centred.square().mean(axis, keepdim=True) + epsilon).sqrt()


def layer_deviation(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """√(σ² + ε) of LN at x."""
    return (x.var(-1, correction=0) + epsilon).sqrt()


def jacobian(function: Map, x: Tensor) -> Tensor:
    """∂function/∂x as a matrix."""
    matrix: Tensor = torch.autograd.functional.jacobian(function, x)
    return matrix.reshape(-1, x.numel())


def spectral_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def steepness(function: Map, x: Tensor) -> Tensor:
    """‖∂function/∂x‖, the local Lipschitz constant at x."""
    return spectral_norm(jacobian(function, x))


def gradient(function: Map, x: Tensor) -> Tensor:
    """∇function(x) of a scalar function."""
    x = x.detach().requires_grad_()
    (result,) = torch.autograd.grad(function(x), x)
    return result


def hessian(function: Map, x: Tensor) -> Tensor:
    matrix: Tensor = torch.autograd.functional.hessian(function, x)
    return matrix.reshape(x.numel(), x.numel())


def chain(weights: Sequence[Tensor], x: Tensor, normalizers: Sequence[Map] = ()) -> Tensor:
    """h_K(x) with h_k = relu(NO_k(W_k h_{k-1})), Definitions 4 and 8 of Than 2025."""
    for k, weight in enumerate(weights):
        x = x @ weight.T
        x = (normalizers[k](x) if normalizers else x).relu()
    return x


def fixed_batch_norms(deviations: Sequence[Tensor]) -> list[Map]:
    """BN of fixed statistics, layer by layer: y ↦ y/√(σ² + ε)."""
    return [partial(torch.mul, 1 / deviation) for deviation in deviations]


def layer_norms(layers: int) -> list[Map]:
    """LN with ε = 0.1, whose Lipschitz constant over all inputs, 1/√ε, is of moderate size."""
    return [partial(standardize, axis=-1, epsilon=ROUGH_EPSILON)] * layers


def scaled_identities(factors: Sequence[float], widths: Sequence[int]) -> list[Tensor]:
    """W_k = a_k [I 0], of shape (n_k, n_{k-1}): the extremal members of Than 2025, Appendix C."""
    shapes = zip(factors, pairwise(widths), strict=True)
    return [factor * torch.eye(rows, columns, dtype=torch.float64) for factor, (columns, rows) in shapes]


def random_weights(widths: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Normal matrices with He's variance."""
    return [normal(generator, rows, columns) * (2 / columns) ** 0.5 for columns, rows in pairwise(widths)]


def product(values: Sequence[float | Tensor]) -> Tensor:
    """1 for no values."""
    return torch.tensor([float(value) for value in values], dtype=torch.float64).prod()


def spectral_product(weights: Sequence[Tensor]) -> Tensor:
    """P_w = ∏‖W_k‖."""
    return product([spectral_norm(weight) for weight in weights])


def truncated(vector: Tensor, sizes: Sequence[int]) -> Tensor:
    """v^(m₁,…,m_K): truncated or padded with zeros to each size in turn."""
    for size in sizes:
        vector = torch.nn.functional.pad(vector, (0, max(0, size - len(vector))))[:size]
    return vector
