"""Where the gap of a bracket by affine forms comes from: what the symbols of each place add to the norm of the linear part.

The bound is at most ‖J‖ + Σ_k b_k + κ, b_k = sup ‖G_k η_k‖ over the symbols of place k alone (`certify/symbols.py`). Where symbols
are bounded together it is less, and each place has its share of that in proportion to b_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from normscope.certify.forms import AffineForms
from normscope.core.bracket import GapShare
from normscope.core.magnitude import Magnitude

LEFT_OVER = "rounding and what is beyond the budget of symbols"


class Place(NamedTuple):
    """Where symbols come from, as it is shown."""

    path: str
    operation: str


@dataclass(frozen=True)
class Excess:
    """The norm of J, and what each place adds to it: (units, b_k)."""

    straight: float
    added: dict[Place, tuple[int, float]]

    def shares(self, lower: Magnitude, upper: Magnitude) -> tuple[GapShare, ...]:
        """Of upper − lower, the largest first; what is missing to 1 lies between the witness and ‖J‖."""
        low, high = float(lower), float(upper)
        total = sum(amount for _, amount in self.added.values())
        if not (math.isfinite(high) and math.isfinite(total) and high > low and total > 0):
            return ()
        part = min(max(high - self.straight, 0.0) / (high - low), 1.0)
        made = [GapShare(*place, units, part * amount / total) for place, (units, amount) in self.added.items() if amount > 0]
        return tuple(sorted(made, key=lambda share: -share.share))


def excess(forms: AffineForms) -> Excess | None:
    """What forms that were made add to the norm of J; None where there are none, or where their parts are not known one by one."""
    if not forms.bound.finite or any(not math.isfinite(part.bound) for part in forms.parts):
        return None
    added = {Place("", LEFT_OVER): (0, forms.left)}
    for part in forms.parts:
        place = Place(part.node.path or part.node.name, part.node.op)
        units, amount = added.get(place, (0, 0.0))
        added[place] = (units + len(part.symbols.places), amount + part.bound)
    return Excess(forms.straight, added)
