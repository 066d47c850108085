"""Eval-mode BN folded into the linear map before it: one map with its output channels scaled."""

from __future__ import annotations

import torch

from normscope.core.errors import InternalError
from normscope.graph.graph import Constant, Graph, Node
from normscope.operators.dense import UNIT_ROUNDOFF
from normscope.rules.normalizers import Normalizer, normalizer_of, running_scale

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")


def foldable(graph: Graph) -> dict[Node, Node]:
    """From each eval-mode BN to the linear map or convolution that it alone reads."""
    users = graph.users
    found = {}
    for node in graph:
        normalizer = normalizer_of(node)
        if normalizer is None or not normalizer.fixed or len(node.inputs) != 1:
            continue
        before = node.input
        if len(users[before]) == 1 and before is not graph.output and _channels_second(before):
            found[node] = before
    return found


def applies_weight(node: Node) -> bool:
    """Whether a dense layer or convolution applies a constant matrix or kernel to its only input, with a constant bias if any."""
    if node.op not in ("linear", *CONVOLUTIONS) or node.inputs != node.args[:1]:
        return False
    return isinstance(node.args[1], Constant) and len(node.args[1].shape) > 1


def _channels_second(node: Node) -> bool:
    """Whether a node is a linear map whose channels are on the second axis of its output, where those of BN are."""
    if not applies_weight(node):
        return False
    return len(node.shape) == (2 if node.op == "linear" else len(node.args[1].shape))


def folded_weight(before: Node, normalizer: Normalizer) -> torch.Tensor:
    """diag(γ/√(v + ε)) W, with the output channel first (for transposed convolutions, second)."""
    weight = before.args[1].double()
    scale = running_scale(normalizer)
    if is_transposed(before):
        groups = before.args[8] if before.op == "convolution" else before.args[6]
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        return (grouped * scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)
    return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))


def folded_bias(before: Node, normalizer: Normalizer) -> torch.Tensor:
    """γ (b − μ)/√(v + ε) + β."""
    assert normalizer.running_mean is not None
    bias = before.args[2].double() if before.args[2] is not None else torch.zeros(())
    shifted = running_scale(normalizer) * (bias - normalizer.running_mean)
    return shifted if normalizer.bias is None else shifted + normalizer.bias


def is_transposed(node: Node) -> bool:
    return node.op.startswith("conv_transpose") or (node.op == "convolution" and bool(node.args[6]))


def check_fold(before: Node, normalizer: Normalizer) -> None:
    """Raise unless folding leaves the function unchanged, ε and shift included, on one random patch of the input."""
    assert normalizer.running_mean is not None and normalizer.running_variance is not None
    if is_transposed(before) and before.args[8 if before.op == "convolution" else 6] > 1:
        return  # one row of the kernel serves several groups; tests compare these maps as a whole
    plain, folded = (
        (weight.transpose(0, 1) if is_transposed(before) else weight).flatten(1)
        for weight in (before.args[1].double(), folded_weight(before, normalizer))
    )
    patch = torch.randn(plain.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = before.args[2].double() if before.args[2] is not None else torch.zeros((), dtype=torch.float64)
    expected = torch.nn.functional.batch_norm(
        (plain @ patch + bias).reshape(1, -1), normalizer.running_mean, normalizer.running_variance,
        normalizer.weight, normalizer.bias, eps=normalizer.epsilon,
    )[0]  # fmt: skip
    found = folded @ patch + folded_bias(before, normalizer)
    added = plain.abs() @ patch.abs() + bias.abs() + normalizer.running_mean.abs()  # what may cancel
    scale = expected.abs() + found.abs() + added * running_scale(normalizer).abs() + 1e-300
    if not bool(((expected - found).abs() <= 8 * (len(patch) + 8) * UNIT_ROUNDOFF * scale).all()):
        raise InternalError(f"folding a normalizer into {before.label} changes the function")
