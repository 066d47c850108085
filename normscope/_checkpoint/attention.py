"""A bound on attention logits from weights alone.

A normalizer's output before γ has norm at most √d, so ‖q_h‖ ≤ ‖W_h diag γ‖ √d + ‖W_h β + b_h‖, and the same for keys; rotary
embeddings keep norms. |logit| ≤ scale · max over heads of ‖q_h‖ ‖k_g‖, g the group that h reads. A normalizer of queries or keys
makes it √k max|γ| (+ ‖β‖) instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from normscope._checkpoint.entries import Entry
from normscope._checkpoint.structure import AttentionLayer, Pair, Structure

UNSCALED = ("t5", "mt5", "umt5", "longt5", "gpt_neo")  # no division by √k
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
ROUNDING = 1 + 1e-12


def attention_layers(
    structure: Structure, entries: Mapping[str, Entry], config: Mapping[str, Any], about: Mapping[str, Any]
) -> list[AttentionLayer]:
    """Layers with separate weights of queries and keys, whose heads are known from the configuration."""
    heads = head_count(config, about)
    if heads is None:
        return []
    found = []
    readers: dict[str, Pair] = {reader: pair for pair in structure.pairs for reader in pair.readers}
    for query, role in structure.roles.items():
        if role.kind != "query" or structure.transposed & {query}:
            continue
        keys = [name for name, other in structure.roles.items() if other.kind == "key" and _layer(name) == _layer(query)]
        if len(keys) != 1 or len(entries[query].shape) != 2 or len(entries[keys[0]].shape) != 2:
            continue
        rows, key_rows = entries[query].shape[0], entries[keys[0]].shape[0]
        size = rows // heads
        if not size or rows % heads or key_rows % size or heads % (key_rows // size):
            continue
        layer = _layer(query)
        norms = [_norm(structure, layer, letter, size, rows if letter == "q" else key_rows, entries) for letter in "qk"]
        found.append(
            AttentionLayer(
                layer, query, keys[0], heads, key_rows // size, _scale(config, size), readers.get(query), norms[0], norms[1],
                readers.get(keys[0]),
            )
        )  # fmt: skip
    return found


def logit_bound(
    layer: AttentionLayer, queries: Sequence[Sequence[float]], keys: Sequence[Sequence[float]], width: int, key_width: int,
    normed: tuple[float | None, float | None] = (None, None),
) -> float | None:  # fmt: skip
    """The bound of a layer. queries, keys: (‖W_h diag γ‖, ‖W_h β + b_h‖) per head; normed: a bound on ‖q_h‖, ‖k_g‖ from QK-norm."""
    sizes = [
        [norm * math.sqrt(d) + moved for norm, moved in rows] if rows else [] for rows, d in ((queries, width), (keys, key_width))
    ]
    for side, count in enumerate((layer.heads, layer.key_heads)):
        limit = normed[side]
        if limit is not None:
            sizes[side] = [limit] * count  # whatever the weights are: what is normalized may have been small
    if not sizes[0] or not sizes[1]:
        return None
    shared = layer.heads // layer.key_heads
    return layer.scale * max(sizes[0][head] * sizes[1][head // shared] for head in range(layer.heads)) * ROUNDING


def head_count(config: Mapping[str, Any], about: Mapping[str, Any]) -> int | None:
    """How many heads of queries an attention layer has, as far as a configuration says."""
    arch = about.get("general.architecture")
    given = [config.get(name) for name in HEADS] + [about.get(f"{arch}.attention.head_count")]
    return next((value for value in given if type(value) is int and value > 0), None)


def _scale(config: Mapping[str, Any], size: int) -> float:
    if config.get("model_type") in UNSCALED:
        return 1.0
    for name, power in (("attention_multiplier", 1.0), ("query_pre_attn_scalar", -0.5)):
        value = config.get(name)
        if isinstance(value, (int, float)) and value > 0:
            return float(value) ** power
    return size**-0.5


def _layer(name: str) -> str:
    """The path of the attention that a weight belongs to."""
    return re.sub(r"\.?(?:attn_)?[^.]*\.weight$", "", name)


def _norm(structure: Structure, layer: str, letter: str, size: int, rows: int, entries: Mapping[str, Entry]) -> str | None:
    """The γ of the normalizer of queries or keys, if it stands beside them and is as wide as a head or as all of them."""
    named = (f"{layer}.{letter}_norm.weight", f"{layer}.attn_{letter}_norm.weight", f"{layer}.{letter}_layernorm.weight")
    return next(
        (name for name in named if name in entries and entries[name].shape in ((size,), (rows,)) and name in structure.gammas), None
    )
