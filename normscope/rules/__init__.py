"""Rules, one file per family of operations; `register` adds a user's own."""

from normscope.rules import (
    activations,
    affine,
    arithmetic,
    attention,
    averages,
    convolution,
    distances,
    elementary,
    jumps,
    normalizers,
    pooling,
    products,
    readings,
    sampling,
    shape,
    softmax,
)
from normscope.rules.registry import Context, Gain, Rule, register, registry

__all__ = [
    "Context", "Gain", "Rule", "activations", "affine", "arithmetic", "attention", "averages", "convolution", "distances",
    "elementary", "jumps", "normalizers", "pooling", "products", "readings", "register", "registry", "sampling", "shape",
    "softmax",
]  # fmt: skip
