"""What a network computes with beside its parameters: bounds on a class of networks hold if none of it comes from the data."""

from __future__ import annotations

import torch
from torch import nn

from normscope.bounds.table import NotApplicable
from normscope.core.data import Call, Example
from normscope.graph.exporting import tensors_beside_parameters

MOST_NAMED = 3


def check_hypothesis(model: nn.Module, initial: nn.Module | None, example: Example) -> None:
    """Refuse tensors that are not parameters, unless the model before training has the same: they could hold training data."""
    held = tensors_beside_parameters(model, Call.of(example))
    if not held:
        return
    if initial is None:
        raise NotApplicable(
            f"the network reads {_listed(held)}, which no bound on its parameters counts: they could hold training data. "
            "Make them parameters, or pass initial=, the model before training, to show that training has not changed them"
        )
    before = tensors_beside_parameters(initial, Call.of(example))
    changed = {name: value for name, value in held.items() if not _same(value, before.get(name))}
    if changed:
        raise NotApplicable(
            f"the network reads {_listed(changed)}, which training has changed and no bound on its parameters counts"
        )


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.cpu(), other.to(one.dtype).cpu())


def _listed(held: dict[str, torch.Tensor]) -> str:
    shown = [f"{name} {tuple(value.shape)}" for name, value in held.items()]
    rest = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return ", ".join(shown[:MOST_NAMED]) + rest
