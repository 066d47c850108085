"""Which of an optimizer's parameters are scale-free, and how their entries form vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from normscope.core.errors import InputError
from normscope.geometry.vectors import Vectors


class SymmetryGroup(Protocol):
    """What is read of a group of `ns.symmetries`."""

    kind: str
    parameters: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    degrees: tuple[float, ...]


class Symmetries(Protocol):
    @property
    def groups(self) -> Sequence[SymmetryGroup]: ...


@dataclass(frozen=True, eq=False)
class Family:
    """Vectors whose lengths do not matter, and the parameters that they run through."""

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    vectors: Vectors


def scale_free_families(report: Symmetries, parameters: Mapping[str, torch.Tensor]) -> tuple[tuple[Family, ...], tuple[str, ...]]:
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
    for group in sorted(groups, key=lambda group: (len(group.parameters), -_count(group, parameters))):
        label = " + ".join(group.parameters)
        missing = [name for name in group.parameters if name not in parameters]
        shared = [name for name in group.parameters if name in taken]
        if missing:
            left_out.append(f"{label}: {missing[0]} is not in this optimizer")
        elif len(set(group.degrees)) > 1:
            left_out.append(f"{label}: its parameters scale with different powers {group.degrees}, so its orbits are not rays")
        elif shared:
            left_out.append(f"{label}: {shared[0]} already turns with {taken[shared[0]]}")
        else:
            tensors = tuple(parameters[name] for name in group.parameters)
            families.append(Family(group.parameters, tensors, Vectors.of(tensors, group.axes, group.blocks)))
            taken.update(dict.fromkeys(group.parameters, label))
    return tuple(families), tuple(left_out)


def _count(group: SymmetryGroup, parameters: Mapping[str, torch.Tensor]) -> int:
    """How many vectors a group has, 0 if its first parameter is not at hand."""
    first = parameters.get(group.parameters[0])
    return 0 if first is None else Vectors.of((first,), group.axes[:1], group.blocks[:1]).count


class FirstExample:
    """Keeps the inputs of a model's first forward pass in training mode, from which its symmetries can be found."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inputs: Any = None
        self._handle = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training or torch.compiler.is_compiling():
            return
        if args and kwargs:
            raise InputError("detection needs a model called with positional or with keyword arguments only; pass symmetries=…")
        self.inputs = kwargs or args
        self._handle.remove()
