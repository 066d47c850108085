"""Whether the groups found are all there are: their rank against the null space of the outputs' Jacobians."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from normscope.core.errors import InputError
from normscope.core.rounding import euclidean_norm
from normscope.graph.graph import Node
from normscope.symmetry.groups import Group
from normscope.symmetry.numerics import Numerics, Parameters

LARGEST = 3000  # parameters: beyond it the dense null space takes minutes
SMALL = 1e-7  # share of the largest below which a singular value may be zero; where the largest gap is, they are
ZERO = 1e-11  # share below which rounding is all that is left
ROUNDOFF = 2.0**-30  # of an output, for a step as long as all parameters together: a change below it is float64 rounding
IDLE = 8  # batches in a row that add no rank: then no input will
STREAMS = 2  # of random inputs: a rank that one input in thousands shows, where it is ill-conditioned, is rounding
SPREAD = 2.0  # of random inputs: wide enough to reach both sides of every kink
DISTANCES = (0.2, 0.4, 0.6, 0.8, 1.5, 2.0, 3.0, 4.0, 1.5, 2.0)  # of the points from the model's parameters, as far as needed
SIZES = (1e-3, 4.0)  # of a parameter's entries (root mean square): others are scaled to 1, or rounding and saturation hide ranks
SEED = 0


@dataclass(frozen=True)
class Completeness:
    """named: independent directions of the groups. null: directions that no output sees, found numerically."""

    named: int
    null: int
    seen: float  # the largest relative change of the outputs along a named direction: rounding

    @property
    def unnamed(self) -> int:
        return max(self.null - self.named, 0)

    @property
    def complete(self) -> bool:
        return self.null == self.named

    def __str__(self) -> str:
        if self.named > self.null:
            return f"{self.null} directions change no output, {self.named} are named: some change outputs, by up to {self.seen:.1e}"
        rest = "all of them named" if self.complete else f"{self.unnamed} of them in no group"
        return f"{self.null} directions change no output, {rest}"


def completeness(groups: Sequence[Group], numerics: Numerics, unused: Iterable[str]) -> Completeness:
    """Compare, without ε, over as many random inputs as rank needs, at generic points around the model's parameters.

    At a single point a unit may be dead or never bend, which looks like a symmetry; what holds for all parameters is seen
    at the point with the smallest null space.
    """
    absent = set(unused)
    parameters = {name: value for name, value in numerics.parameters.items() if name not in absent}
    size = sum(value.numel() for value in parameters.values())
    if size > LARGEST:
        raise InputError(f"completeness needs at most {LARGEST} parameters, this model has {size}: try a smaller model of its kind")
    generator = torch.Generator().manual_seed(SEED)
    found: list[Completeness] = []
    for distance in DISTANCES:
        found.append(
            _at({name: _near(value, distance, generator) for name, value in parameters.items()}, groups, numerics, generator)
        )
        if found[-1].complete:
            break
    return min(found, key=lambda result: (abs(result.null - result.named), result.unnamed))


def _at(point: dict[str, torch.Tensor], groups: Sequence[Group], numerics: Numerics, generator: torch.Generator) -> Completeness:
    size = sum(value.numel() for value in point.values())
    triangle, rank = min((_jacobians(point, numerics, generator) for _ in range(STREAMS)), key=lambda found: found[1])
    everything = {**numerics.parameters, **point}  # what follows a group may be computed from more than the group moves
    rows = (_rows(group, everything, point) for group in groups)
    named = _orthonormal(torch.cat([torch.zeros(0, size, dtype=torch.float64), *rows]))
    seen = float(euclidean_norm(triangle @ named.T, 0).max() / euclidean_norm(triangle)) if len(named) and rank else 0.0
    return Completeness(len(named), size - rank, seen)


def _near(value: torch.Tensor, distance: float, generator: torch.Generator) -> torch.Tensor:
    """A point near by at which no entry is special, such as the zeros and ones of initial biases and gains."""
    size = float(euclidean_norm(value)) / math.sqrt(max(value.numel(), 1))
    if size > 0 and not SIZES[0] <= size <= SIZES[1]:
        value = value / size
    noise = torch.randn(2, *value.shape, generator=generator, dtype=torch.float64)
    if distance > 1 and value.dim() <= 1:  # with biases and gains near 1, few units are dead, and few never bend
        return 1 + 0.3 * noise[0]
    return value * (1 + distance * noise[0]) + distance * noise[1]


def _jacobians(point: dict[str, torch.Tensor], numerics: Numerics, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """The Jacobians at random inputs, stacked, as the triangle of their QR decomposition; and their common rank."""
    size = sum(value.numel() for value in point.values())
    triangle = torch.zeros(0, size, dtype=torch.float64)
    length = math.hypot(*(float(euclidean_norm(value)) for value in point.values()))
    rank, idle = -1, 0
    for _ in range(IDLE * (size + 2)):  # a rank that only grows ends sooner
        if idle == IDLE:
            break
        inputs = {
            node: SPREAD * torch.randn(value.shape, generator=generator, dtype=torch.float64)
            if value.is_floating_point()
            else value
            for node, value in numerics.inputs.items()
        }

        def outputs(moved: Parameters, inputs: dict[Node, torch.Tensor] = inputs) -> tuple[torch.Tensor, torch.Tensor]:
            value = numerics.without_epsilon({**numerics.parameters, **moved}, inputs)
            return value, value

        jacobian, value = torch.func.jacrev(outputs, has_aux=True, chunk_size=64)(point)
        rows = torch.cat([part.reshape(len(part), -1) for part in jacobian.values()], 1)
        said = rows.isfinite().all(1)  # where a whole set is zero, nothing is normalized without ε
        said &= euclidean_norm(rows, 1) * length > ROUNDOFF * value.abs()
        triangle = torch.linalg.qr(torch.cat([triangle, rows[said]]), mode="r").R
        found = _rank(torch.linalg.svdvals(triangle))
        idle = idle + 1 if found == rank else 0
        rank = found
    return triangle, rank


def _rows(group: Group, parameters: dict[str, torch.Tensor], point: dict[str, torch.Tensor]) -> torch.Tensor:
    """The directions of a group at these parameters, among those of the point."""
    directions = group.directions(parameters)
    parts = dict(
        zip(
            dict.fromkeys(group.parameters),
            directions.split([point[name].numel() for name in dict.fromkeys(group.parameters)], 1),
            strict=True,
        )
    )
    return torch.cat(
        [parts[name] if name in parts else directions.new_zeros(len(directions), value.numel()) for name, value in point.items()], 1
    )


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the rows' span, whose rank `_rank` tells."""
    if not len(rows):
        return rows
    lengths = euclidean_norm(rows, 1)[:, None]
    _, values, right = torch.linalg.svd(rows / lengths.clamp(min=1e-300), full_matrices=False)
    return right[: _rank(values)]


def _rank(values: torch.Tensor) -> int:
    """How many singular values (in falling order) are not zero: those above the widest gap among the small ones."""
    shares = (values / values.max().clamp(min=1e-300)).clamp(min=ZERO) if values.numel() else values
    large = int((shares > SMALL).sum())
    if large == len(shares):
        return large
    edges = torch.cat([shares[max(large - 1, 0) :], torch.full((1,), ZERO, dtype=shares.dtype)]).log()
    return max(large - 1, 0) + int((edges[:-1] - edges[1:]).argmax()) + 1
