"""One guarantee about unseen data: its value, every ingredient, what it assumes, and whether it says anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import torch

from normscope.core.codec import named, number, plain
from normscope.core.magnitude import Magnitude
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result

RISK, GAP, RANDOMIZED = "risk", "gap", "risk of a randomized predictor"
QUANTITIES = (RISK, GAP, RANDOMIZED)

CERTIFIED = "certified"  # a theorem, and every ingredient proved or computed exactly
ESTIMATE = "estimate"  # a theorem whose ingredients were measured on samples
MEASURE = "measure"  # a number that a theorem names, its constants hidden in O(·)
STATUSES = (CERTIFIED, ESTIMATE, MEASURE)
HARDLY = 1e-3  # of the trivial bound: an improvement that nobody would call one

Part = Union[Magnitude, torch.Tensor, float, int, str]


@dataclass(frozen=True, repr=False)
class Bound(Result):
    """An upper bound on a quantity of unseen data, with probability at least 1 − δ over the sample.

    quantity: "risk" is F(P, h), "gap" is F(P, h) − F(D, h). status: "certified", "estimate" or "measure".
    trivial: what is known without any theory, C for a risk. parts: every ingredient by name, in the order of the formula; a
    tensor where there is one number per cell or a layer.
    """

    schema = "normscope.bound/1"

    name: str
    value: Magnitude
    quantity: str
    loss: str
    trivial: float
    status: str = CERTIFIED
    parts: Mapping[str, Part] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES or self.status not in STATUSES:
            raise ValueError(f"{self.name}: no quantity {self.quantity!r} with status {self.status!r}")

    @property
    def certified(self) -> bool:
        return self.status == CERTIFIED

    @property
    def vacuous(self) -> bool:
        """Whether it says hardly more than is known without it. A measure has no scale, so it is never called vacuous."""
        return self.status != MEASURE and self.value >= self.trivial * (1 - HARDLY)

    @property
    def verdict(self) -> str:
        if self.status == MEASURE:
            return "to compare by"
        return "vacuous" if self.vacuous else "says something"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a tensor becomes a list, infinity the string "inf"."""
        parts = {name: part.flatten() if isinstance(part, torch.Tensor) else part for name, part in self.parts.items()}
        return {
            **named(self, "schema", "name", "value"),
            "value_log10": plain(self.value.log10),
            **named(self, "quantity", "loss", "trivial", "status", "certified", "vacuous"),
            "parts": plain(parts),
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Bound:
        """The bound that `to_dict` described."""
        value = Magnitude.from_log10(float(content["value_log10"]))
        parts = {name: _tensor(part) if isinstance(part, list) else part for name, part in content["parts"].items()}
        return Bound(
            content["name"], value, content["quantity"], content["loss"], float(content["trivial"]), content["status"], parts,
            tuple(content["assumptions"]),
        )  # fmt: skip

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, part in self.parts.items():
            table.add_row(f"  {name}", shown(part))
        value = f"{self.value}" if self.status == MEASURE else f"{self.quantity} ≤ {self.value}"
        head = f"{self.name}: {value} ({self.loss} loss, {self.status}, {self.verdict})"
        return Group(Text(head), table, *(Text(f"  assumes: {assumption}") for assumption in self.assumptions))


def shown(part: Part) -> str:
    """An ingredient in one line; many numbers by their extremes and their median."""
    if isinstance(part, torch.Tensor):
        if part.numel() == 0:
            return "none"
        values = part.double().flatten()
        low, middle, high = (_number(float(value)) for value in (values.min(), values.median(), values.max()))
        return f"{low} … {middle} … {high} (least, median and largest of {part.numel():,})"
    return _number(part) if isinstance(part, float) else f"{part:,}" if isinstance(part, int) else str(part)


def _number(value: float) -> str:
    return "nan" if math.isnan(value) else str(Magnitude(value)) if value >= 0 else f"-{Magnitude(-value)}"


def _tensor(values: Sequence[float | str | None]) -> torch.Tensor:
    return torch.tensor([number(value) for value in values], dtype=torch.float64)
