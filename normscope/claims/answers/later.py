"""Contrary voices: networks whose constants normalization makes larger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from normscope.claims.calculus import Map, normal, scalar, spectral_norm, steepness
from normscope.claims.claim import claim
from normscope.claims.verdicts import Case, Ruling, lower_bound


@claim("L-explosion")
def constants_that_explode(generator: torch.Generator, stated: Callable[[int], float] = lambda depth: 2.0 ** (depth - 1)) -> Ruling:
    """Two units (z, −z) per layer and W_k = ½[1 1; −1 −1], of norm 1, so that behind the ReLU each layer folds: z ↦ ±|z|.

    Of data that are uniform on an interval |z| is uniform on half of it, and BN stretches it to unit variance again: the slope
    doubles in every layer, and with it the constant in W_1, of a network whose BN keeps these statistics. Without BN the same
    network has ∏‖W_k‖ = 1. stated: of the depth, against the constants of the first layer's units.
    """
    fold = 0.5 * torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    data = torch.linspace(-1, 1, 2**14 + 1, dtype=torch.float64)[:-1] + 2.0**-14
    weights = [torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * 0.5**0.5, *[fold] * 9]
    values, norms, first, cases = data[:, None], list[Map](), list[float](), []
    for depth, weight in enumerate(weights, 1):
        values = (values.relu() if depth > 1 else values) @ weight.T
        norms.append(partial(_fixed_norm, values.mean(0), values.std(0, correction=0)))
        values = norms[-1](values)
        of_input = float((values.diff(dim=0).norm(dim=1) / data.diff()).max())
        of_weight = float(steepness(partial(_from_first, weights[1:depth], norms, data[-1:]), weights[0]))
        first = first or [of_input, of_weight]
        for what, size, start in zip(("the input", "W_1"), (of_input, of_weight), first, strict=True):
            cases.append(Case(f"depth {depth}, in {what} (over depth 1)", scalar(stated(depth)), scalar(size / start)))
    return lower_bound(cases, **{"slope at depth 10": of_input})


def _fixed_norm(mean: Tensor, deviation: Tensor, values: Tensor) -> Tensor:
    return (values - mean) / deviation


def _from_first(later: Sequence[Tensor], norms: Sequence[Map], x: Tensor, weight: Tensor) -> Tensor:
    """z_K at x as a function of W_1, the statistics being fixed."""
    z = norms[0](weight @ x)
    for following, norm in zip(later, norms[1:], strict=True):
        z = norm(following @ z.relu())
    return z


@claim("L-rank")
def rank_is_created(generator: torch.Generator, stated: Callable[[Tensor], Tensor] = lambda thickness: 1 / thickness) -> Ruling:
    """Data x = (t + s·u, t − s·u)/√2 with t, u of unit variance: W turns by 45°, and BN divides the second unit by s."""
    cases, turn = [], torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5
    along, across = normal(generator, 2, 200)
    across = across / across.std(correction=0)
    for thickness in (1.0, 1e-2, 1e-4):
        data = torch.stack([along + thickness * across, along - thickness * across], 1) * 0.5**0.5
        deviation = (data @ turn.T).std(0, correction=0)
        gain = spectral_norm(turn / deviation[:, None])
        cases.append(Case(f"thickness {thickness:g}", stated(scalar(thickness)), gain))
    return lower_bound(cases)
