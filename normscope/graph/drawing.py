"""Random numbers that are the same wherever they are drawn, so that a model and its graph can be compared.

A graph need not draw in the order of its model, nor with the same operations: torch writes a dropout as a product, say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.core.randomness import seed_generators
from normscope.graph.double import in_double


class DrawnAlike(TorchDispatchMode):
    """Every operation that draws starts from the same seed, and draws in float64, whose numbers are not those of float32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
            return function(*args, **kwargs)
        copies, named = tree_map_only(torch.Tensor, _copied, (args, kwargs))  # the operation may write to what it is given
        seed_generators(0)
        result = function(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if all(leaf.dtype == torch.float64 for leaf in made):
            return result
        copies, named = in_double(function, copies, named, made[0])
        seed_generators(0)
        drawn = [leaf for leaf in tree_leaves(function(*copies, **named)) if isinstance(leaf, torch.Tensor)]
        for own, other in zip(made, [leaf for leaf in drawn if leaf.is_floating_point()], strict=True):
            own.copy_(other)
        return result


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float64, copy=True) if value.is_floating_point() else value.clone()
