"""From solutions to groups: members that move the same parameters in the same way are one family."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from normscope.rules.algebra import Contraction, Form, Normalized, Opaque, Parameter, Softmax
from normscope.symmetry.degrees import Degrees
from normscope.symmetry.groups import Action, Group, ScaleGroup, ShiftGroup, shift_kind
from normscope.symmetry.indices import compressed
from normscope.symmetry.shifts import Shifts

Key = tuple[str, int, float]  # parameter, which of its arrays of unknowns, degree
Member = dict[Key, np.ndarray]  # the places in that array that a one-parameter group moves


def scale_members(degrees: Degrees) -> list[Member]:
    """The one-parameter groups of scalings, each with what it moves."""
    solution = degrees.system.solve()
    places: dict[int, list[tuple[str, int, np.ndarray]]] = defaultdict(list)
    for name, arrays in degrees.leaves.items():
        for number, ids in enumerate(arrays):
            classes = solution.classes[ids].ravel()
            order = np.argsort(classes, kind="stable")
            names, starts = np.unique(classes[order], return_index=True)
            for unknown, where in zip(names.tolist(), np.split(order, starts[1:]), strict=True):
                if unknown:
                    places[unknown].append((name, number, where))
    members = []
    for vector in solution.vectors:
        found: dict[tuple[str, int, float], list[np.ndarray]] = defaultdict(list)
        for unknown, value in vector.items():
            for name, number, where in places.get(unknown, ()):
                found[name, number, float(value)].append(where)
        if found:
            members.append(_normalized({key: np.sort(np.concatenate(where)) for key, where in found.items()}, list(degrees.leaves)))
    return members


def _normalized(member: Member, order: Sequence[str]) -> Member:
    """Degrees such that the first parameter has 1."""
    keys = sorted(member, key=lambda key: (order.index(key[0]), key[1], -key[2]))
    unit = keys[0][2]
    return {(name, number, degree / unit): member[name, number, degree] for name, number, degree in keys}


def scale_groups(members: Sequence[Member], degrees: Degrees, shapes: Mapping[str, tuple[int, ...]]) -> list[ScaleGroup]:
    """Families of members that move the same parameters by the same degrees, none of them the same entry twice."""
    families: dict[tuple[Key, ...], list[list[Member]]] = defaultdict(list)
    taken: dict[int, dict[Key, set[int]]] = {}
    for member in sorted(members, key=lambda member: [int(where[0]) for where in member.values()]):
        candidates = families[tuple(member)]
        for family in candidates:
            used = taken[id(family)]
            if not any(used[key] & set(where.tolist()) for key, where in member.items()):
                break
        else:
            family = []
            candidates.append(family)
            used = taken[id(family)] = defaultdict(set)
        family.append(member)
        for key, where in member.items():
            used[key] |= set(where.tolist())
    return [_scale_group(key, family, degrees, shapes) for key, found in families.items() for family in found]


def _scale_group(
    keys: tuple[Key, ...], family: Sequence[Member], degrees: Degrees, shapes: Mapping[str, tuple[int, ...]]
) -> ScaleGroup:
    actions = []
    for name, number, degree in keys:
        numbers = np.full(degrees.leaves[name][number].shape, -1)
        for i, member in enumerate(family):
            numbers.flat[member[name, number, degree]] = i
        actions.append(Action(name, shapes[name], compressed(numbers), degree))
    return ScaleGroup(_kind(keys), tuple(actions), len(family))


def _kind(keys: Sequence[Key]) -> str:
    if any(degree < 0 for _, _, degree in keys):
        return "rescale"
    return "scale" if len({name for name, _, _ in keys}) == 1 else "joint-scale"


def shift_groups(forms: Iterable[Form], shifts: Shifts) -> list[ShiftGroup]:
    """A group for every parameter of which some part may be shifted unseen."""
    groups = []
    for form in forms:
        if isinstance(form, Parameter):
            labels = shifts.labels[form]
            count = int(labels.max()) + 1
            if count:
                groups.append(ShiftGroup(shift_kind(form.shape), (Action(form.name, form.shape, labels),), count))
    return groups


@dataclass
class Paths:
    """The way from a parameter to what ends its group, by the names of modules."""

    forms: Sequence[Form]
    users: dict[Form, list[Form]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.leaves: dict[str, Form] = {form.name: form for form in self.forms if isinstance(form, Parameter)}
        for form in self.forms:
            for operand in form.operands:
                self.users[operand].append(form)

    def of(self, group: Group) -> tuple[str, ...]:
        """From the first parameter of a group to the first form that can end a group of its kind."""
        others = {self.leaves[action.parameter] for action in group.actions if action.degree < 0}
        return self._shortest(self.leaves[group.parameters[0]], self._end(group.kind, others))

    def between(self, parameter: str, end: Form) -> tuple[str, ...]:
        return self._shortest(self.leaves[parameter], lambda form: form is end)

    def _end(self, kind: str, others: set[Form]) -> Callable[[Form], bool]:
        if kind == "rescale":
            return lambda form: isinstance(form, Contraction) and bool(others & self._leaves_below(form))
        if kind in ("shift", "weight-shift"):
            return lambda form: isinstance(form, Softmax) or (isinstance(form, Normalized) and form.centered)
        return lambda form: isinstance(form, Normalized) and form.divides

    def _leaves_below(self, form: Form) -> set[Form]:
        """The parameters that a form reads directly, rearranged perhaps."""
        found: set[Form] = set()
        for operand in form.operands:
            while len(operand.operands) == 1:
                operand = operand.operands[0]
            found.add(operand)
        return found

    def _shortest(self, start: Form, ends: Callable[[Form], bool]) -> tuple[str, ...]:
        before: dict[Form, Form | None] = {start: None}
        waiting = deque([start])
        while waiting:
            form: Form | None = waiting.popleft()
            if form is not start and form is not None and ends(form):
                names = []
                while form is not None:
                    names.append(_name(form))
                    form = before[form]
                return tuple(dict.fromkeys(reversed(names)))
            assert form is not None
            for user in self.users[form]:
                if user not in before and not isinstance(user, Opaque):
                    before[user] = form
                    waiting.append(user)
        return (_name(start),)


def _name(form: Form) -> str:
    if isinstance(form, Parameter):
        return form.name
    return "" if form.node is None else form.node.path or form.node.name
