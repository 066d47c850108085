"""Logits and entropy of attention, from the queries and keys that autograd keeps for the backward pass. Nothing is run again.

Fused attention (`scaled_dot_product_attention`) keeps them in its own node, a written-out one in the product below its softmax.
What somebody packed with hooks (checkpointing, offloading) is left alone: unpacking it would run their code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normscope._watch.backward import RESHAPE, AutogradNode, kind_of, nodes_below

SAMPLES, QUERIES = 2, 32  # of a batch and of its positions
FUSED, SOFTMAX = "ScaledDotProduct", ("Softmax", "SafeSoftmax")
PASSED = RESHAPE | {"Add", "Sub", "MaskedFill", "Where"}  # between a softmax and its product: masks and shapes
MOST_BETWEEN = 12  # nodes


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, and the numbers of the autograd nodes that it could make."""

    path: str
    call: int
    began: int
    ended: int


def attentions(roots: Sequence[AutogradNode], calls: Sequence[ModuleCall]) -> dict[tuple[str, int], torch.Tensor]:
    """(module, call) → (largest |logit|, least entropy), of the innermost module that computes attention; the worst of several."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for node in nodes_below(roots):
        kind = kind_of(node)
        measured = _fused(node) if kind.startswith(FUSED) else _written_out(node) if kind in SOFTMAX else None
        place = _innermost(node._sequence_nr(), calls) if measured is not None else None
        if measured is None or place is None:
            continue
        key, before = (place.path, place.call), found.get((place.path, place.call))
        found[key] = measured if before is None else torch.stack(
            [torch.fmax(measured[0], before[0]), torch.fmin(measured[1], before[1])]
        )  # fmt: skip
    return found


def _innermost(number: int, calls: Sequence[ModuleCall]) -> ModuleCall | None:
    around = [call for call in calls if call.began <= number < call.ended]
    return max(around, key=lambda call: call.began, default=None)


def _saved(node: AutogradNode, name: str) -> torch.Tensor | None:
    """What a node keeps, unless it is packed, or gone."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:  # of a torch that cannot tell, nothing is asked
        return None
    try:
        value = getattr(node, f"_saved_{name}")
    except RuntimeError:  # freed, or changed in place since
        return None
    return value.detach() if type(value) is torch.Tensor else None


def _fused(node: AutogradNode) -> torch.Tensor | None:
    """Of (samples, heads, positions, entries); several heads of queries may share one of keys."""
    query, key = _saved(node, "query"), _saved(node, "key")
    if query is None or key is None or query.dim() != 4 or key.dim() != 4 or not query.numel() or not key.numel():
        return None
    mask = next((found for name in ("attn_mask", "attn_bias") if (found := _saved(node, name)) is not None), None)
    scale = getattr(node, "_saved_scale", None)
    query, key = query[:SAMPLES].float(), key[:SAMPLES].float()
    rows = _chosen(query.shape[2], query.device)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1) if key.shape[1] != query.shape[1] else key
    logits = query[:, :, rows] @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    seen = torch.ones_like(logits, dtype=torch.bool)
    if getattr(node, "_saved_is_causal", False):
        seen &= torch.arange(key.shape[2], device=key.device) <= rows[:, None]
    if mask is not None:
        mask = mask[:SAMPLES] if mask.dim() == 4 else mask
        mask = mask.broadcast_to(*query.shape[:3], key.shape[2])[:, :, rows]
        seen, logits = (seen & mask, logits) if mask.dtype == torch.bool else (seen & mask.isfinite(), logits + mask)
    return _measured(logits, logits.masked_fill(~seen, -math.inf).softmax(-1), seen)


def _written_out(node: AutogradNode) -> torch.Tensor | None:
    """Of a softmax over the last axis of a product of two things that are learned, scaled and masked on the way."""
    weights = _saved(node, "result")
    if weights is None or weights.dim() < 3 or not weights.numel():
        return None
    factor, below = 1.0, node.next_functions[0][0]
    for _ in range(MOST_BETWEEN):
        if below is None or kind_of(below) == "Bmm":
            break
        if kind_of(below) in ("Mul", "Div"):
            by = _saved(below, "other")
            if by is None or by.numel() != 1 or by.device.type != "cpu":  # to read it would wait for a device
                return None
            factor = factor * float(by) if kind_of(below) == "Mul" else factor / float(by)
        elif kind_of(below) not in PASSED:
            return None
        below = next((one for one, _ in below.next_functions if one is not None), None)
    if below is None or kind_of(below) != "Bmm" or any(one is None for one, _ in below.next_functions):
        return None
    query, key = _saved(below, "self"), _saved(below, "mat2")
    if query is None or key is None or key.shape[-1] != weights.shape[-1] or query.shape[-2] != weights.shape[-2]:
        return None
    rows = _chosen(query.shape[-2], query.device)
    heads = weights.flatten(0, -3)  # (samples and heads, positions, positions), as the product has them
    logits = query[:, rows].float() @ key.float() * factor
    weights = heads[:, rows].float()
    return _measured(logits, weights, weights > 0) if len(heads) == len(query) else None


def _chosen(positions: int, device: Any) -> torch.Tensor:
    """A few positions, the last included, which under a causal mask sees all."""
    # in float32, whatever the default type: bfloat16 has no numbers for late positions
    return torch.linspace(0, positions - 1, min(positions, QUERIES), dtype=torch.float32, device=device).round().long()


def _measured(logits: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The largest |logit| among what is seen, and the least over heads of −Σ p ln p / ln n, of queries that see n > 1 keys."""
    largest = logits.masked_fill(~seen, 0.0).abs().amax()
    several = seen.sum(-1) > 1
    entropy = -torch.xlogy(weights, weights).sum(-1) / seen.sum(-1).clamp(min=2).log()
    mean = (entropy * several).sum(-1) / several.sum(-1)  # 0/0 is NaN where no query of a head sees several
    return torch.stack([largest, torch.where(mean.isnan(), math.inf, mean).amin().nan_to_num(posinf=math.nan)])
