"""Networks whose constant is known exactly, and a check for rules of one's own.

import normscope as ns
from normscope.testing import check_rule
ns.rules.register(torch.ops.mylib.op, 2.0)
check_rule(module_that_uses_it, example)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from scipy.optimize import linprog

from normscope.certify.lipschitz import lipschitz
from normscope.core.bracket import Bracket
from normscope.core.data import Example
from normscope.core.errors import InputError
from normscope.core.magnitude import Magnitude
from normscope.core.region import Box


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
    if tight is not None and not found.proved <= found.lower * tight:
        raise AssertionError(f"not tight: {found}, more than a factor {tight} apart")
    return found


def extremal_chain(
    constants: Sequence[float], widths: Sequence[int], activation: type[torch.nn.Module] = torch.nn.ReLU
) -> torch.nn.Sequential:
    """Than 2025, Theorem 6: weights a_k·[I 0] make a ReLU chain with constant exactly ∏ a_k.

    constants: a_k ≥ 0, one per layer. widths: input, hidden and output widths, one more than constants.
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


def exact_relu_constant(model: torch.nn.Sequential, box: Box) -> float:
    """The Lipschitz constant of a chain of Linear and ReLU on a box, exactly: max ‖J‖ over the activation patterns there.

    One sign after another is tried by a linear program, so this is for a few inputs and some dozen neurons.
    """
    if not all(isinstance(part, (torch.nn.Linear, torch.nn.ReLU)) for part in model):
        raise InputError("the exact constant is for chains of Linear and ReLU")
    layers = []
    for part in model:
        if isinstance(part, torch.nn.Linear):
            bias = torch.zeros(part.out_features) if part.bias is None else part.bias.detach()
            layers.append((part.weight.detach().double().numpy(), bias.double().numpy()))
    (bounds,) = box.intervals()
    low, high = bounds.low.reshape(-1).numpy(), bounds.high.reshape(-1).numpy()
    limits = [*zip(low, high, strict=True), (None, 1.0)]

    def reachable(rows: list[numpy.ndarray], offsets: list[float]) -> bool:
        """Whether rows · x + offsets ≥ t for some x of the box and t > 0."""
        system = numpy.array([[*(-row), 1.0] for row in rows])
        found = linprog([*numpy.zeros(len(low)), -1.0], system, offsets, bounds=limits)
        return found.status == 0 and -found.fun > 1e-9

    def largest(layer: int, matrix: numpy.ndarray, shift: numpy.ndarray, rows: list[numpy.ndarray], offsets: list[float]) -> float:
        weight, bias = layers[layer]
        matrix, shift = weight @ matrix, weight @ shift + bias
        if layer == len(layers) - 1:
            return float(numpy.linalg.norm(matrix, 2))
        cells: list[tuple[list[int], list[numpy.ndarray], list[float]]] = [([], rows, offsets)]
        for row, offset in zip(matrix, shift, strict=True):
            cells = [
                ([*signs, max(sign, 0)], [*known, sign * row], [*levels, sign * offset])
                for signs, known, levels in cells
                for sign in (1, -1)
                if reachable([*known, sign * row], [*levels, sign * offset])
            ]
        return max(
            largest(layer + 1, numpy.array(signs)[:, None] * matrix, numpy.array(signs) * shift, known, levels)
            for signs, known, levels in cells
        )

    return largest(0, numpy.eye(len(low)), numpy.zeros(len(low)), [], [])
