"""The constants L_i of a loss on cells, proved on all inputs or on each ball; as logarithms, for they may exceed any float."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normscope.bounds.cellwise import Cellwise
from normscope.bounds.table import NotApplicable
from normscope.core.progress import shown
from normscope.core.region import Ball

if TYPE_CHECKING:
    from normscope.bounds.setting import Setting

TRIES = 16  # cells in a row for which proving a constant gains nothing, after which the others are left as they are


def global_constants(setting: Setting, rows: Cellwise) -> torch.Tensor:
    """ln L_i with L_i = L_f · L_h on all inputs, the same for every row."""
    if setting.loss.slope is None:
        raise NotApplicable("it needs the loss's Lipschitz constant in the outputs: pass a losses.Loss with slope=")
    return torch.full_like(rows.counts, (setting.constant * setting.loss.slope).log)  # a constant model: 0 · ∞ = 0


def local_constants(setting: Setting, rows: Cellwise) -> torch.Tensor:
    """ln L_i proved on each cell's ball B(c, r): the model's constant L_h there times the loss's near h(c), within L_h r of it.

    Where proving gains nothing over the most that the loss can rise, cell after cell, the others keep the global constant.
    """
    found = global_constants(setting, rows)
    caps, without_gain = setting.loss.bound - rows.losses, 0
    cells = list(rows.by_cell())
    with shown("local constants", setting.progress, len(cells)) as progress:
        for cell, members in cells:
            found[members] = torch.minimum(found[members], _on_ball(setting, rows, cell, rows.label[members]))
            gained = bool((found[members] + rows.largest_distance[members].log() < caps[members].log()).any())
            without_gain = 0 if gained else without_gain + 1
            progress.advance()
            if without_gain >= TRIES:
                break
    return found


def _on_ball(setting: Setting, rows: Cellwise, cell: int, labels: torch.Tensor) -> torch.Tensor:
    """The constants of one cell, one a label."""
    radius = float(rows.cells.radii[cell])
    center = setting.unflattened(rows.cells.centers[cell].double())
    above = setting.above_on(Ball(center, radius))
    with torch.no_grad():
        outputs = setting.graph.run([part[None] for part in center], torch.float64)[0].reshape(1, -1)
    slopes = setting.loss.slope_near(outputs.expand(len(labels), -1), labels, float(above.bound) * radius + above.center_error)
    return (slopes.log() + above.bound.log).nan_to_num(-torch.inf, torch.inf, -torch.inf)  # a constant loss: 0 · ∞ = 0
