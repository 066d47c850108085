"""What `ns.diff` returns: whether two checkpoints or models are the same function, why, and what differs layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from normscope.core.codec import named, number
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result

SHOWN = 30
VERDICTS = {True: "the same function", False: "not the same function", None: "not decided"}


@dataclass(frozen=True)
class DiffRow:
    """One tensor of both.

    same: whether it is the same up to what `how` says. change: ‖ΔW‖_F/‖W‖_F. spectral_change: ‖ΔW‖, an upper bound. rotation: the
    angle between both, in degrees. largest_change: of an entry. Numbers are None where a tensor stands on one side alone.
    """

    name: str
    role: str
    same: bool | None
    how: str
    change: float | None = None
    spectral_change: float | None = None
    rotation: float | None = None
    largest_change: float | None = None
    rank: float | None = None

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> DiffRow:
        values: dict[str, Any] = {name: float(value) if value == "inf" else value for name, value in content.items()}
        return DiffRow(**values)


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """Whether two checkpoints or models are the same function, and where they differ.

    same: True, False, or None where it cannot be decided. mode: what "the same" means here, and what it rests on.

    defect: the largest relative difference that was measured where both are called the same. first: the name of the first
    tensor (or layer) that differs, None where none does.
    """

    schema: ClassVar[str] = "normscope.diff/1"

    same: bool | None
    explanation: str
    rows: tuple[DiffRow, ...]
    first: str | None
    mode: str
    defect: float
    sources: tuple[str, str] = ("A", "B")
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return named(self, "schema", "same", "explanation", "first", "mode", "defect", "sources", "notes", "rows")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Difference:
        return cls(
            content["same"], content["explanation"], tuple(map(DiffRow.from_dict, content["rows"])), content["first"],
            content["mode"], number(content["defect"]), tuple(content["sources"]), tuple(content["notes"]),
        )  # fmt: skip

    def render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("tensor", no_wrap=True, overflow="ellipsis", max_width=40)
        for name in ("‖Δ‖/‖W‖", "‖Δ‖₂", "angle°"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", overflow="fold", ratio=1)
        apart = [row for row in self.rows if not row.same]
        for row in apart[:SHOWN]:
            name = row.name if len(row.name) <= 40 else "…" + row.name[-39:]
            table.add_row(name, _shown(row.change), _shown(row.spectral_change), _shown(row.rotation), row.how)
        more = [Text(f"… and {len(apart) - SHOWN} more (--json)")] if len(apart) > SHOWN else []
        counted = f"{sum(row.same is True for row in self.rows)} of {len(self.rows)} tensors agree"
        lines = [self.explanation, f"basis: {self.mode}; {counted}; largest measured defect {self.defect:.2g}", ""]
        return Group(Text.of_lines(lines), *([table] if apart else []), *more, *(Text(f"· {note}") for note in self.notes))


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
