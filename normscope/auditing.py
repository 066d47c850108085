"""`ns.audit`: the bracket of a model and the ledger of its layers, in one report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from torch.export import ExportedProgram

from normscope import ledger as ledgers
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.lipschitz import bracket
from normscope.certify.upper import Report, upper
from normscope.core.bracket import Bracket, Certificate, Step
from normscope.core.data import Call, Data, Example, calls_of_graph
from normscope.core.errors import InputError, boundary
from normscope.core.magnitude import Magnitude
from normscope.core.region import Region
from normscope.core.rendering import Rendered, Table, Text
from normscope.graph.graph import Graph
from normscope.ledger import LayerRow

if TYPE_CHECKING:
    from normscope.checkup.finding import Findings

SCHEMA = "normscope.audit/1"


@dataclass(frozen=True)
class Audit(Rendered):
    """What a model's constant can be, and which layers make it so.

    statistics: where input variances come from, "data" or "example". notes: what a reader must know beside the numbers.
    """

    model: str
    mode: str
    inputs: tuple[tuple[int, ...], ...]
    bracket: Bracket
    layers: tuple[LayerRow, ...]
    residual: bool
    statistics: str
    notes: tuple[str, ...] = ()
    examine: Callable[[], Findings] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def findings(self) -> Findings:
        """What the doctor says about the model, examined when first asked."""
        if self.examine is None:
            raise InputError(
                "this audit is of an exported program, or read from a file: there are no modules for the doctor to examine"
            )
        return self.examine()

    @cached_property
    def products(self) -> dict[str, float]:
        """log10 of the product over layers of each quantity; the papers' numbers, not bounds of a residual network."""
        return ledgers.products(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The audit as plain JSON values; docs/audit.md documents every field."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "mode": self.mode,
            "inputs": [list(shape) for shape in self.inputs],
            "bracket": {
                "lower_log10": _number(self.bracket.lower.log10),
                "upper_log10": _number(self.bracket.upper.log10),
                "certified": True,
                "reason": self.bracket.reason,
                "rounding": self.bracket.certificate.rounding,
                "notes": list(self.bracket.notes),
                "certificate": [
                    {**asdict(step), "gain": None, "gain_log10": _number(step.gain.log10)}
                    for step in self.bracket.certificate.steps
                ],
            },
            "layers": [_row(row) for row in self.layers],
            "products": {name: _number(value) for name, value in self.products.items()},
            "residual": self.residual,
            "statistics": self.statistics,
            "notes": list(self.notes),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Audit:
        """The audit that `to_dict` described; without the witness's points and without the model, so that no doctor can look."""
        found, rows = content["bracket"], tuple(map(LayerRow.from_dict, content["layers"]))
        lower, upper = (Magnitude.from_log10(float(found[side])) for side in ("lower_log10", "upper_log10"))
        if lower > upper:
            raise InputError(f"its lower bound {lower} exceeds its upper bound {upper}")
        steps = tuple(
            Step(step["name"], step["path"], step["operation"], Magnitude.from_log10(float(step["gain_log10"])), step["method"])
            for step in found["certificate"]
        )
        return Audit(
            model=content["model"],
            mode=content["mode"],
            inputs=tuple(map(tuple, content["inputs"])),
            bracket=Bracket(
                lower, upper, None, Certificate(steps, found["reason"], found["rounding"]), rows, tuple(found.get("notes", ()))
            ),
            layers=rows,
            residual=content["residual"],
            statistics=content["statistics"],
            notes=tuple(content["notes"]),
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The audit as JSON text, infinity as the string "inf"; written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def to_html(self, path: str | Path) -> None:
        """The report as one page that needs no network: a summary in words, figures, ledger, findings and certificate."""
        from normscope.report.audit_page import audit_report

        Path(path).write_text(audit_report(self), encoding="utf-8")

    def figure(self, name: str = "depth") -> Any:
        """A Plotly figure: "depth", how the bracket builds up, or "graph", the layers by their share of log(upper)."""
        from normscope.report.audits import depth_profile, model_graph

        drawn = {"depth": depth_profile, "graph": model_graph}
        if name not in drawn:
            raise InputError(f"no figure {name!r}: choose from {', '.join(drawn)}")
        return drawn[name](self)

    def render(self) -> RenderableType:
        """The report as a rich renderable that fits 100 columns."""
        return Group(self._headline(), self._table(), self._products(), *(Text(f"· {note}") for note in self.notes))

    def _headline(self) -> Text:
        shapes = ", ".join("×".join(map(str, shape)) for shape in self.inputs)
        lines = [
            f"{self.model} on {shapes}, {self.mode} mode",
            f"Lipschitz constant (ℓ2): {self.bracket.lower} ≤ L ≤ {self.bracket.upper}   upper certified, lower witnessed",
        ]
        if self.bracket.reason:
            lines.append(f"infinite because: {self.bracket.reason}")
        return Text.of_lines([*lines, ""])

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("layer", no_wrap=True, overflow="ellipsis", max_width=27)
        table.add_column("kind", no_wrap=True, overflow="ellipsis", max_width=13)
        for name in ("‖W‖", "‖W‖_F", "gain", "paper", "1/σ", "input σ", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.layers:
            name = row.name if len(row.name) <= 27 else "…" + row.name[-26:]
            values = [row.spectral_norm, row.frobenius_norm, row.gain, row.gain_paper, row.gain_layer]
            share = "" if row.share_of_log_upper is None else f"{100 * row.share_of_log_upper:.1f}%"
            spread = "" if row.input_std is None else str(Magnitude(row.input_std) if math.isfinite(row.input_std) else "nan")
            table.add_row(name, row.kind, *("" if value is None else f"{value}" for value in values), spread, share)
        return table

    def _products(self) -> Text:
        names = {
            "weights_spectral": "∏‖W‖ (operators)", "weights_matrix": "∏‖W‖ (reshaped)", "weights_frobenius": "∏‖W‖_F",
            "normalizers_tight": "∏ gain, tight", "normalizers_paper": "∏ gain, paper",
            "normalizers_paper_affine": "∏ gain, paper with γ", "normalizers_layer": "∏ 1/σ a layer",
        }  # fmt: skip
        shown = [f"{names[key]} = 10^{value:+.1f}" for key, value in self.products.items()]
        lines = ["", "products over layers:"]
        for start in range(0, len(shown), 3):
            lines.append("  " + "".join(f"{item:<32}" for item in shown[start : start + 3]).rstrip())
        if self.residual:
            lines.append("  (the papers' quantities; in a residual network no such product is a bound)")
        return Text.of_lines(lines)


@boundary
def audit(
    model: torch.nn.Module | ExportedProgram,
    example: Example,
    data: Data | None = None,
    region: Region | None = None,
    mode: str = "eval",
    output: str | int | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    report: Report | None = None,
) -> Audit:
    """Bracket a model's Lipschitz constant and say what each layer does to it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> audit(model, torch.zeros(1, 4)).layers[1].kind
    'batch_norm'

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch.
    data: where input variances are measured and the lower bound is searched; the example itself if not given.
    region: a `Ball` or `Box` in which the bracket shall hold; None for all inputs.
    mode: "eval", "train", or "batch" (the whole batch as one input, for batch statistics).
    """
    graph = certifiable_graph(model, example, mode, output)
    above = upper(graph, report, region)
    call = Call.of(example)
    batches: Iterable[Call] = [call] if graph.whole_batch else calls_of_graph(data, call)
    if report is not None:
        report("searching for the lower bound", 0, 1)
    found = bracket(graph, above, call, region, data, effort, generator)
    rows = ledgers.ledger(graph, above, batches, found.witness)
    return Audit(
        model=type(model).__name__,
        mode=mode,
        inputs=tuple(node.shape if graph.whole_batch else node.shape[1:] for node in graph.inputs),
        bracket=replace(found, layers=tuple(rows)),
        layers=tuple(rows),
        residual=any(len(link.sources) > 1 for link in above.links),
        statistics="example" if data is None or graph.whole_batch else "data",
        notes=_notes(graph, data),
        examine=partial(_examine, model, example, data, output) if isinstance(model, torch.nn.Module) else None,
    )


def _examine(model: torch.nn.Module, example: Example, data: Data | None, output: str | int | None) -> Findings:
    from normscope.checkup.doctor import doctor

    return doctor(model, example, data=data, output=output)


def _notes(graph: Graph, data: Data | None) -> tuple[str, ...]:
    notes = list(graph.notes)
    if data is None:
        notes.append("input variances are those of the example; pass data= for the data's")
    if graph.whole_batch:
        notes.append("the whole batch is one input: the constant is that of the batch, not of a sample")
    return tuple(notes)


def _row(row: LayerRow) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Magnitude):
            return _number(float(value)) if -300 < value.log10 < 300 or not value else str(value)
        return _number(value) if isinstance(value, float) else value

    return {item.name: plain(getattr(row, item.name)) for item in fields(row)}


def _number(value: float) -> float | str | None:
    """A JSON number, or "inf", "-inf" and None where JSON has none."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
