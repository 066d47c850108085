"""Infinity is claimed where inputs show it, and not of a function that has a constant."""

from __future__ import annotations

import pytest
import torch

from normscope.certify.unbounded import evidence
from normscope.core.region import Ball
from normscope.graph.trace import trace
from tests.networks import Function, randn


def routed(gates):
    """Tokens in the order of their experts, which are counted, each times the gate of its own; then in their places again."""

    def function(x):
        tokens = x.view(-1, 2)
        choice = tokens.argmax(1)
        order = choice.argsort(stable=True)
        ends = torch.histc(choice[order].to(x.dtype), 2, 0, 1).cumsum(0, dtype=torch.int32)
        expert = (torch.arange(len(tokens))[:, None] >= ends).sum(1)
        return (tokens[order] * gates.to(x)[expert][:, None])[order.argsort()].view(x.shape)

    return function


def attended(tokens):
    """A small token turns its query quickly, and what it reads from a large one is large."""
    turned = torch.nn.functional.rms_norm(tokens, (2,), eps=1e-2)
    return torch.nn.functional.scaled_dot_product_attention(turned, turned, tokens)


WITHOUT_CONSTANT = {
    "a jump": torch.floor,
    "a tiny jump": lambda x: torch.where(x > 0, x, x + 1e-6),
    "a router": lambda x: x * torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0),
    "experts that are counted": routed(torch.tensor([1.0, 1.5])),
    "a cusp": lambda x: torch.relu(x).sqrt(),
    "a pole": lambda x: 1 / x,
    "a product": lambda x: x * x.flip(1),
    "a product behind large biases": lambda x: (x + 5e2) * (x.flip(1) - 1e3),
    "a gate": torch.nn.functional.glu,
    "a normalizer without ε": lambda x: torch.nn.functional.layer_norm(x, (4,), eps=0.0),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.reshape(-1, 1, 2, 2)] * 3),
}
WITH_CONSTANT = {
    "linear": lambda x: 3 * x,
    "a kink": torch.relu,
    "a choice of equals": lambda x: torch.where(x > 0, x, 2 * x),
    "experts that are the same": routed(torch.ones(2)),
    "sorted by": lambda x: x.gather(1, x.argsort(1)),
    "smooth and steep": lambda x: torch.tanh(1e3 * x),
    "a product that levels off": lambda x: x * torch.tanh(x),
    "a product that levels off far away": lambda x: x * torch.tanh(x / 1e4),
    "a quotient that levels off far away": lambda x: x * x / (1 + x * x / 1e8),
    "a product behind large biases that levels off": lambda x: (x.clamp(-1e5, 1e5) + 5e2) * (x.flip(1).clamp(-1e5, 1e5) - 1e3),
    "a square that is cut off far away": lambda x: (x * x).clamp(max=1e6),
    "a direction, with a tiny ε": lambda x: x * torch.exp(-0.5 * torch.log(x.square().sum(1, keepdim=True) + 1e-10)),
    "hidden by roundoff": lambda x: (x + 1e6) - 1e6 + torch.where(x > 0, x, 2 * x),
    "constant beyond": lambda x: x.clamp(-1, 1).square(),
    "a normalizer with ε": lambda x: torch.nn.functional.layer_norm(x, (4,), eps=1e-5),
    "a normalizer with a tiny ε": lambda x: torch.nn.functional.layer_norm(x, (4,), eps=1e-12),
    "a normalizer with ε and a shift before it": lambda x: torch.nn.functional.rms_norm(x + 1e-3, (4,), eps=1e-6),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", WITHOUT_CONSTANT)
def test_inputs_show_that_there_is_no_constant(name, seed):
    assert evidence(trace(Function(WITHOUT_CONSTANT[name]), randn(1, 4)), randn(1, 4, seed=seed)).startswith("shown by")


@pytest.mark.quick(18)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", WITH_CONSTANT)
def test_nothing_is_shown_of_a_function_with_a_constant(name, seed):
    assert evidence(trace(Function(WITH_CONSTANT[name]), randn(1, 4)), randn(1, 4, seed=seed)) == ""


@pytest.mark.parametrize("seed", range(2))
def test_some_tokens_may_grow_alone(seed):
    assert "larger" in evidence(trace(Function(attended), randn(1, 4, 2)), randn(1, 8, seed=seed))


TOKENS_WITH_CONSTANT = {
    "attention behind a normalizer": lambda x: attended(torch.nn.functional.layer_norm(x, (2,), eps=1e-2)),
    "a normalizer of all tokens": lambda x: torch.nn.functional.layer_norm(x, (4, 2), eps=1e-5),
    "the largest token": lambda x: x.amax(1),
    "a weighted mean that levels off": lambda x: x.clamp(-1e3, 1e3).softmax(1) * x.clamp(-3, 3),
}


@pytest.mark.parametrize("name", TOKENS_WITH_CONSTANT)
def test_tokens_that_grow_alone_show_nothing_of_a_function_with_a_constant(name):
    assert evidence(trace(Function(TOKENS_WITH_CONSTANT[name]), randn(1, 4, 2)), randn(1, 8)) == ""


OVERFLOWING = {  # far away, whether or not the function levels off before that
    "exp": (torch.exp, True),
    "exp of a square": (lambda x: torch.exp(x * x), True),
    "softplus by hand": (lambda x: 40 * torch.log1p(torch.exp(x / 40 - 20)), False),
    "the logistic function by hand": (lambda x: torch.exp(x - 100) / (1 + torch.exp(x - 100)), False),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_outputs_that_overflow_show_nothing_by_that(name):
    function, infinite = OVERFLOWING[name]
    assert bool(evidence(trace(Function(function), randn(1, 50)), randn(1, 50))) is infinite


def test_what_lies_outside_a_region_shows_nothing():
    graph, middle = trace(Function(torch.floor), randn(1, 4)), torch.full((4,), 0.5)
    assert evidence(graph, middle[None], Ball(middle, 0.4)) == ""
    assert evidence(graph, middle[None], Ball(middle, 4.0)).startswith("shown by")
