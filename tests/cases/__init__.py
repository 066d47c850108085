"""A case for every rule, small and tight: whoever weakens the rule by a tenth is caught on it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tests.cases.constant import CONSTANT, INFINITE, UNREACHABLE
from tests.cases.entrywise import ENTRYWISE
from tests.cases.parts import Case, on
from tests.cases.shaped import IMAGES, LINES, PLANES, ROWS, VOLUMES
from tests.cases.variants import VARIANTS
from tests.networks import Function, network, randn

__all__ = ["CONSTANT", "ENTRYWISE", "INFINITE", "RULE_CASES", "UNREACHABLE", "VARIANTS", "Case", "Function", "network", "randn"]

RULE_CASES: dict[str, Case] = {
    **on((1, 3), ENTRYWISE), **on((1, 4), ROWS), **on((1, 2, 3), PLANES), **on((1, 2, 4), LINES),
    **on((1, 4, 4, 4), IMAGES), **on((1, 2, 4, 4, 4), VOLUMES), **on((6, 3), {"batch_norm": nn.BatchNorm1d(3, eps=0.1)}, "batch"),
}  # fmt: skip

for _op in (
    "bilinear", "column_stack", "masked_scatter", "fill",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
):  # fmt: skip
    RULE_CASES[_op] = replace(RULE_CASES[_op], effort=0.1)  # torch has no batching rule: the search goes sample by sample
