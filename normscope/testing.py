"""Networks whose constant is known exactly, and a check for rules of one's own.

import normscope as ns
from normscope.testing import check_rule
ns.rules.register(torch.ops.mylib.op, 2.0)
check_rule(module_that_uses_it, example)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normscope.certify.lipschitz import lipschitz
from normscope.core.bracket import Bracket
from normscope.core.data import Example
from normscope.core.magnitude import Magnitude


def check_rule(
    module: torch.nn.Module, example: Example, mode: str = "eval", tries: int = 3, tight: float | None = None
) -> Bracket:
    """Raise AssertionError if a difference quotient anywhere exceeds the bound that the rules give.

    tries: searches from different random states. tight: also require upper ≤ tight · lower.
    """
    found: Bracket | None = None
    for seed in range(tries):
        try:
            bracket = lipschitz(module, example, mode=mode, generator=torch.Generator().manual_seed(seed))
        except AssertionError as error:
            raise AssertionError(f"the rules are unsound for {type(module).__name__}: {error}") from error
        if found is None or bracket.lower > found.lower:
            found = bracket
    assert found is not None
    if tight is not None and not found.upper <= found.lower * tight:
        raise AssertionError(f"not tight: {found}, more than a factor {tight} apart")
    return found


def extremal_chain(
    constants: Sequence[float], widths: Sequence[int], activation: type[torch.nn.Module] = torch.nn.ReLU
) -> torch.nn.Sequential:
    """Than 2025, Theorem 6: weights a_k·[I 0] make a ReLU chain with constant exactly ∏ a_k.

    constants: a_k ≥ 0, one a layer. widths: input, hidden and output widths, one more than constants.
    """
    if len(widths) != len(constants) + 1:
        raise ValueError(f"{len(constants)} layers need {len(constants) + 1} widths, got {len(widths)}")
    layers: list[torch.nn.Module] = []
    for scale, width_in, width_out in zip(constants, widths, widths[1:], strict=False):
        layer = torch.nn.Linear(width_in, width_out, bias=False)
        with torch.no_grad():
            layer.weight.copy_(scale * torch.eye(width_out, width_in))
        layers += [layer, activation()]
    return torch.nn.Sequential(*layers[:-1])


def extremal_constant(constants: Sequence[float]) -> Magnitude:
    """∏ a_k, the Lipschitz constant of `extremal_chain`."""
    result = Magnitude(1)
    for constant in constants:
        result = result * abs(constant)
    return result


def extremal_weight_constant(model: torch.nn.Sequential, constants: Sequence[float], layer: int, x: torch.Tensor) -> Magnitude:
    """Than 2025, Theorem 13, corrected: with respect to W_i the constant at x is ∏_{j>i} a_j · ‖h_{i−1}(x)‖.

    The paper truncates h_{i−1} to the coordinates that the later layers keep; the truncation belongs to the rows of W_i.
    model: an `extremal_chain`; layer: i, counted from 0.
    """
    with torch.no_grad():
        before = model[: 2 * layer](x) if layer else x
    return extremal_constant(constants[layer + 1 :]) * float(torch.linalg.vector_norm(before.to(torch.float64)))
