"""The rows of a checkpoint's report: tensors, pairs, attention layers and blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope._checkpoint.norms import Numbers
from normscope.core.codec import named

BLOCK = re.compile(r"^((?:.*?\.)?(?:layers?|blocks?|h|blk|stages|encoder_layers|features)\.\d+)(?:\.|$)")
OWN = ("name", "role", "shape", "dtype", "rule", "bytes")  # of a tensor's row, beside its numbers


@dataclass(frozen=True)
class TensorRow:
    """One tensor: what it is, by which rule, how it is stored, and its numbers (see `Numbers`)."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    bytes: int
    numbers: Numbers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in Numbers.__dataclass_fields__:
            raise AttributeError(f"a tensor's row has no {name!r}")
        return getattr(self.numbers, name)

    def to_dict(self) -> dict[str, Any]:
        return {**named(self, *OWN), **named(self.numbers, *Numbers.__dataclass_fields__)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TensorRow:
        numbers = Numbers(**{name: content[name] for name in Numbers.__dataclass_fields__})
        return TensorRow(**{name: content[name] for name in OWN} | {"shape": tuple(content["shape"])}, numbers=numbers)


@dataclass(frozen=True)
class PairRow:
    """γ and one weight that reads it. norm: ‖W diag γ‖, proved. complete: nothing but weights reads the normalizer's output."""

    gamma: str
    reader: str
    norm: float | None
    plus_one: bool | None
    complete: bool
    rule: str


@dataclass(frozen=True)
class AttentionRow:
    """The largest that a logit of an attention layer can be, before masks, soft caps and position biases."""

    layer: str
    bound: float | None
    heads: int
    key_heads: int
    basis: str


@dataclass(frozen=True)
class BlockRow:
    """log10 of the products over the matrices of one block, as the audit's; no bound of a residual network."""

    block: str
    matrices: int
    weights_spectral: float
    weights_frobenius: float


def blocks(rows: Iterable[TensorRow], matrices: Sequence[str]) -> tuple[BlockRow, ...]:
    """One row per numbered block, and one for all matrices outside of blocks and embeddings."""
    found: dict[str, list[TensorRow]] = {}
    for row in rows:
        if row.role in matrices and row.role != "embedding" and len(row.shape) >= 2 and row.spectral_norm is not None:
            place = BLOCK.match(row.name)
            found.setdefault(place[1] if place else "", []).append(row)
    return tuple(
        BlockRow(block, len(own), _log10(row.spectral_norm for row in own), _log10(row.frobenius_norm for row in own))
        for block, own in found.items()
    )


def _log10(values: Iterable[float]) -> float:
    listed = list(values)
    return -math.inf if 0 in listed else sum(map(math.log10, listed))
