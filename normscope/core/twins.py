"""Copies of models to experiment on."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

Model = TypeVar("Model", bound=torch.nn.Module)


def twin_of(model: Model) -> Model:
    """A deep copy of a model, in training or not.

    A pass leaves tensors with a history in attributes (an activation that is kept, a weight that a hook computes), which torch
    refuses to copy: the twin has their values.
    """
    left = (leaf for module in model.modules() for leaf in tree_leaves(list(vars(module).values())))
    memo: dict[int, Any] = {
        id(leaf): leaf.detach().clone() for leaf in left if isinstance(leaf, torch.Tensor) and not leaf.is_leaf
    }  # fmt: skip
    return copy.deepcopy(model, memo)
