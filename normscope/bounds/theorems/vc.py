"""The VC dimension of ReLU networks (Bartlett, Harvey, Liaw & Mehrabian 2019, Theorem 7) and what it bounds.

    VCdim ≤ L + Σ_i W_i · log₂(4eR log₂(2eR)),   R = Σ_i i·k_i,

W_i the parameters of layers 1 … i and k_i the units of layer i, one at the output. With k classes an answer is right or wrong by
the signs of k(k−1)/2 differences of outputs, each a network of one output, so by Sauer's lemma ln Π(2m) ≤ k(k−1)/2 · d ln(2em/d),
and (Vapnik & Chervonenkis 1971) P[wrong] − P_D[wrong] ≤ √(8 (ln Π(2m) + ln(4/δ))/m).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from normscope.bounds.bound import CERTIFIED, GAP, MEASURE, Bound
from normscope.bounds.losses import zero_one
from normscope.bounds.network import Network
from normscope.bounds.table import bounds_of

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "VC dimension (Bartlett et al. 2019)"


def vc_dimension(parameters: Sequence[int], units: Sequence[int]) -> float:
    """The bound for a ReLU network with so many parameters and units per layer, the last layer of one unit.

    It solves 2^m ≤ 2^L (2eRm/ΣW_i)^{ΣW_i} for m, by a lemma that needs 2eR ≥ 16: R counts as 3 at least.
    """
    reach = max(3, sum((i + 1) * count for i, count in enumerate(units)))
    cumulative = sum(sum(parameters[: i + 1]) for i in range(len(parameters)))
    return len(parameters) + cumulative * math.log2(4 * math.e * reach * math.log2(2 * math.e * reach))


def log_growth(dimension: float, size: int, classes: int) -> float:
    """ln Π(2m) of right and wrong answers: at most 2m ln 2, and k(k−1)/2 times Sauer's lemma."""
    most = 2 * size * math.log(2)
    if dimension >= 2 * size:
        return most
    return min(most, classes * (classes - 1) / 2 * dimension * math.log(2 * math.e * size / dimension))


def vc_gap(growth: float, size: int, delta: float) -> float:
    """√(8 (ln Π(2m) + ln(4/δ))/m)."""
    return math.sqrt(8 * (growth + math.log(4 / delta)) / size)


def dimension_of(network: Network) -> float:
    """Of the difference of two outputs: a network whose last layer has one unit."""
    last = network.layers[-1]
    parameters = [layer.parameters for layer in network.layers[:-1]] + [-(-last.parameters // last.outputs)]
    return vc_dimension(parameters, [layer.outputs for layer in network.layers[:-1]] + [1])


@bounds_of(NAME)
def vc(setting: Setting) -> Iterator[Bound]:
    """For the zero-one loss; certified for chains with ReLU whose weights are not shared."""
    network, size = setting.network, setting.train.size
    dimension = dimension_of(network)
    growth = log_growth(dimension, size, setting.classes)
    curved = [f"not covered by the theorem: {label} is not piecewise linear of two pieces" for label in network.not_piecewise]
    shared = [
        f"not covered by the theorem: {layer.name} uses a parameter at several places" for layer in network.layers if layer.shared
    ]
    parts = {
        "error on D": setting.train.error, "VC dimension at most": dimension, "parameters": network.parameters,
        "layers": network.depth, "classes": setting.classes, "ln of the growth function": growth, "m": size,
    }  # fmt: skip
    covered = not (network.obstacles or curved or shared)
    assumptions = ["training samples are independent draws from P", "the architecture was fixed before the data"]
    yield setting.bound(
        NAME, vc_gap(growth, size, setting.delta), GAP, CERTIFIED if covered else MEASURE, parts,
        [*assumptions, *network.notes, *curved, *shared], zero_one(),
    )  # fmt: skip
