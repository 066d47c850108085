"""Weights behind a centered normalizer: its output lies in a hyperplane, so weights may move along the normal.

Σ_c ẑ_c = 0 for every vector that layer normalization makes, hence Σ_c n_c y_c = Σ_c n_c β_c is constant for y = γ ẑ + β and
n = 1/γ, and W → W + u nᵀ changes W y by a constant that the next bias takes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from normscope.rules.algebra import Contraction, Form, Homogeneous, Moved, Normalized, Parameter, Product, Sum
from normscope.symmetry.absorbed import Absorbers, Compensation
from normscope.symmetry.groups import Action, Parameters, ShiftGroup, shift_kind
from normscope.symmetry.indices import compressed, padded, reshaped
from normscope.symmetry.shifts import broadcast_pull, seen


@dataclass(frozen=True)
class Hyperplane:
    """Σ n_c y_c is the same for all vectors y of a tensor: n = 1/∏ gains. places: which c an entry has."""

    places: np.ndarray
    gains: tuple[str, ...] = ()
    shifted: bool = False  # the constant need not be zero


def hyperplane_groups(forms: Sequence[Form], absorbers: Absorbers) -> Iterator[ShiftGroup]:
    """A group for every weight that is contracted with such a tensor, and with nothing else."""
    planes: dict[Form, Hyperplane] = {}
    for form in forms:
        plane = _plane(form, planes)
        if plane is not None:
            planes[form] = plane
        if isinstance(form, Contraction):
            for operand in range(2):
                if form.operands[operand] in planes:
                    yield from _group(form, operand, planes[form.operands[operand]], absorbers)


def _plane(form: Form, planes: dict[Form, Hyperplane]) -> Hyperplane | None:
    if isinstance(form, Normalized) and form.centered:
        return Hyperplane(_along(form.shape, form.axes[0])) if len(form.axes) == 1 else None
    known = planes.get(form.operands[0]) if form.operands else None
    if known is None:
        return None
    if isinstance(form, Normalized):  # one scale for every vector
        return known if not known.shifted and all(known.places.shape[axis] > 1 for axis in form.axes) else None
    if isinstance(form, Homogeneous) and form.odd_linear:
        return known
    if isinstance(form, Moved) and len(form.operands) == 1 and (form.source >= 0).all():
        places = np.broadcast_to(known.places, form.operands[0].shape).ravel()[form.source]
        return _if_whole(replace(known, places=compressed(places)))
    if isinstance(form, (Product, Sum)) and form.shape == form.operands[0].shape and len(form.operands) == 2:
        other = form.operands[1]
        along = np.broadcast_shapes(known.places.shape, padded(np.empty(other.shape), len(form.shape)).shape) == known.places.shape
        if not along or not isinstance(other, Parameter):
            return None
        if isinstance(form, Sum):
            return replace(known, shifted=True)
        return replace(known, gains=(*known.gains, other.name)) if form.powers == (1.0, 1.0) else None
    return None


def _along(shape: tuple[int, ...], axis: int) -> np.ndarray:
    return np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _if_whole(plane: Hyperplane) -> Hyperplane | None:
    """The plane, if its vectors still lie along one axis, in order."""
    line = plane.places.ravel()
    return plane if (line == np.arange(len(line))).all() else None


def _group(form: Contraction, operand: int, plane: Hyperplane, absorbers: Absorbers) -> Iterator[ShiftGroup]:
    weight = form.operands[1 - operand]
    view = reshaped(plane.places, form.operands[operand].shape, form.views[operand])
    names = {name for axis, name in enumerate(form.names[operand]) if view.shape[axis] > 1}
    simple = not form.mixed(0) and not form.mixed(1) and not form.batched() and names == form.contracted()
    if (
        not isinstance(weight, Parameter)
        or not simple
        or form.views[1 - operand] != weight.shape
        or len(absorbers.users[weight]) > 1
    ):
        return
    taken = absorbers.reached(form) if plane.shifted else ()
    if plane.shifted and not _takes_back(form, absorbers):
        return
    axis = form.names[1 - operand].index(next(iter(names)))
    kept = [1 if i == axis else size for i, size in enumerate(weight.shape)]
    members = np.arange(weight.entries // weight.shape[axis]).reshape(kept)
    actions = (Action(weight.name, weight.shape, members), *(absorber.action for absorber in taken))
    yield ShiftGroup(
        shift_kind(weight.shape), actions, members.size,
        compensation=Compensation(taken, absorbers.numerics) if taken else None,
        normal=Normal(plane.gains, axis, len(weight.shape)) if plane.gains else None,
    )  # fmt: skip


def _takes_back(form: Contraction, absorbers: Absorbers) -> bool:
    """Whether any constant vector may be added to a form, perhaps thanks to a bias."""
    channels = form.shape[-1:]
    return not seen(broadcast_pull(absorbers.shifts.labels[form], channels), channels).any()


@dataclass(frozen=True)
class Normal:
    """n = 1/∏ γ along an axis; where some γ are 0, the directions of those alone."""

    gains: tuple[str, ...]
    axis: int
    rank: int

    def __call__(self, parameters: Parameters) -> torch.Tensor:
        gain = torch.stack([parameters[name].detach().reshape(-1) for name in self.gains]).prod(0)
        zero = gain == 0
        normal = zero.to(gain) if bool(zero.any()) else gain.abs().min() / gain
        return normal.reshape([-1 if i == self.axis else 1 for i in range(self.rank)])
