"""What `ns.checkpoint` returns: tables of tensors, pairs, attention layers and blocks, and what the rules say about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from normscope._checkpoint.rows import AttentionRow, BlockRow, PairRow, TensorRow
from normscope.core.codec import named
from normscope.core.magnitude import Magnitude
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result

if TYPE_CHECKING:
    from normscope.findings.finding import Findings

SHOWN = 60  # tensors printed: the first and the last; JSON and HTML have all


@dataclass(frozen=True, repr=False)
class CheckpointReport(Result):
    """What a checkpoint holds: tensors with their roles and norms, pairs of γ and weights, findings.

    source: as the user named it. basis: where roles and pairs come from. sample: whether spectral norms are estimates.
    """

    schema: ClassVar[str] = "normscope.checkpoint/1"

    source: str
    format: str
    basis: str
    tensors: tuple[TensorRow, ...]
    pairs: tuple[PairRow, ...]
    attention: tuple[AttentionRow, ...]
    blocks: tuple[BlockRow, ...]
    notes: tuple[str, ...] = ()
    sample: bool = False
    findings: Findings = field(default_factory=lambda: _nothing())

    def with_findings(self, findings: Findings) -> CheckpointReport:
        return replace(self, findings=findings)

    def __getitem__(self, name: str) -> TensorRow:
        """The row of a tensor."""
        return next(row for row in self.tensors if row.name == name)

    @property
    def parameters(self) -> int:
        return sum(math.prod(row.shape) for row in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; docs/checkpoints.md documents every field."""
        parts = ("tensors", "pairs", "attention", "blocks", "notes", "findings")
        return named(self, "schema", "source", "format", "basis", "sample", *parts)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CheckpointReport:
        from normscope.findings.finding import Findings

        return cls(
            content["source"], content["format"], content["basis"],
            tuple(TensorRow.from_dict(_numbers(row)) for row in content["tensors"]),
            tuple(PairRow(**_numbers(row)) for row in content["pairs"]),
            tuple(AttentionRow(**_numbers(row)) for row in content["attention"]),
            tuple(BlockRow(**_numbers(row)) for row in content["blocks"]),
            tuple(content["notes"]), content["sample"], Findings.from_dict(content["findings"]),
        )  # fmt: skip

    def to_html(self, path: str | Path) -> None:
        """One page that needs no network: a summary, the heatmap of layers and quantities, all tables, findings."""
        from normscope.report.checkpoints import checkpoint_report

        Path(path).write_text(checkpoint_report(self), encoding="utf-8")

    def _figures(self) -> dict[str, Callable[..., Any]]:
        from normscope.report.checkpoints import heatmap

        return {"heatmap": lambda: heatmap(self)}

    def render(self) -> RenderableType:
        lines = self.largest()
        return Group(
            Text.of_lines([*self.headline(), ""]), self._table(), *([Text.of_lines(["", *lines])] if lines else []),
            *(Text(f"· {note}") for note in self.notes), self.findings.render(),
        )  # fmt: skip

    def headline(self) -> list[str]:
        """What there is, and what was done with it."""
        stored = ", ".join(sorted({row.dtype for row in self.tensors}))
        size = sum(row.bytes for row in self.tensors)
        proved = sum(row.certified and row.spectral_norm is not None for row in self.tensors)
        how = "spectral norms are estimates" if self.sample else f"{proved} spectral norms proved"
        return [
            f"{self.source}: {len(self.tensors)} tensors, {self.parameters:,} numbers, {size / 1e6:,.1f} MB ({stored})",
            f"{how}; roles and pairs: {self.basis}",
        ]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("tensor", no_wrap=True, overflow="ellipsis", max_width=34)
        table.add_column("role", no_wrap=True, overflow="ellipsis", max_width=12)
        for name in ("shape", "‖W‖", "‖W‖_F", "rank", "largest", "zeros"):
            table.add_column(name, justify="right", no_wrap=True)
        rows = [row for row in self.tensors if row.spectral_norm is not None or row.not_finite]
        left_out = max(0, len(rows) - SHOWN)
        shown = rows if not left_out else [*rows[: SHOWN // 2], *rows[-SHOWN // 2 :]]
        for place, row in enumerate(shown):
            if left_out and place == SHOWN // 2:
                table.add_row(f"… {left_out} more (--json, --html)", *[""] * 7)
            name = row.name if len(row.name) <= 34 else "…" + row.name[-33:]
            table.add_row(
                name, row.role, "×".join(map(str, row.shape)), _shown(row.spectral_norm), _shown(row.frobenius_norm),
                "" if row.stable_rank is None or len(row.shape) < 2 else f"{row.stable_rank:.1f}",
                _shown(row.largest), _percent(row.zeros),
            )  # fmt: skip
        return table

    def largest(self) -> list[str]:
        """The largest logits, pairs and products of a block, and where they are."""
        lines = []
        bounded = [row for row in self.attention if row.bound is not None]
        if bounded:
            worst = max(bounded, key=lambda row: row.bound or 0)
            lines.append(f"attention logits are at most {_shown(worst.bound)} ({worst.layer}; {len(bounded)} layers bounded)")
        paired = [row for row in self.pairs if row.norm is not None]
        if paired:
            top = max(paired, key=lambda row: row.norm or 0)
            lines.append(f"largest ‖W diag γ‖: {_shown(top.norm)} ({top.reader} behind {top.gamma}; {len(paired)} pairs)")
        if self.blocks:
            tallest = max(self.blocks, key=lambda row: row.weights_spectral)
            where = tallest.block or "outside of blocks"
            count = f"{tallest.matrices} {'matrix' if tallest.matrices == 1 else 'matrices'}"
            lines.append(f"largest ∏‖W‖ of a block: 10^{tallest.weights_spectral:z.1f} ({where}, {count})")
        return lines


def _nothing() -> Findings:
    from normscope.findings.finding import Findings

    return Findings((), (), {})


def _shown(value: float | None) -> str:
    return "" if value is None else str(Magnitude(value)) if math.isfinite(value) else str(value)


def _percent(share: float | None) -> str:
    return "" if not share else "<1%" if share < 0.01 else f"{share:.0%}"


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in ("inf", "-inf") and isinstance(value, str) else value for name, value in row.items()}
