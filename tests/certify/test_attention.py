"""Attention in every variant: the bound on a ball holds against a search and against random pairs of the double module."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.graph.trace import trace

TOKENS, WIDTH, HEADS = 5, 8, 4


class SelfAttention(nn.Module):
    """Queries, keys and values of one sequence; hand-written or torch's own, as `fused` says."""

    def __init__(self, bias: bool, mask: str, shared: int, rotary: bool, fused: bool, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size, kept = WIDTH // HEADS, HEADS // shared
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, kept * size, bias=bias) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        angle = torch.arange(TOKENS)[:, None] * torch.tensor([1.0])
        self.register_buffer("cos", torch.cos(angle).repeat(1, size))
        self.register_buffer("sin", torch.sin(angle).repeat(1, size))
        lower = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
        self.register_buffer(
            "mask", {"none": None, "causal": lower, "biased": torch.randn(TOKENS, TOKENS, generator=generator)}[mask]
        )
        self.shared, self.rotary, self.fused = shared, rotary, fused

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin if self.rotary else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = WIDTH // HEADS
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.turn(q), self.turn(k)
        k, v = (part.repeat_interleave(self.shared, 1) for part in (k, v))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        else:
            logits = q @ k.transpose(-1, -2) / math.sqrt(size)
            mixed = (logits if self.mask is None else logits + self.mask).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


VARIANTS = list(itertools.product((False, True), ("none", "causal", "biased"), (1, 2, 4), (False, True), (True, False)))


@pytest.mark.quick(4)
@pytest.mark.parametrize("bias, mask, shared, rotary, fused", VARIANTS)
def test_sound_on_a_ball(bias, mask, shared, rotary, fused):
    seed = VARIANTS.index((bias, mask, shared, rotary, fused))
    model = SelfAttention(bias, mask, shared, rotary, fused, seed)
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(TOKENS, WIDTH, generator=generator)
    for radius in (0.01, 1.0):
        bracket = ns.lipschitz(model, center[None], region=ns.Ball(center, radius), effort=0.2)
        assert bracket.upper.finite and bracket.lower <= bracket.upper
        double = model.double()
        steps = torch.randn(2, 64, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        steps = radius * steps / steps.flatten(2).norm(dim=2)[..., None, None]
        with torch.no_grad():
            change = (double(center + steps[0]) - double(center + steps[1])).flatten(1).norm(dim=1)
        assert float((change / (steps[0] - steps[1]).flatten(1).norm(dim=1)).max()) <= float(bracket.upper)
        model.float()


def test_without_a_region_or_a_normalizer_it_has_no_finite_constant():
    bracket = ns.lipschitz(SelfAttention(False, "none", 1, False, True, 0), torch.randn(1, TOKENS, WIDTH), effort=0.1)
    assert not bracket.upper.finite and "attention" in bracket.reason


def test_behind_a_normalizer_it_is_finite_everywhere():
    model = nn.Sequential(nn.LayerNorm(WIDTH), SelfAttention(True, "causal", 2, True, True, 0))
    assert ns.lipschitz(model, torch.randn(1, TOKENS, WIDTH), effort=0.1).upper.finite


def test_rotary_embeddings_are_recognised_and_break_the_plain_formula():
    """K, Q in one rotary plane with KᵀQ = 0: a formula with ‖KᵀQ‖ ignores the logits, while rotation brings them back."""

    class Turned(nn.Module):
        def forward(self, x):
            query, key = x @ torch.tensor([[0.0, 1.0], [0.0, 0.0]]), x @ torch.tensor([[1.0, 0.0], [0.0, 0.0]])
            turn = torch.arange(6.0)[:, None].repeat(1, 2)
            query, key = (part * turn.cos() + torch.cat([-part[..., 1:], part[..., :1]], -1) * turn.sin() for part in (query, key))
            return functional.scaled_dot_product_attention(query, key, x)

    center, radius = torch.zeros(6, 2), 10 * math.sqrt(6)
    bracket = ns.lipschitz(Turned(), center[None], region=ns.Ball(center, radius))
    assert [node.op for node in trace(Turned(), center[None])].count("rotary") == 2
    assert float(bracket.lower) > 10 > math.sqrt(6)  # √6 = 2.45 is what the plain formula says
    assert bracket.upper >= bracket.lower
