"""`ns.bounds.compare`: does any bound or measure rank a family of trained models as their true gaps do?"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Union

import numpy as np
import torch
from torch import nn

from normscope.bounds.bound import CERTIFIED, GAP, MEASURE, Bound
from normscope.bounds.generalization import generalization
from normscope.bounds.losses import Loss, loss_of, zero_one
from normscope.bounds.setting import BATCH_SIZE, Setting
from normscope.core.codec import named, number, plain
from normscope.core.data import Data
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, boundary
from normscope.core.magnitude import ZERO, Magnitude
from normscope.core.progress import Progress, shown
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result

RESOLUTION = 2.0  # standard errors by which two gaps must differ to count as different
SUBTRACTED_BELOW = 1e12  # a bound on a risk this large is the same with and without the risk on the sample

Setup = Mapping[str, Hashable]  # hyperparameters by name


@dataclass(frozen=True)
class Trained:
    """A model with the hyperparameters that it was trained with. train: its own training data, where they differ in the family."""

    model: nn.Module
    hyperparameters: Setup = field(default_factory=dict)
    initial: nn.Module | None = None
    train: Data | None = None


@dataclass(frozen=True)
class Member:
    """One model of a family: its true gap F(H, h) − F(D, h) with a standard error, and every bound that it has, by name.

    empirical: F(D, h) by the name of the loss.
    """

    name: str
    hyperparameters: Setup
    gap: float
    gap_error: float
    empirical: Mapping[str, float]
    bounds: Mapping[str, Bound]

    def predicted(self, name: str) -> Magnitude | None:
        """The gap that a bound states: for a bound on a risk, what it leaves above the risk on the sample. Measures as they are."""
        bound = self.bounds.get(name)
        if bound is None:
            return None
        if bound.quantity == GAP or bound.status == MEASURE or bound.value > SUBTRACTED_BELOW:
            return bound.value
        return Magnitude(max(float(bound.value) - self.empirical.get(bound.loss, 0.0), 0.0))


@dataclass(frozen=True)
class Environment:
    """Pairs of models that differ in one hyperparameter alone, and there in these two values."""

    hyperparameter: str
    values: tuple[Hashable, Hashable]

    def __str__(self) -> str:
        return f"{self.hyperparameter} {self.values[0]} → {self.values[1]}"


@dataclass(frozen=True, repr=False)
class FamilyComparison(Result):
    """How well each bound and measure ranks the members of a family by their true gap.

    Two numbers agree on a pair of models if they order it alike: +1, −1 if they do not, 0 if one of them sees no difference.
    """

    schema = "normscope.compare_bounds/1"

    members: tuple[Member, ...]
    loss: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every bound that at least two members have."""
        found = dict.fromkeys(name for member in self.members for name in member.bounds)
        return tuple(name for name in found if sum(name in member.bounds for member in self.members) > 1)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Those that differ between members."""
        names = dict.fromkeys(name for member in self.members for name in member.hyperparameters)
        return tuple(name for name in names if len({member.hyperparameters.get(name) for member in self.members}) > 1)

    def kendall(self, name: str) -> float:
        """Kendall's rank correlation of the predicted and the true gaps: the mean agreement over all pairs."""
        return _mean(self._agreement(name, i, j) for i, j in self._pairs(name))

    def granulated(self, name: str) -> dict[str, float]:
        """For each hyperparameter the mean agreement over pairs that differ in it alone (Jiang et al. 2020)."""
        pairs = self._pairs(name)
        return {
            wanted: _mean(self._agreement(name, i, j) for i, j in pairs if self._differing(i, j) == (wanted,))
            for wanted in self.hyperparameters
        }

    def sign_errors(self, name: str) -> dict[Environment, float]:
        """In each environment the share of pairs that are ordered wrongly, ½ for no difference (Dziugaite et al. 2020).

        Pairs whose true gaps differ by less than two standard errors are left out, and environments without others too.
        """
        errors: dict[Environment, list[float]] = {}
        for i, j in self._pairs(name):
            differing = self._differing(i, j)
            if len(differing) == 1 and self._resolved(i, j):
                values = sorted((self.members[k].hyperparameters[differing[0]] for k in (i, j)), key=_order)
                environment = Environment(differing[0], (values[0], values[1]))
                errors.setdefault(environment, []).append((1 - self._agreement(name, i, j)) / 2)
        return {environment: float(np.mean(found)) for environment, found in errors.items()}

    def robust_sign_error(self, name: str) -> tuple[float, Environment | None]:
        """The largest sign error over environments, and where; NaN where no environment has a pair that can be told apart."""
        errors = self.sign_errors(name)
        if not errors:
            return float("nan"), None
        worst = max(errors, key=errors.__getitem__)
        return errors[worst], worst

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """Every bound and measure against the true gap, one point per model."""
        from normscope.report.bounds import bounds_against_gaps

        return {"gaps": partial(bounds_against_gaps, self)}

    def to_dict(self) -> dict[str, Any]:
        """Members and scores as plain JSON values; docs/generalization.md documents every field."""
        return {
            "schema": self.schema,
            "loss": self.loss,
            "members": [
                {
                    "name": member.name,
                    "hyperparameters": {key: str(value) for key, value in member.hyperparameters.items()},
                    **named(member, "gap", "gap_error"),
                    "empirical_risk": dict(member.empirical),
                    "bounds": plain([*member.bounds.values()]),
                }
                for member in self.members
            ],
            "scores": [self._score(name) for name in self.names],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> FamilyComparison:
        """The comparison that `to_dict` described; hyperparameters are text."""
        members = []
        for member in content["members"]:
            bounds = {bound["name"]: Bound.from_dict(bound) for bound in member["bounds"]}
            gap, error = number(member["gap"]), number(member["gap_error"])
            members.append(Member(member["name"], member["hyperparameters"], gap, error, member["empirical_risk"], bounds))
        return cls(tuple(members), content["loss"])

    def _score(self, name: str) -> dict[str, Any]:
        error, where = self.robust_sign_error(name)
        granulated = {key: _number(value) for key, value in self.granulated(name).items()}
        return {
            "name": name,
            "kendall": _number(self.kendall(name)),
            "granulated": granulated,
            "robust_sign_error": _number(error),
            "worst_environment": None if where is None else str(where),
        }

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("bound or measure", overflow="fold", max_width=34)
        table.add_column("status", no_wrap=True)
        for heading in ("models", "Kendall", *self.hyperparameters, "mean", "robust"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("worst in", overflow="fold")
        for name in self.names:
            granulated = list(self.granulated(name).values())
            error, where = self.robust_sign_error(name)
            cells = [self.kendall(name), *granulated, _mean(value for value in granulated if value == value)]
            table.add_row(
                name, self._status(name), str(len(self._having(name))),
                *(f"{value:+.2f}" if value == value else "–" for value in cells),
                f"{error:.2f}" if where else "–", str(where or ""),
            )  # fmt: skip
        gaps = [member.gap for member in self.members]
        head = f"{len(self.members)} models, true gaps of the {self.loss} loss from {min(gaps):.4g} to {max(gaps):.4g}"
        legend = (
            "\nKendall, each hyperparameter alone, and their mean: 1 ranks as the gap does, −1 the reverse.",
            "robust: the share of pairs ordered wrongly in the worst environment, 0 at best, about ½ by chance.",
        )
        return Group(Text(f"{head}\n"), table, *map(Text, legend))

    def certified(self, name: str) -> bool:
        """Whether a bound is certified for every member that has it."""
        return self._status(name) == CERTIFIED

    def _status(self, name: str) -> str:
        found = {self.members[i].bounds[name].status for i in self._having(name)}
        return found.pop() if len(found) == 1 else "mixed"

    def _having(self, name: str) -> list[int]:
        return [i for i, member in enumerate(self.members) if name in member.bounds]

    def _pairs(self, name: str) -> list[tuple[int, int]]:
        return list(combinations(self._having(name), 2))

    def _agreement(self, name: str, i: int, j: int) -> float:
        first, second = self.members[i], self.members[j]
        return float(_sign(first.predicted(name) or ZERO, second.predicted(name) or ZERO) * _sign(first.gap, second.gap))

    def _differing(self, i: int, j: int) -> tuple[str, ...]:
        first, second = (self.members[k].hyperparameters for k in (i, j))
        return tuple(name for name in self.hyperparameters if first.get(name) != second.get(name))

    def _resolved(self, i: int, j: int) -> bool:
        first, second = self.members[i], self.members[j]
        return abs(first.gap - second.gap) > RESOLUTION * float(np.hypot(first.gap_error, second.gap_error))


@earlier(positional=2, train="data", only="select")
@boundary
def compare(
    models: Union[Sequence[Trained], Mapping[str, nn.Module]],
    loss: Union[str, Loss, Callable[[Any, Any], torch.Tensor]],
    data: Data,
    *,
    held_out: Data,
    delta: float = 0.05,
    loss_bound: float | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Progress = None,
    **options: Any,
) -> FamilyComparison:
    """Every bound and measure of every model of a family, scored against the true gaps F(H, h) − F(D, h).

    >>> data = torch.randn(40, 3), torch.randint(2, (40,))
    >>> found = compare({str(c): nn.Linear(3, c) for c in (2, 4)}, "zero-one", data, held_out=data, select=["Golowich et al. 2018"])
    >>> found.names
    ('Golowich et al. 2018',)

    models: `Trained` models with their hyperparameters, or models by name.
    loss, delta, loss_bound, batch_size: as in `ns.generalization`.
    data: the training data of all models, unless one brings its own.
    held_out: data that no training has seen.
    seed: of partitions and noise, the same for every model.
    progress: True for a bar on stderr, or a callable (what, done, total).
    options: others of `ns.generalization`, such as select= and partition=.
    """
    family = [Trained(model, {"model": name}) for name, model in models.items()] if isinstance(models, Mapping) else list(models)
    if len(family) < 2:
        raise InputError(f"a family must have at least two models, got {len(family)}")
    chosen = loss_of(loss, loss_bound)
    members = []
    with shown("models", progress, len(family)) as bar:
        for trained in family:
            own = data if trained.train is None else trained.train
            setting = Setting(trained.model, chosen, own, held_out, batch_size=batch_size)
            found = generalization(
                trained.model, chosen, own, held_out=held_out, delta=delta, batch_size=batch_size, initial=trained.initial,
                generator=torch.Generator().manual_seed(seed), **options,
            )  # fmt: skip
            members.append(_member(trained.hyperparameters, setting, found))
            bar.advance()
    return FamilyComparison(tuple(members), chosen.name)


def _member(hyperparameters: Setup, setting: Setting, bounds: Iterable[Bound]) -> Member:
    train, held_out = setting.train, setting.require_held_out()
    error = math.sqrt(sum(float(sample.losses.var(correction=0)) / sample.size for sample in (train, held_out)))
    empirical = {setting.loss.name: train.risk}
    if "margin" in train.columns:
        empirical[zero_one().name] = train.error
    name = ", ".join(f"{key} {value}" for key, value in hyperparameters.items()) or type(setting.model).__name__
    gap = held_out.risk - train.risk
    return Member(name, dict(hyperparameters), gap, error, empirical, {bound.name: bound for bound in bounds})


def _sign(first: Any, second: Any) -> int:
    return int(first > second) - int(first < second)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else float("nan")


def _order(value: Hashable) -> tuple[bool, Any]:
    """Numbers in their order, before everything else in the order of its text."""
    number = isinstance(value, (int, float))
    return not number, value if number else str(value)


def _number(value: float) -> float | None:
    return value if value == value else None
