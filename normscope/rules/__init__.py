"""Rules, one file per family of operations; `register` adds a user's own."""

from normscope.rules import activations, affine, arithmetic, attention, averages, convolution, normalizers, pooling, shape, softmax
from normscope.rules.registry import Context, Gain, Rule, register, registry

__all__ = [
    "Context", "Gain", "Rule", "activations", "affine", "arithmetic", "attention", "averages", "convolution", "normalizers",
    "pooling", "register", "registry", "shape", "softmax",
]  # fmt: skip
