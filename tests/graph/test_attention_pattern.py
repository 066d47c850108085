"""Attention written by hand becomes the fused operation, where it means the same, and stays as it is where it does not."""

import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.graph.trace import trace
from tests.networks import Function
from tests.sweep.search import largest_quotient

TOKENS, SIZE = 4, 3
CAUSAL = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
BLIND = CAUSAL.clone().index_fill_(0, torch.tensor([0]), -math.inf)  # the first query sees nothing


def flat_heads(q, k, v, beta):
    """Samples and heads on one axis, as some older models have them."""
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    bias = torch.arange(TOKENS).to(q).expand(len(q), 1, TOKENS)
    logits = bias.baddbmm(q, k.mT, beta=beta, alpha=0.7).view(-1, 2, TOKENS, TOKENS) + CAUSAL
    return logits.softmax(-1).view(len(q), TOKENS, TOKENS).bmm(v)


def flat_scores(q, k, v):
    """Samples and heads on one axis in the scores alone."""
    scores = torch.zeros(1, 1, 1).to(q).baddbmm(*(part.flatten(0, 1) for part in (q, k.mT)), alpha=0.7)
    return (scores.view(-1, 2, TOKENS, TOKENS) + CAUSAL).softmax(-1) @ v


FUSED = {
    "matmul": lambda q, k, v: (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).softmax(-1) @ v,
    "scaled queries": lambda q, k, v: ((0.5 * q) @ k.mT).softmax(-1) @ v,
    "no scale": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "negative scale": lambda q, k, v: (-2 * (q @ k.mT)).softmax(-1) @ v,
    "causal": lambda q, k, v: (q @ k.mT + CAUSAL).softmax(-1) @ v,
    "least number": lambda q, k, v: (q @ k.mT + CAUSAL.clamp(min=torch.finfo(torch.float32).min)).softmax(-1) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT).masked_fill(CAUSAL < 0, -math.inf).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(CAUSAL == 0, q @ k.mT, torch.tensor(-math.inf)).softmax(-1) @ v,
    "logit bias": lambda q, k, v: (q @ k.mT + torch.arange(TOKENS)).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "bias and mask": lambda q, k, v: (q @ k.mT + torch.arange(TOKENS) + CAUSAL).softmax(-1) @ v,
    "bias and masked_fill": lambda q, k, v: (q @ k.mT + torch.arange(TOKENS)).masked_fill(CAUSAL < 0, -math.inf).softmax(-1) @ v,
    "baddbmm": lambda q, k, v: flat_heads(q, k, v, 1.0),
    "baddbmm with beta": lambda q, k, v: flat_heads(q, k, v, 0.5),
    "baddbmm in the scores alone": flat_scores,
    "permuted keys": lambda q, k, v: (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v,
}  # fmt: skip
APART = {
    "over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "blind": lambda q, k, v: (q @ k.mT + BLIND.clamp(min=-1e38)).softmax(-1) @ v,
    "temperature of the input": lambda q, k, v: (q @ k.mT * q.mean((1, 2, 3), keepdim=True).sigmoid()).softmax(-1) @ v,
    "sigmoid": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    "transposed weights": lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v,
    "heads side by side": lambda q, k, v: (q @ k.mT).view(-1, 2 * TOKENS, TOKENS).softmax(-1).view(-1, 2, TOKENS, TOKENS) @ v,
    "keys and values apart": lambda q, k, v: torch.einsum("bhij,bhid->bhjd", (q @ k.mT).softmax(-1), v),
}


class SelfAttention(nn.Module):
    def __init__(self, mix) -> None:
        super().__init__()
        self.heads, self.mix = nn.Linear(6, 3 * 2 * SIZE), Function(mix)

    def forward(self, x):
        q, k, v = self.heads(x).unflatten(-1, (3, 2, SIZE)).unbind(-3)
        return self.mix(*(part.transpose(1, 2) for part in (q, k, v)))


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", [*FUSED, *APART])
def test_recognised_where_it_means_the_same(name):
    torch.manual_seed(0)
    model, x = SelfAttention({**FUSED, **APART}[name]), torch.randn(1, TOKENS, 6)
    graph = trace(model, x, "eval", None)
    assert ("scaled_dot_product_attention" in {node.op for node in graph}) == (name in FUSED)
    with torch.no_grad():
        assert torch.allclose(graph.run([x], torch.float64)[0], model.double()(x.double()), atol=1e-12)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FUSED)
def test_the_bound_holds(name):
    torch.manual_seed(0)
    model, x = SelfAttention(FUSED[name]), torch.randn(1, TOKENS, 6)
    found = ns.lipschitz(nn.Sequential(nn.LayerNorm(6), model), x, effort=0.2)
    assert found.upper.finite and found.lower <= found.upper


class Relative(nn.Module):
    """Attention with a bias that queries and positions make, behind a normalizer; heads: of keys and values, two of queries."""

    def __init__(self, heads=2, hidden=False) -> None:
        super().__init__()
        self.norm, self.queries, self.rest = nn.LayerNorm(6), nn.Linear(6, 2 * SIZE), nn.Linear(6, 2 * heads * SIZE)
        self.positions, self.heads, self.hidden = nn.Parameter(torch.randn(2, TOKENS, SIZE)), heads, hidden

    def forward(self, x):
        x = self.norm(x)
        q = self.queries(x).unflatten(-1, (2, SIZE)).transpose(1, 2)
        k, v = self.rest(x).unflatten(-1, (2, self.heads, SIZE)).transpose(1, 3).unbind(2)
        bias = q @ self.positions.mT
        bias = bias.masked_fill(CAUSAL < 0, -math.inf) if self.hidden else bias
        return nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=self.heads == 1).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("radius", [None, 0.05])
@pytest.mark.parametrize("settings", [{}, {"heads": 1}, {"hidden": True}], ids=str)
def test_attention_with_a_bias_of_the_input(settings, radius):
    torch.manual_seed(0)
    model, x = Relative(**settings), torch.randn(1, TOKENS, 6)
    region = None if radius is None else ns.Ball(x[0].double(), radius)
    found = ns.lipschitz(model, x, region=region, effort=0.2)
    largest, _ = largest_quotient(model.double(), x[0].double(), region, seed=1)
    assert found.upper.finite and 0 < largest <= float(found.upper)
