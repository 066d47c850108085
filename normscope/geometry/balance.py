"""The scales of a representative: one convex problem in the logarithms t of the factors of all scale groups.

A group multiplies an entry w by exp(a·t), a its degrees. F(t) = ½ Σ w² exp(2 a·t) − q·t is convex, and at its minimum every member
has the charge Σ d w² = q: none where degrees have both signs, so that both sides are in balance, and one where a vector is scale-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse.linalg import LinearOperator, cg

from normscope.core.errors import InputError
from normscope.geometry.groups import SymmetryGroup, Tensors, by_member, members, spread

MOST_SWEEPS = 10  # one member at a time, exactly: enough where groups share no parameters, and a start elsewhere
MOST_NEWTON_STEPS = 200
SMALL = 1e-8  # a step that rounding may keep from getting smaller
ACCURACY = 1e-9  # relative, of the linear equations of a Newton step
FEASIBLE = 1e-3  # the least weight of an entry in a charge that entries can have, before it counts as one

Part = tuple[str, torch.Tensor, float]  # a parameter, the member of every entry, the degree


def preferred_scales(groups: Sequence[SymmetryGroup], values: Tensors, tolerance: float) -> list[torch.Tensor]:
    """The logarithms t of the factors at which every group has its charge, to `tolerance`; 0 for members with nothing to balance."""
    if not groups:
        return []
    problem = _Balance(groups, values)
    logs = torch.zeros(sum(problem.counts), dtype=torch.float64)
    for _ in range(MOST_SWEEPS):
        before, logs = logs, problem.swept(logs)
        if float((logs - before).abs().max()) <= tolerance:
            return list(logs.split(problem.counts))
    return list(problem.minimum(logs, tolerance).split(problem.counts))


class _Balance:
    """F and its derivatives for some groups at a point; t is one vector, `counts` entries a group."""

    def __init__(self, groups: Sequence[SymmetryGroup], values: Tensors) -> None:
        self.counts = [group.count for group in groups]
        self.parts = [_parts(group, values) for group in groups]
        names = dict.fromkeys(name for parts in self.parts for name, *_ in parts)
        self.squares = {name: values[name].square() for name in names}
        self.charges = _charges(self.parts, self.counts, {name: values[name].shape for name in names})
        self.target = torch.cat([torch.full((n,), q, dtype=torch.float64) for n, q in zip(self.counts, self.charges, strict=True)])

    def swept(self, logs: torch.Tensor) -> torch.Tensor:
        """Every group in turn at its charge, the others held."""
        own = list(logs.split(self.counts))
        for number, (parts, count, charge) in enumerate(zip(self.parts, self.counts, self.charges, strict=True)):
            squares = self._scaled(torch.cat(own))
            sums = torch.stack([by_member(numbers, squares[name], count) for name, numbers, _ in parts])
            own[number] = own[number] + _scale_at(charge, sums, [degree for *_, degree in parts])
        return torch.cat(own)

    def minimum(self, logs: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Newton's method, halving steps that do not lower F."""
        last = float("inf")
        for _ in range(MOST_NEWTON_STEPS):
            squares = self._scaled(logs)
            step = self._newton_step(squares)
            size = float(step.abs().max())
            if size <= tolerance or (size <= SMALL and size >= last / 2):
                return logs + step
            while size > SMALL and not self._value(logs + step) < self._value(logs):
                step, size = step / 2, size / 2
            logs, last = logs + step, size
        raise InputError(f"no representative after {MOST_NEWTON_STEPS} Newton steps: the scales of this model do not settle")

    def _newton_step(self, squares: Tensors) -> torch.Tensor:
        """−(∇²F)⁺∇F; members with nothing on one side of Σ_{d>0} d w² = q + Σ_{d<0} |d| w² stay."""
        rising = self._sums(squares, lambda degree: max(degree, 0.0)) - self.target.clamp(max=0)
        falling = self._sums(squares, lambda degree: max(-degree, 0.0)) + self.target.clamp(min=0)
        active = (rising > 0) & (falling > 0)
        diagonal = torch.where(active, 2 * self._sums(squares, lambda degree: degree**2), 1.0)

        def curved(entries: np.ndarray) -> np.ndarray:
            rates = self._rates(torch.where(active, torch.from_numpy(entries.reshape(-1).copy()), 0.0))
            changes = {name: 2 * squares[name] * rate for name, rate in rates.items()}
            return torch.where(active, self._sums(changes, lambda degree: degree), 0.0).numpy()

        shape = (len(active), len(active))
        hessian = LinearOperator(shape, matvec=curved, dtype=np.float64)
        scaling = LinearOperator(shape, matvec=lambda entries: entries.reshape(-1) / diagonal.numpy(), dtype=np.float64)
        slope = torch.where(active, rising - falling, 0.0).numpy()
        return torch.from_numpy(cg(hessian, -slope, rtol=ACCURACY, maxiter=10 * len(active), M=scaling)[0])

    def _value(self, logs: torch.Tensor) -> float:
        return 0.5 * sum(float(part.sum()) for part in self._scaled(logs).values()) - float(self.target @ logs)

    def _scaled(self, logs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: self.squares[name] * (2 * rate).exp() for name, rate in self._rates(logs).items()}

    def _rates(self, logs: torch.Tensor) -> dict[str, torch.Tensor]:
        """a·t of every entry."""
        rates: dict[str, torch.Tensor] = {}
        for parts, own in zip(self.parts, logs.split(self.counts), strict=True):
            for name, numbers, degree in parts:
                rates[name] = rates.get(name, 0) + degree * spread(numbers, own)
        return rates

    def _sums(self, entries: Tensors, weight: Callable[[float], float]) -> torch.Tensor:
        """Σ weight(d) · entry of every member."""
        found = []
        for parts, count in zip(self.parts, self.counts, strict=True):
            sums = [weight(degree) * by_member(numbers, entries[name], count) for name, numbers, degree in parts]
            found.append(torch.stack(sums).sum(0))
        return torch.cat(found)


def _parts(group: SymmetryGroup, values: Tensors) -> list[Part]:
    """What a group scales; a bias that only follows has no member and does not count."""
    parts = zip(group.parameters, members(group, values), group.degrees, strict=True)
    return [part for part in parts if bool((part[1] >= 0).any())]


def _charges(parts: Sequence[Sequence[Part]], counts: Sequence[int], shapes: Mapping[str, torch.Size]) -> list[float]:
    """The charge of each group's members: 0, or the least degree (a unit norm) where all degrees have one sign.

    F has a minimum only if the charges are a sum of the degrees of all entries with positive weights. Groups may hold a scale-free
    vector between them: of w → c w, v → v/c and v → c v, u → c u, together u and w → c. Then as few members as possible get a
    charge of 1 more, or 1 less.
    """
    degrees = [np.array([degree for *_, degree in own]) for own in parts]
    wanted = np.array([0.0 if own.min() * own.max() < 0 else own[np.abs(own).argmin()] for own in degrees])
    rows = np.unique(np.concatenate([_exponents(name, shape, parts) for name, shape in shapes.items()], 1), axis=1)
    weights = linprog(
        c=np.concatenate([np.zeros(rows.shape[1]), counts, counts]),
        A_eq=np.concatenate([rows, -np.eye(len(counts)), np.eye(len(counts))], 1),
        b_eq=wanted,
        bounds=[(FEASIBLE, None)] * rows.shape[1] + [(0, None)] * (2 * len(counts)),
    ).x
    more, less = weights[rows.shape[1] :].reshape(2, -1) > FEASIBLE / 2
    return (wanted + more - less).tolist()


def _exponents(name: str, shape: torch.Size, parts: Sequence[Sequence[Part]]) -> np.ndarray:
    """(groups, kinds of entries): how each group scales the entries of a parameter."""
    found = torch.zeros(len(parts), shape.numel(), dtype=torch.float64)
    for row, own in zip(found, parts, strict=True):
        for other, numbers, degree in own:
            if other == name:
                row += degree * (numbers >= 0).expand(shape).reshape(-1)
    return torch.unique(found, dim=1).numpy()


def _scale_at(charge: float, squares: torch.Tensor, degrees: Sequence[float]) -> torch.Tensor:
    """log c of each member where Σ d c^{2d} n² = charge; squares n²: (parameters, members).

    It is the zero of log Σ_{d>0} … − log Σ_{d<0} …, the charge on the side where it is positive, which increases with log c;
    Newton's method is exact at once where the degrees differ only in sign. Members with nothing on one side stay.
    """
    exponents = torch.tensor([*degrees, 0.0], dtype=torch.float64)
    weights = torch.cat([exponents[:-1].abs()[:, None] * squares, torch.full_like(squares[:1], abs(charge))]).log()
    rising = torch.tensor([*(degree > 0 for degree in degrees), charge < 0])
    alive = (weights[rising] > -torch.inf).any(0) & (weights[~rising] > -torch.inf).any(0)
    logs = torch.zeros(squares.shape[1], dtype=torch.float64)
    for _ in range(MOST_NEWTON_STEPS):
        gap, slope = _log_sum(weights[rising], exponents[rising], logs)
        other, other_slope = _log_sum(weights[~rising], exponents[~rising], logs)
        step = torch.where(alive, (gap - other) / (slope - other_slope), 0.0)
        logs = logs - step
        if not (step.abs() > 1e-15).any():
            break
    return logs


def _log_sum(weights: torch.Tensor, degrees: torch.Tensor, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log Σ exp(weight + 2d log c) of each member and its derivative by log c."""
    terms = weights + 2 * degrees[:, None] * logs
    return terms.logsumexp(0), (terms.softmax(0) * 2 * degrees[:, None]).sum(0)
