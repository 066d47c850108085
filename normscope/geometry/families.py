"""Which parameters are scale-free, and how their entries form vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from normscope.core.errors import InputError
from normscope.geometry.groups import Symmetries, SymmetryGroup, Tensors, described_members, members
from normscope.geometry.vectors import Vectors


@dataclass(frozen=True, eq=False)
class Family:
    """Vectors whose lengths do not matter, and the parameters that they run through."""

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    vectors: Vectors


def scale_free_families(report: Symmetries, parameters: Tensors) -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """The families on which an optimizer can act, and one line for each scale group on which it cannot.

    A parameter belongs to one family at most: a group of its own goes before joint ones, and more vectors before fewer.
    """
    groups = [group for group in report.groups if group.kind in ("scale", "joint-scale")]
    known = {name for group in groups for name in group.parameters}
    if known and not known & set(parameters):
        raise InputError(
            f"none of the scale-free parameters of the report, such as {min(known)!r}, is among the optimizer's: pass the "
            "parameters of the same model, without the 'module.' of DistributedDataParallel"
        )
    families: list[Family] = []
    left_out: list[str] = []
    taken: dict[str, str] = {}
    for group in sorted(groups, key=lambda group: (len(group.parameters), -group.count)):
        label = " + ".join(group.parameters)
        obstacle = _obstacle(group, parameters, taken)
        if obstacle:
            left_out.append(f"{label}: {obstacle}")
            continue
        tensors = tuple(parameters[name] for name in group.parameters)
        families.append(Family(group.parameters, tensors, Vectors.of(tensors, group.axes, group.blocks)))
        taken.update(dict.fromkeys(group.parameters, label))
    return tuple(families), tuple(left_out)


def _obstacle(group: SymmetryGroup, parameters: Tensors, taken: Mapping[str, str]) -> str:
    """Why the vectors of a group cannot be turned, or nothing."""
    for name in group.parameters:
        if name not in parameters:
            return f"{name} is not among the parameters that can move"
        if name in taken:
            return f"{name} already turns with {taken[name]}"
        if parameters[name].is_complex():
            return f"{name} is complex"
    if len(set(group.degrees)) > 1:
        return f"its parameters scale with different powers {group.degrees}, so its orbits are not rays"
    pairs = zip(members(group, parameters), described_members(group, parameters), strict=True)
    whole = all(bool((exact == described).all()) for exact, described in pairs)
    if not whole or len(set(group.parameters)) < len(group.parameters):
        return "its vectors are not runs of equal length along an axis"
    return ""
