"""The form of every operation that has a rule is sound: no group that passes it is refuted, and most let one pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import normscope as ns
from tests.cases import INFINITE, RULE_CASES, VARIANTS

CASES = {**RULE_CASES, **VARIANTS, **INFINITE}
del CASES["heaviside"], CASES["floor_divide"]  # torch has no derivative of them
KEEP_SCALE = (
    "relu", "leaky_relu", "prelu", "abs", "neg", "mul", "div", "reshape", "permute", "cat", "stack", "slice", "expand", "sum", "mean",
    "linear", "matmul", "einsum", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "amax", "sort",
    "topk", "maximum", "linalg_vector_norm", "std", "upsample_bilinear2d", "pad", "slice: split", "getitem", "pixel_shuffle", "rotary",
    "index_select", "im2col", "tril", "flip", "gather", "unfold", "repeat", "tile", "roll", "cumsum", "center", "median",
    "quantile", "grid_sampler", "mul: of lists", "std: std_mean", "matmul: multi_dot",
)  # fmt: skip


class Probe(nn.Module):
    """unit(operation(c ⊙ x + b)), where c and b have an entry a feature."""

    def __init__(self, operation: nn.Module, shape: torch.Size, shifted: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.operation = operation
        self.scale = nn.Parameter(torch.rand(shape, generator=generator) + 0.5)
        self.shift = nn.Parameter(torch.randn(shape, generator=generator)) if shifted else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.operation(self.scale * x if self.shift is None else self.scale * x + self.shift).reshape(-1)
        return torch.tanh(functional.layer_norm(y, y.shape) if self.shift is not None else functional.normalize(y, dim=0))


def probe(name: str, shifted: bool) -> ns.SymmetryReport:
    case = CASES[name]
    return ns.symmetries(
        Probe(case.module, case.example.shape[1:], shifted), case.example, mode="train" if case.mode == "batch" else "eval"
    )


@pytest.mark.quick(50)
@pytest.mark.parametrize("shifted", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("name", CASES)
def test_no_group_is_refuted(name, shifted):
    assert probe(name, shifted).check() == []


def test_slopes_of_rounding_alone_refute_nothing():
    """The output is a sign: every derivative is 0, and what autograd makes of it has a direction all the same."""
    assert probe("gather", False).check() == []


@pytest.mark.quick(27)
@pytest.mark.parametrize("name", KEEP_SCALE)
def test_homogeneous_operations_let_a_scale_pass(name):
    kinds = {group.kind for group in probe(name, False) if "scale" in group.parameters}
    assert kinds & {"scale", "joint-scale", "rescale"}
