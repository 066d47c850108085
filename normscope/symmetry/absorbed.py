"""Biases that take back what a change of other parameters adds to their sum: y = W₂(h + b₁) + b₂ with b₁ + v and b₂ − W₂v."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from normscope.graph.graph import Node
from normscope.rules.algebra import Form, Moved, Normalized, Parameter, Softmax, Sum
from normscope.symmetry.groups import Action, Parameters, ScaleGroup, ShiftGroup, shift_kind
from normscope.symmetry.indices import compressed, renumbered
from normscope.symmetry.numerics import Numerics
from normscope.symmetry.shifts import Shifts, seen


@dataclass(frozen=True)
class Absorber:
    """A bias that is added once, as a tensor of `shape` and times a coefficient, and the node whose value is that sum."""

    bias: Parameter
    shape: tuple[int, ...]
    node: Node
    coefficient: float

    @property
    def action(self) -> Action:
        """The bias as part of a group: no member moves it, it follows."""
        return Action(self.bias.name, self.bias.shape, np.full((1,) * len(self.bias.shape), -1))

    def share_of(self, change: torch.Tensor) -> torch.Tensor:
        """A change of the sum that is the same wherever the bias is, as a change of the bias."""
        whole = (1,) * (change.dim() - len(self.shape)) + self.shape
        own = change[tuple(slice(0, 1) if size == 1 else slice(None) for size in whole)]
        return own.reshape(self.bias.shape) / self.coefficient


@dataclass(frozen=True)
class Compensation:
    """Moves biases so that the sums they belong to change only in proportion to how they themselves were scaled."""

    absorbers: tuple[Absorber, ...]
    numerics: Numerics

    def __call__(self, moved: dict[str, torch.Tensor], parameters: Parameters, factors: Parameters) -> None:
        """After a finite step; factors: by what a parameter was scaled, where it was."""
        for absorber in self.absorbers:
            after, before = (self.numerics.value(point, absorber.node) for point in (moved, parameters))
            self._take_back(moved, absorber, after - self._seen_by(absorber, factors, 1.0) * before)

    def tangent(self, tangent: dict[str, torch.Tensor], parameters: Parameters, rates: Parameters) -> None:
        """Along a direction; rates: the speeds at which parameters are scaled."""
        for absorber in self.absorbers:
            value, change = self.numerics.derivative(parameters, tangent, absorber.node)
            self._take_back(tangent, absorber, change - self._seen_by(absorber, rates, 0.0) * value)

    @staticmethod
    def _seen_by(absorber: Absorber, scales: Parameters, default: float) -> torch.Tensor | float:
        """The scale of a bias, broadcast as the bias is."""
        scale = scales.get(absorber.bias.name)
        return default if scale is None else scale.expand(absorber.bias.shape).reshape(absorber.shape)

    @staticmethod
    def _take_back(moved: dict[str, torch.Tensor], absorber: Absorber, change: torch.Tensor) -> None:
        bias = moved.get(absorber.bias.name, torch.zeros(absorber.bias.shape, dtype=torch.float64))
        moved[absorber.bias.name] = bias - absorber.share_of(change).to(bias)


class Absorbers:
    """All biases of a graph that can take something back, and what may be added where if they do (`shifts`)."""

    def __init__(self, forms: Sequence[Form], known: Shifts, numerics: Numerics) -> None:
        self.forms, self.known, self.numerics = forms, known, numerics
        self.users: dict[Form, list[Form]] = defaultdict(list)
        for form in forms:
            for operand in form.operands:
                self.users[operand].append(form)
        last = {form.node: form for form in forms if form.node is not None}
        ends = [form for form in forms if isinstance(form, Sum) and form.node is not None and last[form.node] is form]
        found = {form: absorber for form in ends if (absorber := self._of(form)) is not None}
        self.at = {form: absorber for form, (_, absorber) in found.items()}
        self.shifts = Shifts(forms, {form: (holder, absorber.shape) for form, (holder, absorber) in found.items()}, known)

    def _of(self, form: Sum, factor: float = 1.0, node: Node | None = None) -> tuple[Form, Absorber] | None:
        """The operand of a sum that holds a bias which nothing but the sum sees, itself or inside of a sum of its own."""
        node = node or form.node
        assert node is not None
        nested = None
        for operand, coefficient in zip(form.operands, form.coefficients, strict=True):
            if not coefficient or not self._unseen_but_in(form, operand):
                continue
            bias = operand.operands[0] if isinstance(operand, Moved) and len(operand.operands) == 1 else operand
            if isinstance(bias, Parameter) and bias.entries == operand.entries:
                if (bias is operand or len(self.users[bias]) == 1) and seen(self.known.labels[bias], bias.shape).any():
                    return operand, Absorber(bias, operand.shape, node, factor * coefficient)
            elif isinstance(operand, Sum):
                inner = self._of(operand, factor * coefficient, node)
                nested = nested if inner is None else (operand, inner[1])
        return nested

    def _unseen_but_in(self, form: Form, operand: Form) -> bool:
        """Whether nothing but one sum sees an operand."""
        others = [user for user in self.users[operand] if user is not form]
        edges = [self.known.edges[user][user.operands.index(operand)] for user in others]
        return form.operands.count(operand) == 1 and not any(seen(labels, operand.shape).any() for labels in edges)

    def reached(self, *starts: Form) -> tuple[Absorber, ...]:
        """The absorbers that a change of some forms meets first, in the order of computation."""
        met, waiting, ends = set(starts), deque(starts), set()
        while waiting:
            for user in self.users[waiting.popleft()]:
                if user in self.at and self.at[user].bias not in starts:
                    ends.add(user)
                elif user not in met and not isinstance(user, (Normalized, Softmax)):
                    met.add(user)
                    waiting.append(user)
        return tuple(self.at[form] for form in self.forms if form in ends)

    def groups(self) -> Iterator[ShiftGroup]:
        """Parameters that may be shifted because later biases take it back."""
        for form in self.forms:
            if isinstance(form, Parameter):
                labels = _not_made_of(self.shifts.labels[form], self.known.labels[form])
                if (labels >= 0).any():
                    taken = self.reached(form)
                    actions = (Action(form.name, form.shape, labels), *(absorber.action for absorber in taken))
                    compensation = Compensation(taken, self.numerics)
                    yield ShiftGroup(shift_kind(form.shape), actions, int(labels.max()) + 1, compensation=compensation)

    def completed(self, group: ScaleGroup, ignored: Sequence[Form]) -> ScaleGroup:
        """The group together with the biases that take back what constants add when all but they are scaled."""
        if not ignored:
            return group
        moved: set[Form] = {form for form in self.forms if isinstance(form, Parameter) and form.name in group.parameters}
        taken = self.reached(*(form for form in ignored if self._follows(form, moved)))
        follow = tuple(absorber.action for absorber in taken if absorber.bias.name not in group.parameters)
        return replace(group, actions=group.actions + follow, compensation=Compensation(taken, self.numerics)) if taken else group

    def _follows(self, form: Form, moved: set[Form]) -> bool:
        """Whether a form is made, linearly, of one of some parameters."""
        waiting, met = [form], {form}
        while waiting:
            for operand in waiting.pop().operands:
                if operand in moved:
                    return True
                taken_back = operand in self.at and self.at[operand].bias not in moved
                if operand not in met and not isinstance(operand, (Normalized, Softmax)) and not taken_back:
                    met.add(operand)
                    waiting.append(operand)
        return False


def _not_made_of(labels: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The classes of one partition that are not unions of classes of another."""
    own, others = np.broadcast_arrays(labels, known)
    pairs = np.unique(np.stack([own.ravel(), others.ravel()]), axis=1)
    names, counts = np.unique(pairs[1], return_counts=True)
    broken = np.isin(pairs[1], names[(counts > 1) | (names < 0)])
    return compressed(renumbered(np.where(np.isin(own, pairs[0][broken]), own, -1)))
