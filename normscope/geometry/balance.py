"""The scales of a representative: one convex problem in the logarithms t of the factors of all scale groups.

An entry w becomes w exp(a·t), a its degrees in each group. F(t) = ½ Σ w² exp(2 a·t) − q·t is convex, and at its minimum every
member has the charge Σ d w² = q: 0 where degrees have both signs, so that both sides are in balance, 1 for a scale-free vector.
Squares are kept as logarithms, so that weights of any size have a representative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse.linalg import LinearOperator, cg

from normscope.core.errors import InputError
from normscope.geometry.groups import SymmetryGroup, Tensors, by_member, log_by_member, members, spread
from normscope.symmetry.indices import together

MOST_SWEEPS = 10  # one member at a time, exactly: enough where groups share no parameters, and a start elsewhere
MOST_NEWTON_STEPS = 200
MOST_HALVINGS = 64  # of one Newton step
SMALL = 1e-8  # a step that rounding may keep from getting smaller
ACCURACY = 1e-9  # relative, of the linear equations of a Newton step
LEAST_WEIGHT = 1e-4  # of a kind of entries in a charge, so that none has to vanish

Part = tuple[str, torch.Tensor, float]  # a parameter, the member of every entry, the degree


def preferred_scales(groups: Sequence[SymmetryGroup], values: Tensors, tolerance: float) -> list[torch.Tensor]:
    """The logarithms t of the factors at which every group has its charge, to `tolerance`; members with nothing to balance: 0."""
    found: dict[int, torch.Tensor] = {}
    for places in together(range(len(groups)), lambda place: groups[place].parameters):
        found.update(zip(places, _preferred([groups[place] for place in places], values, tolerance), strict=True))
    return [found[place] for place in range(len(groups))]


def _preferred(groups: Sequence[SymmetryGroup], values: Tensors, tolerance: float) -> list[torch.Tensor]:
    """Those of groups that meet."""
    problem = _Balance(groups, values)
    logs = torch.zeros(sum(problem.counts), dtype=torch.float64)
    for _ in range(MOST_SWEEPS):
        before, logs = logs, problem.swept(logs)
        if float((logs - before).abs().max()) <= tolerance:
            return list(logs.split(problem.counts))
    return list(problem.minimum(logs, tolerance).split(problem.counts))


class _Balance:
    """F and its derivatives for some groups at a point; t is one vector, `counts` entries per group."""

    def __init__(self, groups: Sequence[SymmetryGroup], values: Tensors) -> None:
        self.counts = [group.count for group in groups]
        self.parts = [_parts(group, values) for group in groups]
        self.logs = {name: 2 * values[name].abs().log() for parts in self.parts for name, *_ in parts}  # of the squares
        self.charges = _charges(self.parts, self.counts)
        self.target = torch.cat([torch.full((n,), q, dtype=torch.float64) for n, q in zip(self.counts, self.charges, strict=True)])
        present = {name: (entries > -torch.inf).double() for name, entries in self.logs.items()}
        self.movable = torch.stack(self._sides(present)).gt(0).all(0)

    def swept(self, logs: torch.Tensor) -> torch.Tensor:
        """Every group in turn at its charge, the others held."""
        own = list(logs.split(self.counts))
        for number, (parts, count, charge) in enumerate(zip(self.parts, self.counts, self.charges, strict=True)):
            logarithms = self._moved(torch.cat(own), {name for name, *_ in parts})
            sums = torch.stack([log_by_member(numbers, logarithms[name], count) for name, numbers, _ in parts])
            own[number] = own[number] + _scale_at(charge, sums, [degree for *_, degree in parts])
        return torch.cat(own)

    def minimum(self, logs: torch.Tensor, tolerance: float) -> torch.Tensor:
        """Newton's method, halving steps that do not lower F."""
        self._divide(logs)
        last = math.inf
        for _ in range(MOST_NEWTON_STEPS):
            squares = self._scaled(logs)
            step = self._newton_step(squares)
            size = float(step.abs().max())
            if size <= tolerance or (size <= SMALL and size >= last / 2):
                return logs + step
            if not math.isfinite(size):
                break
            for _ in range(MOST_HALVINGS):
                if size <= SMALL or self._value(logs + step) < self._value(logs):
                    break
                step, size = step / 2, size / 2
            logs, last = logs + step, size
        raise InputError(f"no representative after {MOST_NEWTON_STEPS} Newton steps: the scales of this model do not settle")

    def _divide(self, logs: torch.Tensor) -> None:
        """Divide F by its largest square at t, and by no less than 1 where there are charges, so that both stay finite."""
        unit = max(float(entries.max()) for entries in self._moved(logs).values() if entries.numel())
        unit = max(unit, 0.0) if any(self.charges) else unit
        self.logs = {name: entries - unit for name, entries in self.logs.items()}
        self.target = self.target * math.exp(-unit) if any(self.charges) else self.target

    def _newton_step(self, squares: Tensors) -> torch.Tensor:
        """−(∇²F)⁺∇F; members with nothing on one side of Σ_{d>0} d w² = q + Σ_{d<0} |d| w² stay."""
        rising, falling = self._sides(squares)
        active = (rising > 0) & (falling > 0)
        if not torch.equal(active, self.movable):
            raise InputError("no representative: the sizes of weights that share a symmetry are too far apart for float64")
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

    def _sides(self, squares: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Both sides of Σ_{d>0} d w² = q + Σ_{d<0} |d| w², a negative q on the left."""
        rising = self._sums(squares, lambda degree: max(degree, 0.0)) - self.target.clamp(max=0)
        return rising, self._sums(squares, lambda degree: max(-degree, 0.0)) + self.target.clamp(min=0)

    def _value(self, logs: torch.Tensor) -> float:
        return 0.5 * sum(float(part.sum()) for part in self._scaled(logs).values()) - float(self.target @ logs)

    def _scaled(self, logs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The squares of the entries of all parameters at t."""
        return {name: entries.exp() for name, entries in self._moved(logs).items()}

    def _moved(self, logs: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Their logarithms, of all parameters or of some."""
        return {name: self.logs[name] + 2 * rate for name, rate in self._rates(logs, names).items()}

    def _rates(self, logs: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """a·t of every entry."""
        rates: dict[str, torch.Tensor] = {}
        for parts, own in zip(self.parts, logs.split(self.counts), strict=True):
            for name, numbers, degree in parts:
                if names is None or name in names:
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


def _charges(parts: Sequence[Sequence[Part]], counts: Sequence[int]) -> list[float]:
    """The charge of each group's members: 0, or the least degree (a unit norm) where all degrees have one sign.

    F has a minimum only if the charges are a sum of the degrees of all entries with positive weights. Groups may hold a scale-free
    vector between them: w → c w, v → v/c and v → c v, u → c u make w, u → c w, c u. Then as few members as possible get a charge
    of 1 more or less.
    """
    degrees = [np.array([degree for *_, degree in own]) for own in parts]
    wanted = np.array([0.0 if own.min() * own.max() < 0 else own[np.abs(own).argmin()] for own in degrees])
    names = dict.fromkeys(name for own in parts for name, *_ in own)
    exponents = np.unique(np.concatenate([_exponents(name, parts) for name in names], 1), axis=1)
    missing = _missing(exponents, wanted, counts)
    rounded = wanted + np.sign(missing)
    return (rounded if not _missing(exponents, rounded, counts).any() else wanted + missing).tolist()


def _missing(exponents: np.ndarray, charges: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """What is to be added to charges, for as few members as can be, so that those of all members of a group together are a sum
    of the columns of exponents, each with at least LEAST_WEIGHT.
    """
    groups, kinds = exponents.shape
    members_of = np.array(counts)
    found = linprog(
        c=np.concatenate([np.zeros(kinds), members_of, members_of]),
        A_eq=np.concatenate([exponents, -np.eye(groups), np.eye(groups)], 1),
        b_eq=members_of * charges,
        bounds=[(LEAST_WEIGHT, None)] * kinds + [(0, None)] * (2 * groups),
    ).x
    more, less = found[kinds:].reshape(2, groups)
    return np.where(np.abs(more - less) > LEAST_WEIGHT / 2, more - less, 0.0) / members_of


def _exponents(name: str, parts: Sequence[Sequence[Part]]) -> np.ndarray:
    """(groups, kinds of entries): how each group scales the entries of a parameter."""
    rates = [sum((degree * _inside(numbers) for other, numbers, degree in own if other == name), torch.zeros(())) for own in parts]
    return torch.stack(torch.broadcast_tensors(*rates)).reshape(len(parts), -1).unique(dim=1).double().numpy()


def _inside(numbers: torch.Tensor) -> torch.Tensor:
    """1 where an entry has a member, 0 elsewhere; a single 1 where all have."""
    inside = (numbers >= 0).double()
    return torch.ones(()) if bool(inside.all()) else inside


def _scale_at(charge: float, squares: torch.Tensor, degrees: Sequence[float]) -> torch.Tensor:
    """log c of each member where Σ d c^{2d} n² = charge; squares: log n², (parameters, members).

    It is the zero of log Σ_{d>0} … − log Σ_{d<0} …, the charge on the side where it is positive, which increases with log c;
    Newton's method is exact at once where the degrees differ only in sign. Members with nothing on one side stay.
    """
    exponents = torch.tensor([*degrees, 0.0], dtype=torch.float64)
    weights = torch.cat([squares, torch.full_like(squares[:1], abs(charge)).log()])
    weights[:-1] += exponents[:-1].abs().log()[:, None]
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
