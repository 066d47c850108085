"""Shifts that a later bias takes back: y = W₂(h + b₁) + b₂ is the same with b₁ + v and b₂ − W₂v."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from normscope.graph.graph import Node
from normscope.rules.forms import Form, Moved, Normalized, Parameter, Softmax, Sum
from normscope.symmetry.families import shift_kind
from normscope.symmetry.groups import Action, Parameters, ShiftGroup
from normscope.symmetry.indices import compressed, renumbered
from normscope.symmetry.numerics import Numerics
from normscope.symmetry.shifts import Shifts


@dataclass(frozen=True)
class Absorber:
    """A bias that is added once, as a tensor of `shape`, and the node whose value is that sum."""

    bias: Parameter
    shape: tuple[int, ...]
    node: Node

    def share_of(self, change: torch.Tensor) -> torch.Tensor:
        """A change of the sum that is the same wherever the bias is, as a change of the bias."""
        whole = (1,) * (change.dim() - len(self.shape)) + self.shape
        return change[tuple(slice(0, 1) if size == 1 else slice(None) for size in whole)].reshape(self.bias.shape)


@dataclass(frozen=True)
class Compensation:
    """Takes back, bias by bias, what a shift changes in the sums that they belong to; all of that is linear."""

    absorbers: tuple[Absorber, ...]
    numerics: Numerics

    def __call__(self, moved: dict[str, torch.Tensor], parameters: Parameters) -> None:
        for absorber in self.absorbers:
            steps = {name: (value - parameters[name]).double() for name, value in moved.items()}
            change = self.numerics.derivative(parameters, steps, absorber.node)
            bias = moved[absorber.bias.name]
            moved[absorber.bias.name] = bias - absorber.share_of(change).to(bias)


def absorbed_shifts(forms: Sequence[Form], shifts: Shifts, numerics: Numerics) -> Iterator[ShiftGroup]:
    """Groups of a parameter that may move because later biases take it back."""
    users: dict[Form, list[Form]] = defaultdict(list)
    for form in forms:
        for operand in form.operands:
            users[operand].append(form)
    found = _absorbers(forms, shifts, users)
    if not found:
        return
    wider = Shifts(forms, {form: operand for form, (operand, _) in found.items()})
    for form in forms:
        if not isinstance(form, Parameter):
            continue
        labels = _only_in(wider.labels[form], shifts.labels[form])
        if (labels >= 0).any():
            taken = [absorber for absorber in _reached(form, found, users, forms) if absorber.bias is not form]
            actions = (
                Action(form.name, form.shape, labels),
                *(Action(absorber.bias.name, absorber.bias.shape, np.full((1,) * len(absorber.bias.shape), -1)) for absorber in taken),
            )
            yield ShiftGroup(shift_kind(form.shape), actions, int(labels.max()) + 1, compensate=Compensation(tuple(taken), numerics))


def _only_in(wider: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The classes of one partition that meet none of another."""
    own, others = np.broadcast_arrays(wider, known)
    met = np.unique(own[others >= 0])
    return compressed(renumbered(np.where(np.isin(own, met), -1, own)))


def _absorbers(forms: Sequence[Form], shifts: Shifts, users: dict[Form, list[Form]]) -> dict[Form, tuple[Form, Absorber]]:
    """Every sum that ends its node and has a bias of its own which the outputs can see."""
    last = {form.node: form for form in forms if form.node is not None}
    found = {}
    for form in forms:
        if not isinstance(form, Sum) or form.node is None or last[form.node] is not form:
            continue
        for operand in form.operands:
            bias = operand.operands[0] if isinstance(operand, Moved) and len(operand.operands) == 1 else operand
            alone = len(users[operand]) == len(users[bias]) == 1
            if isinstance(bias, Parameter) and alone and bias.entries == operand.entries and (shifts.labels[bias] < 0).any():
                found[form] = (operand, Absorber(bias, operand.shape, form.node))
    return found


def _reached(
    start: Form, found: dict[Form, tuple[Form, Absorber]], users: dict[Form, list[Form]], forms: Sequence[Form]
) -> list[Absorber]:
    """The absorbers that a shift of a parameter meets first, in the order of computation."""
    met, waiting = {start}, deque([start])
    ends = set()
    while waiting:
        for user in users[waiting.popleft()]:
            if user in found and found[user][1].bias is not start:
                ends.add(user)
            elif user not in met and not isinstance(user, (Normalized, Softmax)):
                met.add(user)
                waiting.append(user)
    return [found[form][1] for form in forms if form in ends]
