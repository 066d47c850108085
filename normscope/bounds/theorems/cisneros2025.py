"""Cisneros-Velarde, Chen, Koyejo & Banerjee 2025: O(ρ²/√m) for weight-normalized networks, as Than 2025 quotes it.

ρ is the radius of the last layer's weights; all other layers have weights of Frobenius norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.bounds.bound import GAP, MEASURE, Bound
from normscope.bounds.losses import zero_one
from normscope.bounds.network import Network
from normscope.bounds.table import bounds_of
from normscope.core.magnitude import Magnitude

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

NAME = "Cisneros-Velarde et al. 2025"


def cisneros(network: Network, size: int) -> Magnitude:
    """ρ²/√m with ρ = ∏‖A_k‖_F: the radius of the last layer once every other layer of a ReLU chain is rescaled to norm 1."""
    return network.product("frobenius") ** 2 / math.sqrt(size)


@bounds_of(NAME)
def cisneros2025(setting: Setting) -> Iterator[Bound]:
    """A measure: the constant is hidden, and the theorem is for weight normalization alone."""
    network = setting.network
    value = cisneros(network, setting.train.size)
    parts = {"error on D": setting.train.error, "ρ": network.product("frobenius"), "m": setting.train.size}
    assumptions = [
        "1 stands for the constant that the paper hides in O(·)",
        "layers but the last are rescaled to Frobenius norm 1, as weight normalization would have them; biases are left out",
        *network.notes,
    ]
    yield setting.bound(NAME, value, GAP, MEASURE, parts, assumptions, zero_one())
