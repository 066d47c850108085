"""Rules without a gain of their own: constants, jumps, and what no traced graph reaches."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from tests.cases.parts import POSITIONS, Case, aten, on

# Rules that give the gain 0, with something tight around them.
CONSTANT: dict[str, Case] = on(
    (1, 4),
    {
        "zeros_like": lambda x: x + torch.zeros_like(x),
        "ones_like": lambda x: x * torch.ones_like(x),
        "full_like": lambda x: x * torch.full_like(x, 2.0),
        "new_zeros": lambda x: x + x.new_zeros(4),
        "new_ones": lambda x: x * x.new_ones(4),
        "new_full": lambda x: x + x.new_full((4,), 2.0),
    },
)

# Rules that give no finite gain: the function jumps.
INFINITE: dict[str, Case] = on(
    (1, 3),
    {
        "sign": torch.sign, "sgn": torch.sgn, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
        "trunc": torch.trunc, "frac": torch.frac, "hardshrink": functional.hardshrink,
        "heaviside": lambda x: torch.heaviside(x, torch.ones(3)),
        "rounded_div": lambda x: torch.div(x, 2, rounding_mode="floor"),
        "remainder": lambda x: x % 2, "fmod": lambda x: torch.fmod(x, 2), "floor_divide": lambda x: torch.floor_divide(x, 2),
        "to": lambda x: x.to(torch.int64).to(x.dtype), "type_as": lambda x: x.type_as(POSITIONS).to(x.dtype),
        "_to_copy": lambda x: aten._to_copy(x, dtype=torch.int32) * x,
        "eq": lambda x: torch.where(x == 0, 1.0, x), "ne": lambda x: torch.where(x != 0, 1.0, x),
        "lt": lambda x: torch.where(x < 0, 1.0, x), "le": lambda x: torch.where(x <= 0, 1.0, x),
        "gt": lambda x: torch.where(x > 0, 1.0, x), "ge": lambda x: torch.where(x >= 0, 1.0, x),
        "logical_and": lambda x: torch.where(torch.logical_and(x > 0, x > 1), 1.0, x),
        "logical_or": lambda x: torch.where(torch.logical_or(x > 0, x > 1), 1.0, x),
        "logical_xor": lambda x: torch.where(torch.logical_xor(x > 0, x > 1), 1.0, x),
        "logical_not": lambda x: torch.where(torch.logical_not(x > 0), 1.0, x),
        "__and__": lambda x: torch.where((x > 0) & (x > 1), 1.0, x), "__or__": lambda x: torch.where((x > 0) | (x > 1), 1.0, x),
        "__xor__": lambda x: torch.where((x > 0) ^ (x > 1), 1.0, x),
        "bitwise_and": lambda x: torch.where(torch.bitwise_and(x > 0, x > 1), 1.0, x),
        "bitwise_or": lambda x: torch.where(torch.bitwise_or(x > 0, x > 1), 1.0, x),
        "bitwise_xor": lambda x: torch.where(torch.bitwise_xor(x > 0, x > 1), 1.0, x), "bitwise_not": lambda x: torch.where(~(x > 0), 1.0, x),
        "argmax": lambda x: torch.where(x.argmax(1, keepdim=True) > 0, 1.0, x),
        "argmin": lambda x: torch.where(x.argmin(1, keepdim=True) > 0, 1.0, x),
        "isnan": lambda x: torch.where(torch.isnan(x), 1.0, x), "isinf": lambda x: torch.where(torch.isinf(x), 1.0, x),
        "isfinite": lambda x: torch.where(torch.isfinite(x), 1.0, x), "signbit": lambda x: torch.where(torch.signbit(x), 1.0, x),
        "isposinf": lambda x: torch.where(torch.isposinf(x), 1.0, x), "isneginf": lambda x: torch.where(torch.isneginf(x), 1.0, x),
        "all": lambda x: torch.where((x > 0).all(1, keepdim=True), 1.0, x), "any": lambda x: torch.where((x > 0).any(1, keepdim=True), 1.0, x),
        "count_nonzero": lambda x: x * torch.count_nonzero(x > 0, 1)[:, None], "isin": lambda x: torch.where(torch.isin(x, torch.arange(3.0)), 1.0, x),
        "argsort": lambda x: x.gather(1, x.argsort(1)), "embedding": lambda x: functional.embedding(x.argmax(1), torch.eye(3)),
        "searchsorted": lambda x: torch.where(torch.searchsorted(torch.arange(3.0), x) > 1, 1.0, x),
        "one_hot": lambda x: x * functional.one_hot(x.argmax(1), 3),
        "bucketize": lambda x: torch.where(torch.bucketize(x, torch.arange(3.0)) > 1, 1.0, x),
    },
)  # fmt: skip

# Rules that no traced graph reaches, with the reason.
UNREACHABLE: dict[str, str] = {
    **dict.fromkeys(("grouped_mm", "histc"), "of routers, whose samples are told apart elsewhere; tests/test_wild.py reaches them"),
    "copy": "tracing rewrites a copy as the expansion that it is; what is left copies integers",
    **dict.fromkeys(("_weight_norm", "_weight_norm_interface"), "a form only: acts on parameters, which are folded"),
    **dict.fromkeys(("dropout", "feature_dropout", "native_dropout", "rrelu_with_noise"), "a form only: random, so not certified"),
}
