"""A model as it runs, but with nothing dropped at random: every dropout is the identity, also inside of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from normscope.graph.canonical import DROPOUTS as OPERATIONS
from normscope.graph.graph import Node

DROPOUTS = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_,
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip
PROBABILITY = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}  # place of dropout_p


class Undropped(TorchFunctionMode):
    """Every call that drops at random returns its input, or is made with probability 0."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function in PROBABILITY:
            place = PROBABILITY[function]
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)


def dropped(node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
    """How `Graph.run` computes a node of a graph in which dropouts are identities, but with what is dropped."""
    if node.op in (*OPERATIONS, "scaled_dot_product_attention"):
        node = replace(node, target=getattr(torch.ops.aten, node.op).default)
    return node.evaluate(values, dtype)
