"""Layers written by hand are recognised as what they are, and look-alikes are not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import normscope as ns
from normscope.graph.graph import Node
from normscope.graph.trace import trace
from tests.cases import Function, randn
from tests.graph.test_trace import operations


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


STANDARDIZED = {
    "rsqrt of a mean square": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "division by a root": lambda x: x / torch.sqrt(mean(x * x) + 1e-3),
    "a power of minus a half": lambda x: x * (mean(x.square()) + 1e-3) ** -0.5,
    "one over a root": lambda x: x * (1 / (mean(x**2) + 1e-3).sqrt()),
    "through float32": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3).to(x.dtype),
    "unit vectors": lambda x: functional.normalize(x, dim=-1, eps=1e-2),
    "unit vectors, written out": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-2),
    "unit vectors, clamped": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-2),
    "layer norm": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-3),
    "layer norm of a kept difference": lambda x: (lambda c: c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-3))(x - mean(x)),
    "layer norm of a difference written twice": lambda x: (
        (x - mean(x)) * torch.rsqrt((x - mean(x)).pow(2).mean(-1, keepdim=True) + 1e-3)
    ),
    "a standard deviation": lambda x: (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-2),
    "with a learned scale": lambda x: torch.ones(4) * (x - mean(x)) / (x.std(-1, keepdim=True) + 1e-2),
}

ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x) * x,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu: tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu: cube": lambda x: x * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
    "mish": lambda x: x * torch.tanh(functional.softplus(x)),
    "hardswish": lambda x: x * functional.relu6(x + 3) / 6,
    "softsign": lambda x: x / (1 + x.abs()),
    "tanhshrink": lambda x: x - torch.tanh(x),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", STANDARDIZED)
def test_hand_written_normalizers_are_recognised(name):
    model = Function(STANDARDIZED[name])
    graph = trace(model, randn(1, 4))
    assert "standardize" in operations(graph)
    assert not {"div", "rsqrt", "pow", "var", "std", "reciprocal", "linalg_vector_norm"} & set(operations(graph))
    assert ns.lipschitz(model, randn(1, 4)).upper.finite


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_hand_written_activations_are_recognised(name):
    graph = trace(Function(ACTIVATIONS[name]), randn(1, 4))
    assert operations(graph) == [name.split(":")[0]]


LOOK_ALIKES = {
    "another mean": lambda x: x * torch.rsqrt(x.roll(1, 1).pow(2).mean(-1, keepdim=True)[:, :1] + (x[:, :1] * 0 + 1e-3)),
    "another variance": lambda x: (x - mean(x)) / torch.sqrt((2 * x).var(-1, keepdim=True) + 1e-3),
    "a gate of something else": lambda x: x * torch.sigmoid(x.flip(1)),
    "a shifted gate": lambda x: x * torch.sigmoid(x + 1),
    "half a mish": lambda x: x * torch.tanh(functional.softplus(x, beta=2.0)),
    "another coefficient": lambda x: 0.5 * x * (1 + torch.erf(x / 1.5)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_not(name):
    graph = trace(Function(LOOK_ALIKES[name]), randn(1, 4))
    assert not {"standardize", "silu", "quick_gelu", "mish", "gelu"} & set(operations(graph))


def test_rounding_that_later_layers_amplify_is_no_difference():
    """Values on the steps of `floor` fall on either side of them; what is recognised is compared where it stands."""
    model = Function(lambda x: torch.floor((x - mean(x)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-30).sqrt()))  # ±1
    assert "standardize" in operations(trace(model, randn(1, 64, 2)))


def test_a_match_that_computes_something_else_is_not_taken(monkeypatch):
    def wrong(node: Node) -> Node | None:
        return replace(node, op="twice", target=lambda x: 2 * torch.sigmoid(x)) if node.op == "sigmoid" else None

    monkeypatch.setattr("normscope.graph.patterns.RECOGNISERS", (wrong,))
    assert operations(trace(Function(torch.sigmoid), randn(1, 4))) == ["sigmoid"]
