"""The lower bound: two points and their difference quotient, found by power iteration and ascent, replayed in float64.

An autograd Jacobian is not a lower bound (at a kink it may belong to no nearby point), so it only guides the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from normscope.core.bracket import Witness
from normscope.core.errors import InputError
from normscope.core.magnitude import ZERO, Magnitude
from normscope.core.randomness import generator_of
from normscope.core.region import Region
from normscope.graph.graph import Graph, Node
from normscope.graph.perturbing import perturbed
from normscope.operators.dense import frobenius_norm
from normscope.rules.readings import Activation
from normscope.rules.registry import registry

Function = Callable[[torch.Tensor], torch.Tensor]  # (points, d) → (points, outputs)

SEARCH_ENTRIES = 1_000_000  # activations that one evaluation of the pool may hold
MOST_POINTS = 2048
FEW_POINTS = 16
MANY_POINTS = 512  # from here on a model is cheap enough for many rounds
SAFETY = 8.0  # roundoff is taken as this many times the spread that random roundings produce
ROUNDINGS, MANY_ROUNDINGS = 3, 12  # of few entries, three random roundings may cancel by chance
MOST_NOISE = 100_000  # entries of a weight that are perturbed; larger ones are averaged over enough terms
SMALLEST_CHANGE = 1e-290  # below it float64 loses digits, which random roundings do not show
VERIFIED_PAIRS = 2


@dataclass(frozen=True)
class Space:
    """The inputs of a graph as one vector per sample, and back."""

    graph: Graph

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [node.shape if self.graph.whole_batch else node.shape[1:] for node in self.graph.inputs]

    @property
    def dimension(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def flat(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """(points, entries) from one tensor for each input, or for other nodes, each (points, …)."""
        return torch.cat([value.reshape(len(value), -1) for value in inputs], 1)

    def unflat(self, points: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = points.split([math.prod(shape) for shape in self.shapes], 1)
        return tuple(part.reshape(len(points), *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def function(self, dtype: torch.dtype) -> Function:
        batched = self.graph.batched(dtype)
        return lambda points: self.flat([batched(*self.unflat(points))])

    def unflat_one(self, point: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One point as one tensor per input, as a region holds it."""
        return tuple(part[0] for part in self.unflat(point[None]))

    def single(self, point: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The graph's own inputs for one point."""
        parts = self.unflat(point[None])
        return tuple(part[0] if self.graph.whole_batch else part for part in parts)


def check_effort(effort: float) -> None:
    if not isinstance(effort, (int, float)) or not 0 <= effort < math.inf:
        raise InputError(f"effort must be a finite number ≥ 0, got {effort!r}")


def lower(
    graph: Graph,
    points: torch.Tensor,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    region: Region | None = None,
) -> tuple[Magnitude, Witness | None]:
    """A lower bound on the Lipschitz constant with its witness, from a search that starts at `points` (count, d).

    effort multiplies the number of points and rounds. Both points of the witness lie in the region, if there is one.
    """
    generator = generator_of(generator)
    check_effort(effort)
    space = Space(graph)
    if space.dimension == 0:
        return ZERO, None
    search = _Search(space, generator, effort, region)
    starts, directions, ends = search.run(points.to(graph.compute_dtype))
    candidates = _candidate_pairs(starts, directions, ends, search.small, None if region is None else region.reach)
    if region is not None:
        candidates = [(region.project(a[None])[0], region.project(b[None])[0]) for a, b in candidates]
        candidates = [pair for pair in candidates if all(region.contains(space.unflat_one(point)) for point in pair)]
    best, witness = ZERO, None
    for first, second in _best_pairs(space, candidates)[: VERIFIED_PAIRS if search.small else 1]:
        value = quotient(graph, space, first, second)
        if value > best:
            best, witness = value, (first, second)
    if witness is None:
        return ZERO, None
    ends = tuple(space.single(point) for point in witness)
    return best, Witness(ends[0], ends[1], lambda: quotient(graph, space, *witness))


def quotient(graph: Graph, space: Space, first: torch.Tensor, second: torch.Tensor) -> Magnitude:
    """‖f(x) − f(y)‖/‖x − y‖ in float64, less the roundoff that randomly perturbed evaluations show.

    Each of a few more evaluations multiplies every value that is read or computed by 1 ± 4u at random, as rounding might
    have (discrete stochastic arithmetic); `SAFETY` times the largest change is subtracted.
    """
    distance = frobenius_norm(first - second)
    if not distance or not distance.finite:
        return ZERO
    factors, generator = _factors(), torch.Generator().manual_seed(2)

    def rounding(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(rounding, value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() > MOST_NOISE:
            return value
        start = int(torch.randint(MOST_NOISE, (1,), generator=generator))
        return value * factors[start : start + value.numel()].reshape(value.shape)

    roundings = ROUNDINGS if sum(math.prod(node.shape) for node in graph) > SEARCH_ENTRIES // MANY_POINTS else MANY_ROUNDINGS
    with torch.no_grad():
        changes = [
            graph.run(space.single(first), torch.float64, evaluate=evaluate)[0]
            - graph.run(space.single(second), torch.float64, evaluate=evaluate)[0]
            for evaluate in (Node.evaluate, *[perturbed(rounding)] * roundings)
        ]
    if not changes[0].numel() or not all(bool(change.isfinite().all()) for change in changes):
        return ZERO
    scale = max(float(change.abs().max()) for change in changes)
    if scale < SMALLEST_CHANGE:
        return ZERO
    sizes = [float(torch.linalg.vector_norm(change / scale)) for change in changes]
    noise = max(float(torch.linalg.vector_norm((change - changes[0]) / scale)) for change in changes[1:])
    size = sizes[0] - SAFETY * noise
    if size <= 0:
        return ZERO
    logarithms = abs(math.log(scale)) + abs(distance.log)  # are themselves rounded
    terms = changes[0].numel() + space.dimension + logarithms + 8
    return (Magnitude(size) * scale / distance).narrowed(8 * terms * 2.0**-53)


@cache
def _factors() -> torch.Tensor:
    """1 ± 4u at random; tensors of up to `MOST_NOISE` entries take a stretch from a random place on."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (2 * MOST_NOISE,), generator=generator, dtype=torch.int8, device="cpu").double() * 2 - 1
    return 1 + 2.0**-51 * signs


def _best_pairs(space: Space, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs with the largest quotients in float64, roundoff not yet taken off."""
    pairs = [pair for pair in pairs if bool((pair[0] != pair[1]).any()) and bool((pair[0] - pair[1]).isfinite().all())]
    if not pairs or not math.prod(space.graph.output.shape):
        return []
    points = torch.stack([point for pair in pairs for point in pair])
    function = space.function(torch.float64)
    with torch.no_grad():
        values = torch.cat([function(some) for some in points.split(8)])
    largest = values.abs().nan_to_num(0, 0, 0).max().clamp(min=1e-300)
    changes = torch.linalg.vector_norm(values[0::2] / largest - values[1::2] / largest, dim=1)
    away = points[0::2] - points[1::2]
    farthest = away.abs().amax(1).clamp(min=1e-300)
    quotients = (changes / torch.linalg.vector_norm(away / farthest[:, None], dim=1) / farthest).nan_to_num(0, 0, 0)
    return [pairs[i] for i in quotients.argsort(descending=True).tolist()]


def _candidate_pairs(
    starts: torch.Tensor, directions: torch.Tensor, ends: torch.Tensor, many: bool, reach: float | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the best points, the pair that ascent found and steps of several lengths along the steepest direction."""
    pairs = []
    for start, direction, end in zip(starts.double(), directions.double(), ends.double(), strict=True):
        if float(torch.linalg.vector_norm(end - start)) > 0:
            pairs.append((start, end))
        size = reach if reach is not None else max(float(torch.linalg.vector_norm(start)), 1e-3)
        for relative in (1e-2, 1e-3, 1e-5) if many else (1e-3,):
            pairs.append((start - direction * (size * relative / 2), start + direction * (size * relative / 2)))
    return pairs


def derivatives(function: Function, points: torch.Tensor) -> tuple[Function, Function]:
    """v ↦ Jv and u ↦ Jᵀu at every point, J linearized once: the first is the transpose of the second."""
    outputs, pull = torch.func.vjp(function, points)
    push = torch.func.vjp(lambda cotangents: pull(cotangents)[0], torch.zeros_like(outputs))[1]
    return lambda v: push(v)[0], lambda u: pull(u)[0]


class _Search:
    """Evolution over input points, each with its own steepest direction, then ascent on pairs."""

    def __init__(self, space: Space, generator: torch.Generator, effort: float, region: Region | None) -> None:
        self.space, self.generator, self.effort, self.region = space, generator, effort, region
        batched = space.graph.batched(space.graph.compute_dtype)
        self.function: Function = lambda points: space.flat([batched(*space.unflat(points))])
        self.dtype = space.graph.compute_dtype
        held = sum(math.prod(node.shape) for node in space.graph)
        self.large = held > SEARCH_ENTRIES
        self.points = max(2 if self.large else 4, min(MOST_POINTS, int(effort * SEARCH_ENTRIES / max(held, 1))))
        with torch.no_grad():
            self.function(torch.zeros(1, space.dimension, dtype=self.dtype))
        if batched.one_by_one:  # every point costs a pass of its own
            self.points = min(self.points, FEW_POINTS)
        self.small = self.points >= MANY_POINTS
        read = ((node, registry.reading(node, Activation)) for node in space.graph if len(node.inputs) == 1)
        kinked = (node.input for node, activation in read if activation is not None and activation.kinked)
        bent = [node for node in kinked if node.dtype is not None and node.dtype.is_floating_point]  # not of complex ones
        capture = space.graph.batched_capture(bent, self.dtype) if bent else None
        self.pre_activations: Function | None = None
        if capture is not None:
            self.pre_activations = lambda points: space.flat(capture(*space.unflat(points)))

    def run(self, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(points, directions, partners) of the most promising points, best first."""
        pool = self._pool(seeds)
        if self.small and self.pre_activations is not None:
            half = pool[len(pool) // 2 :]
            size = torch.linalg.vector_norm(half, dim=1, keepdim=True) if self.region is None else self.region.reach
            pool = torch.cat([pool[: len(pool) // 2], self._to_kinks(half, 1e-3 * size * self._noise(half.shape))])
            pool = pool if self.region is None else self.region.project(pool)
        directions = self._noise(pool.shape)
        gains, directions = self._power(pool, directions, 6 if self.small else 2 if self.large else 3)
        for _ in range(int(12 * self.effort) if self.small else 0 if self.large else 1):
            pool, directions, gains = self._generation(pool, directions, gains)
        order = gains.argsort(descending=True)[: 8 if self.small else 1 if self.large else 2]
        pool, directions = pool[order], directions[order]
        _, directions = self._power(pool, directions, 12 if self.small else 6)
        return pool, directions, self._ascend(pool, directions)

    def _noise(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator, dtype=self.dtype)

    def _pool(self, seeds: torch.Tensor) -> torch.Tensor:
        """The seeds themselves, then random points at scales around theirs; for cheap models over many decades."""
        if self.region is not None:
            return self._inside(self.region)
        kept = seeds[: max(1, self.points // 2)].detach()
        count = self.points - len(kept)
        if count <= 0:
            return kept
        size = float(kept.std()) if kept.numel() > 1 else float(kept.abs().max())
        size = size if math.isfinite(size) and size > 0 else 1.0
        decades = 3.0 if self.small else 0.5
        scales = 10 ** (torch.rand(count, 1, generator=self.generator, dtype=self.dtype) * 2 * decades - decades)
        around = kept[torch.arange(count) % len(kept)] * (torch.arange(count) % 2)[:, None]
        return torch.cat([kept, (around + size * scales * self._noise((count, kept.shape[1]))).nan_to_num(0, 0, 0)])

    def _inside(self, region: Region) -> torch.Tensor:
        """The middle of the region and random points of it, near the middle and near the boundary."""
        middle = self.space.flat([part[None] for part in region.middle]).to(self.dtype)
        spread = torch.nn.functional.normalize(self._noise((self.points - 1, middle.shape[1])), dim=1) * region.reach
        away = torch.rand(self.points - 1, 1, generator=self.generator, dtype=self.dtype).sqrt()
        return torch.cat([middle, region.project(middle + spread * away)])

    def _power(self, pool: torch.Tensor, directions: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Power iteration on JᵀJ at every point: (‖Jv‖, v) with ‖v‖ = 1."""
        tiny = torch.finfo(self.dtype).tiny
        directions = torch.nn.functional.normalize(directions, dim=1)
        push, pull = self._linearized(pool)
        gains, best = torch.zeros(len(pool), dtype=self.dtype), directions
        for step in range(steps):
            image = push(directions)
            size = torch.linalg.vector_norm(image, dim=1)
            better = size.isfinite() & (size >= gains)
            gains, best = torch.where(better, size, gains), torch.where(better[:, None], directions, best)
            if step == steps - 1:
                break
            scaled = image / size.clamp(min=tiny)[:, None]  # so that nothing overflows on the way back
            renewed = torch.nn.functional.normalize(pull(scaled.nan_to_num()).nan_to_num(), dim=1, eps=tiny)
            directions = torch.where((renewed != 0).any(1, keepdim=True), renewed, directions)
        return gains, best

    def _linearized(self, pool: torch.Tensor) -> tuple[Function, Function]:
        """v ↦ Jv and u ↦ Jᵀu at every point; by differences, or not at all, where an operation has no derivative."""
        try:
            push, pull = derivatives(self.function, pool)
            push(torch.zeros_like(pool))
            return push, pull
        except (RuntimeError, NotImplementedError):  # functorch has no derivative of some operation
            step = 1e-3 * torch.linalg.vector_norm(pool, dim=1, keepdim=True).clamp(min=1e-3)

        def difference(v: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return (self.function(pool + step * v) - self.function(pool - step * v)) / (2 * step)

        try:  # operations of a user's own often have a derivative only here
            with torch.enable_grad():
                leaf = pool.detach().requires_grad_(True)
                outputs = self.function(leaf)
            torch.autograd.grad(outputs, leaf, torch.zeros_like(outputs), retain_graph=True)
            return difference, lambda u: torch.autograd.grad(outputs, leaf, u, retain_graph=True)[0]
        except (RuntimeError, NotImplementedError):  # nor has autograd: directions are then random
            return difference, lambda u: self._noise(pool.shape)

    def _generation(
        self, pool: torch.Tensor, directions: torch.Tensor, gains: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep the best quarter; the rest are its descendants, near and far, along their steepest direction and elsewhere."""
        order = gains.argsort(descending=True)
        parents = order[: max(1, len(order) // 4)]
        count = len(order) - len(parents)
        best = parents[torch.randint(len(parents), (count,), generator=self.generator)]
        any_point = torch.randint(len(order), (count,), generator=self.generator)
        children = torch.where(torch.rand(count, generator=self.generator) < 0.7, best, any_point)
        size: torch.Tensor | float = torch.linalg.vector_norm(pool[children], dim=1, keepdim=True).clamp(min=1e-6)
        if self.region is not None:
            size = self.region.reach
        reach = 10 ** (-4 * torch.rand(count, 1, generator=self.generator, dtype=self.dtype)) * size
        way = torch.nn.functional.normalize(self._noise(pool[children].shape), dim=1)
        along = torch.rand(count, 1, generator=self.generator) < 0.3
        young = pool[children] + reach * torch.where(along, directions[children] * torch.sign(way[:, :1]), way)
        if self.small and self.pre_activations is not None:
            at_kink = torch.rand(count, 1, generator=self.generator) < 0.5
            young = torch.where(at_kink, self._to_kinks(pool[children], reach * 1e-2 * way), young)
        if self.region is not None:
            young = self.region.project(young)
        found, turned = self._power(young, directions[children], 3 if self.small else 2)
        return torch.cat([pool[parents], young]), torch.cat([directions[parents], turned]), torch.cat([gains[parents], found])

    def _to_kinks(self, points: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Each point moved by one Newton step to where some unit changes sign, and a little beside it: small cells are there."""
        assert self.pre_activations is not None
        try:
            units, pull = torch.func.vjp(self.pre_activations, points)
            chosen = torch.randint(units.shape[1], (len(points), 1), generator=self.generator)
            (slope,) = pull(torch.zeros_like(units).scatter(1, chosen, 1.0))
        except (RuntimeError, NotImplementedError):  # without a derivative there is no Newton step
            return points + beside
        step = units.gather(1, chosen) / slope.square().sum(1, keepdim=True)
        return points - (step * slope).nan_to_num(0, 0, 0) + beside

    def _ascend(self, pool: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """Partners y of the points x that increase ‖f(x) − f(y)‖/‖x − y‖, by gradient ascent on y."""
        size = torch.linalg.vector_norm(pool, dim=1, keepdim=True).clamp(min=1e-3)
        partners = pool + 1e-2 * (size if self.region is None else self.region.reach) * directions
        with torch.no_grad():
            here = self.function(pool)
        best, best_value = partners.clone(), torch.full((len(pool),), -math.inf, dtype=self.dtype)
        step = 0.3
        for _ in range(int(8 * self.effort) if self.small else 3):
            try:
                slope, (_, value) = torch.func.grad_and_value(_log_quotient, has_aux=True)(partners, pool, here, self.function)
            except (RuntimeError, NotImplementedError):  # an operation without a derivative
                return best
            better = value > best_value
            best = torch.where(better[:, None], partners, best)
            best_value = torch.where(better, value, best_value)
            distance = torch.linalg.vector_norm(partners - pool, dim=1, keepdim=True)
            if self.region is not None:
                partners = self.region.project(partners)
            partners = partners + step * distance * torch.nn.functional.normalize(slope.nan_to_num(), dim=1)
            step *= 0.8
        return best


def _log_quotient(
    partners: torch.Tensor, points: torch.Tensor, there: torch.Tensor, function: Function
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ log of the difference quotients, and each of them."""
    change = torch.linalg.vector_norm(function(partners) - there, dim=1)
    value = change.clamp(min=1e-30).log() - torch.linalg.vector_norm(partners - points, dim=1).clamp(min=1e-30).log()
    return value.sum(), value
