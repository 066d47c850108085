"""Eval-mode BN folded into the linear map before it: one map with its output channels scaled."""

from __future__ import annotations

import torch

from normscope.core.errors import InternalError
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import UNIT_ROUNDOFF
from normscope.rules.affine import constant_map
from normscope.rules.readings import LinearMap, Normalizer
from normscope.rules.registry import registry


def foldable(graph: Graph) -> dict[Node, Node]:
    """From each eval-mode BN to the linear map or convolution that it alone reads."""
    users = graph.users
    found = {}
    for node in graph:
        normalizer = registry.reading(node, Normalizer)
        if normalizer is None or not normalizer.fixed or len(node.inputs) != 1:
            continue
        before = node.input
        if len(users[before]) == 1 and before is not graph.output and _channels_second(before):
            found[node] = before
    return found


def _channels_second(node: Node) -> bool:
    """Whether a node is a linear map whose channels are on the second axis of its output, where those of BN are."""
    found = constant_map(node)
    return found is not None and found.output_axis == 1 - len(node.shape)


def check_fold(node: Node, before: LinearMap, normalizer: Normalizer) -> bool:
    """Raise unless folding leaves the function unchanged, ε and shift included, on one random patch of the input.

    False where numbers are too large to tell: a variance of 0 without ε, or weights near the largest number there is.
    """
    folded = before.scaled(*normalizer.affine)
    plain = before.matrix()
    patch = torch.randn(plain.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = before.bias.double() if isinstance(before.bias, Constant) else torch.zeros((), dtype=torch.float64)
    assert isinstance(folded.bias, Constant) and normalizer.running_mean is not None
    expected = torch.nn.functional.batch_norm(
        (plain @ patch + bias).reshape(1, -1), normalizer.running_mean, normalizer.running_variance,
        normalizer.weight, normalizer.bias, eps=normalizer.epsilon,
    )[0]  # fmt: skip
    found = folded.matrix() @ patch + folded.bias.double()
    added = plain.abs() @ patch.abs() + bias.abs() + normalizer.running_mean.abs()  # what may cancel
    scale = expected.abs() + found.abs() + added * normalizer.affine[0].abs() + 1e-300
    if not bool((scale + expected - found).isfinite().all()):
        return False
    if not bool(((expected - found).abs() <= 8 * (len(patch) + 8) * UNIT_ROUNDOFF * scale).all()):
        raise InternalError(f"folding a normalizer into {node.label} changes the function")
    return True
