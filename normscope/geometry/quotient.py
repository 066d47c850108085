"""Parameters up to symmetry: the directions that change the function, and one representative of each orbit.

A group of `ns.symmetries` moves the parameters along orbits of the same function. A vector is *horizontal* when it is orthogonal to
all orbits. The *canonical representative* has shifts at zero, scale-free vectors at unit norm and rescaled layers in balance.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr

from normscope.core.deprecation import earlier
from normscope.core.errors import InputError
from normscope.core.vector_layout import VectorLayout
from normscope.geometry.balance import preferred_scales
from normscope.geometry.groups import (
    SCALES,
    SHIFTS,
    Symmetries,
    SymmetryGroup,
    Tensors,
    by_member,
    members,
    norm_by_member,
    self_contained,
    shift_speeds,
    spread,
)
from normscope.geometry.sphere import norm

TOLERANCE = 1e-13  # of a factor of scale, at which the representative is found
SETTLED = 1e-10  # of the factors of scale in one round, where biases follow
MOST_ROUNDS = 100
LARGEST_STEP = 100.0  # of a logarithm at a time, so that nothing between overflows


def horizontal(symmetries: Symmetries, parameters: Tensors, vector: Tensors) -> dict[str, torch.Tensor]:
    """The part of a vector that is orthogonal to every orbit: v − Dᵀ(DDᵀ)⁺Dv, D the tangents of the orbits, in float64.

    symmetries: what `ns.symmetries` returned for the model.
    parameters: tensors by name, as of `model.named_parameters()`.
    vector: such as a gradient, by name; names that it lacks count as zero and are not returned.
    """
    orbits = [_Orbit.of(group, parameters) for group in symmetries.groups]
    names = sorted({name for orbit in orbits for name in orbit.names} | set(vector))
    layout = VectorLayout({name: parameters[name] for name in names})
    flat = layout.flatten({name: vector.get(name, torch.zeros_like(parameters[name])).double().cpu() for name in names}).numpy()
    counts = [orbit.count for orbit in orbits]
    largest = np.abs(flat).max(initial=0.0) or 1.0
    flat = flat / largest

    def along(amounts: np.ndarray) -> np.ndarray:
        total = {name: torch.zeros_like(parameters[name], dtype=torch.float64) for name in names}
        for orbit, own in zip(orbits, torch.from_numpy(amounts.copy()).split(counts), strict=True):
            for name, moved in orbit.move(own).items():
                total[name] += moved
        return layout.flatten(total).cpu().numpy()

    def components(entries: np.ndarray) -> np.ndarray:
        tensors = layout.unflatten(torch.from_numpy(entries))
        return torch.cat([orbit.components(tensors) for orbit in orbits]).numpy()

    if orbits:
        operator = LinearOperator((len(flat), sum(counts)), matvec=along, rmatvec=components, dtype=np.float64)
        for _ in range(2):  # the second solve removes what rounding left of the first
            flat = flat - along(lsmr(operator, flat, atol=1e-15, btol=1e-15, conlim=0, maxiter=10 * sum(counts))[0])
    return {
        name: tensor.to(vector[name])
        for name, tensor in layout.unflatten(torch.from_numpy(flat * largest)).items()
        if name in vector
    }


@earlier(positional=1)
def canonical(symmetries: Symmetries, parameters: Tensors, *, tolerance: float = TOLERANCE) -> dict[str, torch.Tensor]:
    """The representative of the orbit of `parameters`, in their dtype; parameters that no group moves are returned as they are.

    Shifts have mean zero (in units of the speeds of their entries, where these differ), scale-free vectors unit norm, and rescaled
    layers the least sum of squares, which is equal norms on both sides (of what is scaled; a bias that follows does not count).
    `linear` groups have no preferred element here and stay as they are; so do zero vectors.

    symmetries: what `ns.symmetries` returned for the model.
    parameters: tensors by name, as of `model.named_parameters()`.
    tolerance: of the factors of scale.
    """
    values = {name: tensor.detach().double() for name, tensor in parameters.items()}
    moving = (name for group in symmetries.groups for name in group.parameters)
    if broken := next((name for name in moving if not bool(values[name].isfinite().all())), None):
        raise InputError(f"{broken} has entries that are NaN or infinite, so its orbit has no representative")
    shifts = [group for group in symmetries.groups if group.kind in SHIFTS]
    for _ in shifts:  # biases that take back are shifted later in turn, and what is zero stays zero
        moved = [_center(group, values) for group in shifts]
        if not any(moved):
            break
    scales = [group for group in symmetries.groups if group.kind in SCALES and group.count]
    alone = all(self_contained(group, values) for group in scales)
    for _ in range(MOST_ROUNDS):
        logs = preferred_scales(scales, values, tolerance)
        steps = 1 + int(max((float(own.abs().max()) for own in logs), default=0.0) / LARGEST_STEP)
        for _ in range(steps):
            for group, own in zip(scales, logs, strict=True):
                values.update(group.scaled(values, own / steps))
        if alone or max(float(own.abs().max()) for own in logs) <= max(tolerance, SETTLED):
            return {name: tensor.to(parameters[name]) for name, tensor in values.items()}
    raise InputError(f"no representative after {MOST_ROUNDS} rounds: biases that follow scales and are scaled do not settle")


class _Orbit:
    """Tangents of one group's orbits: amounts of its one-parameter groups ↔ entries of the parameters.

    Tangents have unit length, so that orthogonal orbits take one iteration; where nothing moves they are zero.
    """

    def __init__(self, names: Iterable[str], count: int) -> None:
        self.names, self.count = tuple(dict.fromkeys(names)), count

    @staticmethod
    def of(group: SymmetryGroup, parameters: Tensors) -> _Orbit:
        missing = [name for name in group.parameters if name not in parameters]
        if missing:
            raise InputError(f"the parameters lack {missing[0]!r}, which the report names")
        if group.kind in (*SCALES, *SHIFTS) and self_contained(group, parameters):
            return _MemberOrbit(group, parameters)
        return _DenseOrbit(group, parameters)

    def move(self, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Dᵀ a."""
        raise NotImplementedError

    def components(self, vector: Tensors) -> torch.Tensor:
        """D v."""
        raise NotImplementedError


class _MemberOrbit(_Orbit):
    """Every entry moves with one member: by its degree times itself where the group scales, by a speed where it shifts."""

    def __init__(self, group: SymmetryGroup, parameters: Tensors) -> None:
        super().__init__(group.parameters, group.count)
        self.parts = []  # (name, members, speed of each entry)
        for name, numbers, degree in zip(group.parameters, members(group, parameters), group.degrees, strict=True):
            value = parameters[name].detach().double()
            self.parts.append((name, numbers, degree * value if group.kind in SCALES else shift_speeds(group, parameters)))
        lengths = [norm_by_member(numbers, speed, self.count) for _, numbers, speed in self.parts]
        length = _nonzero(norm(torch.stack(lengths, -1)).squeeze(-1))
        self.parts = [(name, numbers, speed / spread(numbers, length, elsewhere=1.0)) for name, numbers, speed in self.parts]

    def move(self, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        total: dict[str, torch.Tensor] = {}
        for name, numbers, speed in self.parts:
            total[name] = total.get(name, 0) + spread(numbers, amounts) * speed
        return total

    def components(self, vector: Tensors) -> torch.Tensor:
        return torch.stack([by_member(numbers, speed * vector[name], self.count) for name, numbers, speed in self.parts]).sum(0)


class _DenseOrbit(_Orbit):
    """The tangents as the rows of a matrix."""

    def __init__(self, group: SymmetryGroup, parameters: Tensors) -> None:
        super().__init__(group.parameters, group.count)
        double = {name: tensor.detach().double() for name, tensor in parameters.items()}
        self.layout = VectorLayout({name: double[name] for name in self.names})
        rows = group.directions(double).double()
        self.rows = rows / _nonzero(norm(rows))

    def move(self, amounts: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.layout.unflatten(amounts @ self.rows)

    def components(self, vector: Tensors) -> torch.Tensor:
        return self.rows @ self.layout.flatten({name: vector[name].double().cpu() for name in self.names})


def _nonzero(lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(lengths > 0, lengths, 1.0)


def _center(group: SymmetryGroup, values: dict[str, torch.Tensor]) -> bool:
    """Shift the first parameter's members to offsets of zero, and what takes that back with them; whether that was to be done.

    The offset of a member is the mean of entry/speed. A rescaling changes an entry and its speed alike and leaves offsets alone.
    """
    first, numbers, speeds = values[group.parameters[0]], members(group, values)[0], shift_speeds(group, values)
    moving = speeds != 0
    amounts = torch.where(moving, first / speeds, 0.0)
    counts = by_member(numbers, moving.expand(first.shape).double(), group.count)
    offsets = by_member(numbers, amounts, group.count) / counts.clamp(min=1)
    size = norm_by_member(numbers, amounts, group.count)
    if not bool((offsets.abs() > TOLERANCE * size).any()):
        return False
    for name, moved in group.tangent(values, -offsets).items():
        values[name] = values[name] + moved
    return True
