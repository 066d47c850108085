"""Operations in a form that can be differentiated twice: torch's fast forms lack a second derivative or have a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention as plain matrix products, and weight normalization by its formula."""
    with sdpa_kernel(SDPBackend.MATH), _WeightNormByFormula():
        yield


class _WeightNormByFormula(TorchFunctionMode):
    """v g/‖v‖; the derivative of the fused form's derivative is not symmetric (torch 2.13, CPU)."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
