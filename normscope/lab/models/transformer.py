"""Small transformers, with any normalizer: a vision transformer and a GPT-like predictor of the next token."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from normscope.core.errors import InputError
from normscope.lab.models.layers import initialize, linear
from normscope.lab.models.normalizers import token_normalizer

EXPANSION = 4

T = TypeVar("T", "VisionTransformer", "NextToken")


class Attention(nn.Module):
    """Multi-head attention of (batch, tokens, width); causal: a token sees those before it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Branch(nn.Module):
    """x + f(no(x)): normalized before the branch."""

    def __init__(self, width: int, normalizer: str, function: nn.Module, end: nn.Module) -> None:
        super().__init__()
        self.normalizer, self.function = token_normalizer(normalizer, width), function
        self._end = [end]  # in a list, so that it is no second child

    @property
    def branch_end(self) -> nn.Module:
        return self._end[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.function(self.normalizer(x))
        return y


def block(width: int, heads: int, normalizer: str, causal: bool) -> nn.Sequential:
    """An attention branch, then an MLP branch."""
    attention = Attention(width, heads, causal)
    last = linear(EXPANSION * width, width)
    perceptron = nn.Sequential(linear(width, EXPANSION * width), nn.GELU(), last)
    return nn.Sequential(Branch(width, normalizer, attention, attention.out), Branch(width, normalizer, perceptron, last))


class VisionTransformer(nn.Module):
    """Patches to tokens, learned positions, blocks, a normalizer, the mean token, a linear map."""

    def __init__(self, classes: int, normalizer: str, size: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.utils.skip_init(nn.Conv2d, 3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(block(width, heads, normalizer, causal=False) for _ in range(depth)))
        self.normalizer = token_normalizer(normalizer, width)
        self.head = linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        y: torch.Tensor = self.head(self.normalizer(self.blocks(tokens)).mean(1))
        return y


class NextToken(nn.Module):
    """Token ids (batch, tokens), or their embeddings, to logits of the token that follows; a causal transformer."""

    def __init__(self, vocabulary: int, normalizer: str, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.utils.skip_init(nn.Embedding, vocabulary, width)
        self.positions = nn.Parameter(torch.empty(1, context, width))
        self.blocks = nn.Sequential(*(block(width, heads, normalizer, causal=True) for _ in range(depth)))
        self.normalizer = token_normalizer(normalizer, width)
        self.head = linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = tokens if tokens.is_floating_point() else self.embedding(tokens)
        x = embedded + self.positions[:, : tokens.shape[1]]
        y: torch.Tensor = self.head(self.normalizer(self.blocks(x))[:, -1])
        return y


def vit(
    classes: int = 10,
    normalizer: str = "layer",
    size: int = 32,
    patch: int = 4,
    width: int = 128,
    depth: int = 6,
    heads: int = 4,
    generator: torch.Generator | None = None,
) -> VisionTransformer:
    """A small vision transformer for RGB images of size × size, 2·depth + 1 normalizers.

    >>> vit(size=8, width=16, depth=1)(torch.zeros(5, 3, 8, 8)).shape
    torch.Size([5, 10])
    """
    _check(width, heads)
    if size % patch:
        raise InputError(f"images of {size}×{size} cannot be cut into patches of {patch}×{patch}: choose a divisor of {size}")
    return _initialized(VisionTransformer(classes, normalizer, size, patch, width, depth, heads), normalizer, generator)


def gpt(
    vocabulary: int = 16,
    normalizer: str = "layer",
    context: int = 32,
    width: int = 128,
    depth: int = 6,
    heads: int = 4,
    generator: torch.Generator | None = None,
) -> NextToken:
    """A small GPT-like network on token ids, at most `context` of them, 2·depth + 1 normalizers.

    >>> gpt(width=16, depth=1)(torch.zeros(5, 7, dtype=torch.int64)).shape
    torch.Size([5, 16])
    """
    _check(width, heads)
    return _initialized(NextToken(vocabulary, normalizer, context, width, depth, heads), normalizer, generator)


def _check(width: int, heads: int) -> None:
    if width % heads:
        raise InputError(f"a width of {width} cannot be shared by {heads} heads: choose a divisor of {width}")


def _initialized(model: T, normalizer: str, generator: torch.Generator | None) -> T:
    generator = generator or torch.Generator().manual_seed(0)
    nn.init.normal_(model.positions, std=0.02, generator=generator)
    initialize(model, normalizer, generator)
    return model
