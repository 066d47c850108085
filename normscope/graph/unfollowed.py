"""Why an operation of an exported program cannot be part of a graph, in words that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves

from normscope.core.errors import ExportError, NormscopeError, Refusal
from normscope.graph.exporting import described
from normscope.graph.graph import Node
from normscope.graph.naming import label


def unfollowed(fx: FxNode, values: Mapping[FxNode, Any], error: Exception) -> NormscopeError:
    """For whatever torch raised for one operation."""
    given = [values.get(node) for node in fx.all_input_nodes]
    if any(_is_count(node) and isinstance(value, Node) for node, value in zip(fx.all_input_nodes, given, strict=True)):
        return _of_no_fixed_size(fx)
    return ExportError(f"{label(fx)} cannot be part of a graph: {described(error)}")


def check_size(fx: FxNode, target: Any, args: tuple[Any, ...]) -> None:
    """Refuse what returns as many entries as values of the input say: x[mask], or pieces of x of sizes that are counted."""
    if all(isinstance(size, int) for made in tree_leaves(fx.meta.get("val")) for size in getattr(made, "shape", ())):
        return
    chosen = torch.Tag.dynamic_output_shape in getattr(target, "tags", ())
    choosing = [part for part in tree_leaves(args[1:] if len(args) > 1 else args) if isinstance(part, Node)]
    counted = any(map(_is_count, fx.all_input_nodes)) and any(part.dtype is None for part in choosing)
    if (chosen and choosing) or counted:
        raise _of_no_fixed_size(fx)


def _is_count(node: FxNode) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool))


def _of_no_fixed_size(fx: FxNode) -> Refusal:
    return Refusal(
        "how many entries a tensor has depends on the input's values, so the model has no graph of fixed shapes",
        [label(fx)],
        "Keep all entries and weigh them (torch.where), or pass what chooses them, such as a mask, as an input that is not "
        "floating-point: it is held fixed.",
    )
