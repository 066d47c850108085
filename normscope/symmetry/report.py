"""The symmetries of a model as a table, as JSON, and under test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parameter import is_lazy

from normscope.core.codec import named
from normscope.core.errors import InputError, boundary
from normscope.core.rendering import Group as Lines
from normscope.core.rendering import RenderableType, Table, Text
from normscope.core.result import Result
from normscope.symmetry.check import Refutation, check
from normscope.symmetry.completeness import Completeness, completeness
from normscope.symmetry.groups import Group
from normscope.symmetry.numerics import Numerics
from normscope.symmetry.scale_free import scale_free_weights

KINDS = ("scale", "joint-scale", "shift", "weight-shift", "rescale", "linear")


@dataclass(frozen=True, repr=False)
class SymmetryReport(Result):
    """The groups of a model in one mode.

    sizes: entries of every parameter. unused: those that reach no output at all. training: module path → whether the module was in
    train mode when it was traced.
    """

    schema = "normscope.symmetries/1"

    model: str
    mode: str
    groups: tuple[Group, ...]
    sizes: dict[str, int] = field(repr=False)
    numerics: Numerics = field(repr=False)
    unused: tuple[str, ...] = ()
    training: dict[str, bool] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def of_kind(self, *kinds: str) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.kind in kinds)

    @boundary
    def check(self) -> list[Refutation]:
        """Try to refute every group on numbers, in float64; what comes back is a bug of normscope."""
        return check(self.groups, self.numerics)

    @boundary
    def completeness(self) -> Completeness:
        """How many directions change no output, and how many of them the groups name; for models of a few thousand parameters."""
        return completeness(self.groups, self.numerics, self.unused)

    @property
    def scale_free(self) -> float:
        """The share of the model's parameters whose scale, alone or jointly, no output sees."""
        covered = _covered(self.of_kind("scale", "joint-scale"))
        total = sum(self.sizes.values())
        return sum(int(mask.sum()) for mask in covered.values()) / total if total else 0.0

    @cached_property
    def scale_free_weights(self) -> dict[str, str]:
        """Weight → module path of what ends its scale, for the weights whose length no output sees."""
        return scale_free_weights(self.groups)

    @property
    def redundant_biases(self) -> tuple[str, ...]:
        """Biases of which every entry may be set to anything, alone or with a later bias that takes it back."""
        found = (group for group in self.of_kind("shift") if group.count == math.prod(group.actions[0].shape))
        return tuple(dict.fromkeys(group.parameters[0] for group in found))

    @property
    def dimension(self) -> int:
        """The groups' dimensions added up."""
        return sum(group.count for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; docs/symmetry.md documents every field."""
        described = ("kind", "parameters", "axes", "blocks", "degrees", "count", "whole", "mode", "path", "defect")
        return {
            **named(self, "schema", "model", "mode"),
            "parameters": sum(self.sizes.values()),
            **named(self, "scale_free", "scale_free_weights", "redundant_biases", "unused"),
            "groups": [named(group, *described) for group in self.groups],
        }

    def render(self) -> RenderableType:
        """The report as a rich renderable that fits 100 columns."""
        return Lines(self._headline(), self._table(), self._summary())

    def _headline(self) -> Text:
        statistics = "batch statistics" if self.mode == "train" else "running statistics"
        return Text(f"{self.model}, {self.mode} mode ({statistics}): {len(self)} groups, {self.dimension} dimensions\n")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("kind", no_wrap=True)
        table.add_column("count", justify="right", no_wrap=True)
        table.add_column("parameters (axes, degree)", overflow="fold", ratio=1)
        table.add_column("ends at", no_wrap=True, overflow="ellipsis", max_width=24)
        table.add_column("defect", justify="right", no_wrap=True)
        for group in self.groups:
            table.add_row(
                group.kind, str(group.count), _described(group), group.path[-1] if group.path else "", f"{group.defect:.1e}"
            )
        return table

    def _summary(self) -> Text:
        lines = ["", f"{100 * self.scale_free:.1f}% of {sum(self.sizes.values()):,} parameters are scale-free"]
        if self.redundant_biases:
            lines.append(f"redundant biases: {_listed(self.redundant_biases)}")
        if self.unused:
            lines.append(f"parameters that reach no output: {_listed(self.unused)}")
        return Text.of_lines(lines)


def check_report(report: Any, model: nn.Module) -> None:
    """Check that this is a report, and of a model with these parameters and modules."""
    if not isinstance(report, SymmetryReport):
        raise InputError(f"symmetries must be what ns.symmetries(model, example) returns, got {type(report).__name__}")
    sizes = {name: report.sizes.get(name) if is_lazy(value) else value.numel() for name, value in model.named_parameters()}
    if report.sizes != sizes or report.training.keys() != {path for path, _ in model.named_modules()}:
        raise InputError(f"symmetries is a report of another model ({report.model}): make it of this one")


def _described(group: Group, most: int = 3) -> str:
    """0.weight (0), 1.bias (0; ×c⁻¹), and so on."""
    parts = []
    for action in group.actions[:most]:
        axes = ",".join(map(str, action.axes)) or "all"
        parts.append(f"{action.parameter} ({axes}{'' if action.degree == 1 else f'; {action.degree:g}'})")
    more = len(group.actions) - most
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _covered(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """For every parameter, which of its entries some group moves."""
    masks: dict[str, np.ndarray] = {}
    for group in groups:
        for action in group.actions:
            mask = np.broadcast_to(action.members >= 0, action.shape)
            masks[action.parameter] = masks[action.parameter] | mask if action.parameter in masks else mask
    return masks
