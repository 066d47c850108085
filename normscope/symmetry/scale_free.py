"""Which weights are scale-free, and what ends their scale: the one answer that every part of normscope gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from normscope.symmetry.groups import Group

SCALING = ("scale", "joint-scale", "rescale", "linear")
SHIFTING = ("shift", "weight-shift")


def scale_free_weights(groups: Sequence[Group]) -> dict[str, str]:
    """Weight → module path of what ends its scale, for weights whose length no output sees.

    Weights are parameters with two axes or more. One is scaled as a whole, alone or with other parameters of its module; what
    scales parameters against each other frees one where all others are free by themselves. Entries that no output sees may move
    along or not.
    """
    hidden = {group: mask for group in groups if (mask := _unseen(group)) is not None}
    unseen = {group.parameters[0]: mask for group, mask in hidden.items()}
    found = {group.parameters[0]: _end(group) for group, mask in hidden.items() if mask.all()}
    alone = set(found)
    scaling = [group for group in groups if group.kind in SCALING]
    weights = {action.parameter for group in groups for action in group.actions if len(action.shape) > 1}
    while True:
        by_name: dict[str, list[tuple[Group, bool]]] = defaultdict(list)
        for group in scaling:
            degrees = _degrees(group, alone)
            modules, powers = {name.rpartition(".")[0] for name in degrees}, {round(degree, 9) for degree in degrees.values()}
            for name in degrees if len(modules) == len(powers) == 1 and powers != {0.0} else ():
                by_name[name].append((group, len(degrees) == 1))
        freed = set()
        for name, candidates in by_name.items():
            own = _covering(name, [group for group, single in candidates if single], unseen)
            first = own or _covering(name, [group for group, _ in candidates], unseen)
            if first is not None:
                found.setdefault(name, next((found[other] for other in first.parameters if other in alone), _end(first)))
            if own is not None:
                freed.add(name)
        if not freed:
            return {name: end for name, end in found.items() if name in weights}
        alone |= freed


def _degrees(group: Group, alone: set[str]) -> Mapping[str, float]:
    """Parameter → d where it becomes c^d as large when every member scales by c; without those that are free alone."""
    degrees: dict[str, float] = defaultdict(float)
    for action in group.actions:
        if action.parameter not in alone:
            degrees[action.parameter] += action.degree
    return degrees


def _covering(name: str, groups: Sequence[Group], unseen: Mapping[str, np.ndarray]) -> Group | None:
    """The group that scales all entries of a parameter that are seen, or the first of several that together do."""
    masks = {group: _moved(group, name) for group in groups}
    whole = [group for group, mask in masks.items() if mask.all()]
    together, first = unseen.get(name, np.False_), None
    for group, mask in () if whole else masks.items():
        if not (together & mask).any():
            together, first = together | mask, first or group
    return whole[0] if whole else first if together.all() else None


def _moved(group: Group, name: str) -> np.ndarray:
    """Which entries of a parameter a group scales; if its rows and columns move at once, only where all of them do."""
    actions = [action for action in group.actions if action.parameter == name]
    if all(action.whole for action in actions):
        return np.ones(1, bool)
    return np.broadcast_to(actions[0].members >= 0, actions[0].shape) if len(actions) == 1 else np.zeros(1, bool)


def _unseen(group: Group) -> np.ndarray | None:
    """The entries of a parameter that a group sets to anything, each by itself while nothing else moves."""
    action = group.actions[0]
    mask = np.broadcast_to(action.members >= 0, action.shape)
    return mask if group.kind in SHIFTING and len(group.actions) == 1 and group.count == mask.sum() else None


def _end(group: Group) -> str:
    return group.path[-1] if group.path else ""
