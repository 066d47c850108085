"""`ns.audit`: the bracket of a model and the ledger of its layers, in one report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from normscope import ledger as ledgers
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.lipschitz import bracket
from normscope.certify.nearby import Nearby, check_wanted, nearby
from normscope.certify.upper import upper
from normscope.core.bracket import TOO_LOOSE, WORST_INPUT, Bracket
from normscope.core.codec import named, plain
from normscope.core.data import Call, Data, Example, calls_of_graph
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, NoConstant, boundary
from normscope.core.gap_curve import GapCurve, check_above
from normscope.core.magnitude import ZERO, Magnitude, json_number
from normscope.core.progress import Progress, Report, shown
from normscope.core.randomness import copied
from normscope.core.region import Region
from normscope.core.rendering import Group, RenderableType, Table, Text
from normscope.core.result import Result
from normscope.floors import Floor, floor_of
from normscope.graph.graph import Graph
from normscope.ledger import LayerRow

if TYPE_CHECKING:
    from normscope.findings.finding import Findings

WORSE = 2.0  # gain in the worst case against that on the data, from which the difference is told
PRODUCTS = {
    "∏‖W‖": {"weights_spectral": "operators", "weights_matrix": "reshaped", "weights_frobenius": "Frobenius"},
    "∏ gain": {
        "normalizers_tight": "tight", "normalizers_paper": "paper",
        "normalizers_paper_affine": "paper with γ", "normalizers_layer": "1/σ per layer",
    },
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """What a model's constant can be, and which layers make it so.

    statistics: where input variances come from, "data" or "example". notes: what a reader must know beside the numbers.
    local: of an audit of all inputs, the bracket on the ball of `local_radius` around the example's first sample. curve: both
    sides against the radius, if the audit was asked for one (`within=`). floor: of a chain of Linear, BN and activation whose BN
    has the data's statistics, what no weights can bring its product below (docs/open-questions.md).
    """

    schema = "normscope.audit/1"

    model: str
    mode: str
    inputs: tuple[tuple[int, ...], ...]
    bracket: Bracket
    layers: tuple[LayerRow, ...]
    residual: bool
    statistics: str
    notes: tuple[str, ...] = ()
    local: Bracket | None = None
    local_radius: float | None = None
    curve: GapCurve | None = None
    floor: Floor | None = None
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
            **named(self, "schema", "model", "mode", "inputs", "bracket"),
            "local": None if self.local is None else {"radius": self.local_radius, **self.local.to_dict()},
            "curve": plain(self.curve),
            "layers": [_row(row) for row in self.layers],
            **named(self, "products", "floor"),
            "layers_in_products": ledgers.layers_in_products(self.layers),
            **named(self, "residual", "statistics", "notes"),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Audit:
        """The audit that `to_dict` described; without the witness's points and without the model, so that no doctor can look."""
        rows, local, curve = tuple(map(LayerRow.from_dict, content["layers"])), content.get("local"), content.get("curve")
        floor = content.get("floor")
        return Audit(
            model=content["model"],
            mode=content["mode"],
            inputs=tuple(map(tuple, content["inputs"])),
            bracket=Bracket.from_dict(content["bracket"], rows),
            layers=rows,
            residual=content["residual"],
            statistics=content["statistics"],
            notes=tuple(content["notes"]),
            local=None if local is None else Bracket.from_dict(local),
            local_radius=None if local is None else float(local["radius"]),
            curve=None if curve is None else GapCurve.from_dict(curve),
            floor=None if floor is None else Floor.from_dict(floor),
        )

    def to_html(self, path: str | Path) -> None:
        """The report as one page that needs no network: a summary in words, figures, ledger, findings and certificate."""
        from normscope.report.audit_page import audit_report

        Path(path).write_text(audit_report(self), encoding="utf-8")

    def figure(self, name: str | None = None, **options: Any) -> Any:
        if name == "gap" and self.curve is None:
            raise InputError("this audit has no curve: call ns.audit(…, within=2)")
        return super().figure(name, **options)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """depth: how the bracket builds up. graph: layers by their share of log(upper). gap: the curve, if there is one."""
        from normscope.report.audits import depth_profile, model_graph

        drawn: dict[str, Callable[..., Any]] = {"depth": partial(depth_profile, self), "graph": partial(model_graph, self)}
        return drawn if self.curve is None else {**drawn, "gap": self.curve.figure}

    def render(self) -> RenderableType:
        """The report as a rich renderable that fits 100 columns."""
        return Group(self._headline(), self._table(), self._products(), *(Text(f"· {note}") for note in self.notes))

    def _headline(self) -> Text:
        shapes = ", ".join("×".join(map(str, shape)) for shape in self.inputs)
        nearby = self.nearby_lines()
        loose = [self.too_loose] if self.too_loose else []
        overall = [*self.bracket.lines(), *self.bracket.about_gap(), *loose]
        said = [*nearby[:-1], *overall, *nearby[-1:]] if loose else [*overall, *nearby]
        curve = self.curve.lines() if self.curve else []
        return Text.of_lines([f"{self.model} on {shapes}, {self.mode} mode", *said, *curve, ""])

    @property
    def too_loose(self) -> str:
        """What makes a finite bound useless, in words; empty where it is not."""
        if not self.bracket.loose:
            return ""
        shares: dict[str, list[float]] = {}
        for row in self.layers:
            if row.share_of_log_upper:
                shares.setdefault(row.kind, []).append(row.share_of_log_upper)
        said = f"{TOO_LOOSE} (upper/lower = {self.bracket.ratio})"
        if not shares:
            return said
        kind, most = max(shares.items(), key=lambda item: sum(item[1]))
        share = f"{100 * sum(most):.0f}%" if sum(most) < 1 else "all"  # more than all of it where other layers shrink
        many = f"{len(most)} × {kind} {'makes' if len(most) == 1 else 'make'} {share} of log(upper)"
        return f"{said}: {many}{self._worst_case(kind)}"

    def _worst_case(self, kind: str) -> str:
        """How much more normalizers of a kind may multiply in the worst case than they do on the data."""
        places = {row.name: row.gain for row in self.layers if row.kind == kind and row.gain is not None}
        worst = [step.gain for step in self.bracket.certificate.steps if step.operation == kind and step.path in places]
        here = max(filter(None, places.values()), default=ZERO)
        if not worst or not here or max(worst) < WORSE * here:
            return ""
        return f", each up to ×{max(worst)} where an input has no variance, but at most ×{here} on the {self.statistics}"

    def nearby_lines(self) -> list[str]:
        """The bracket around the first sample beside the bound for all inputs, and what the latter is about."""
        if not self.bracket.everywhere or self.bracket.upper is None:
            return []
        if self.local is None or self.local_radius is None:
            return [WORST_INPUT]
        loose = "a bound that is too loose to use" if self.too_loose else f"at most {self.bracket.upper}"
        overall = loose if self.bracket.upper.finite else "no finite bound"
        near = f"around the first input, within {self.local_radius:.3g}: {self.local.lower} ≤ L ≤ {self.local.upper}"
        return [f"{near}; over all inputs {overall}", *self.local.about_gap(), WORST_INPUT]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
        table.add_column("layer", no_wrap=True, overflow="ellipsis", max_width=27)
        table.add_column("kind", no_wrap=True, overflow="ellipsis", max_width=13)
        for name in ("‖W‖", "‖W‖_F", "gain", "paper", "1/σ", "input σ", "share"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.layers:
            name = row.name if len(row.name) <= 27 else "…" + row.name[-26:]
            values = [row.spectral_norm, row.frobenius_norm, row.gain, row.gain_paper, row.gain_layer]
            share = "" if row.share_of_log_upper is None else f"{100 * row.share_of_log_upper:z.1f}%"
            spread = "" if row.input_std is None else str(Magnitude(row.input_std) if math.isfinite(row.input_std) else "nan")
            table.add_row(name, row.kind, *("" if value is None else f"{value}" for value in values), spread, share)
        return table

    def _products(self) -> Text:
        counts, lines = ledgers.layers_in_products(self.layers), [""]
        for title, names in PRODUCTS.items():
            for count in sorted({counts[key] for key in names} - {0}, reverse=True):
                each = [f"{name} 10^{self.products[key]:z.1f}" for key, name in names.items() if counts[key] == count]
                lines.append(f"{title} over {count} layer{'s'[: count > 1]}: {', '.join(each)}")
        if self.floor is not None:
            lines.append(f"  floor: {self.floor}")
        if self.residual:
            lines.append("  (the papers' quantities; in a residual network no such product is a bound)")
        return Text.of_lines(lines)


@earlier(positional=9, report="progress")
@boundary
def audit(
    model: torch.nn.Module | ExportedProgram,
    example: Example,
    *,
    data: Data | None = None,
    region: Region | None = None,
    mode: str = "eval",
    output: str | int | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    progress: Progress = None,
    local: bool | float = True,
    within: float | None = None,
) -> Audit:
    """Bracket a model's Lipschitz constant and say what each layer does to it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> audit(model, torch.zeros(1, 4)).layers[1].kind
    'batch_norm'

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch.
    data: where input variances are measured and the lower bound is searched; the example itself if not given.
    region: a `Ball` or `Box` in which the bracket holds; None for all inputs.
    mode: "eval", "train", or "batch" (the whole batch as one input, for batch statistics).
    output: name or position of the output to bound, where the model returns several.
    effort: how long to search for the lower bound, and how much the upper bound on a region may cost.
    generator: what the search draws from; the same numbers every time if not given.
    progress: True for a bar on stderr, or a callable (what, done, total).
    local: without a region, also bracket the ball around the example's first sample: of this radius; True: of 1e-3 of the sample's
    norm, where affine forms cost little (docs/audit.md states the budget); False: not.
    within: also find the largest radius at which upper ≤ within · lower, and the curve up to it (`Bracket.radius_within`).

    If operations have no rule, there is no upper bound: `bracket.upper` is None and `bracket.certificate.causes` lists them. The
    rest of the audit is still given.
    """
    check_wanted(local)
    if within is not None:
        check_above("within", within, 1)
    with shown("tracing", progress) as meter:
        meter.at("tracing")
        graph, known, fresh = certifiable_graph(model, example, mode, output), Known(), copied(generator)
        above = upper(graph, meter.report, region, known, partial=True, effort=effort)
        call = Call.of(example)
        undefined = isinstance(above.refusal, NoConstant)
        batches: Iterable[Call] = [call] if graph.whole_batch else calls_of_graph(data, call)
        meter.at("searching for the lower bound")
        found = bracket(graph, above, call, region, data, effort, generator, known)
        near = Nearby()
        if region is None:
            meter.at("bracketing the ball around the first sample")
            near = nearby(graph, above, call, local, effort, fresh(), known, within is not None, meter.report)
        curve = None if within is None else _curve(near.bracket or found, within, meter.report)
        known.forget()
        rows = ledgers.ledger(graph, above, () if undefined else batches, found.witness)
        return Audit(
            model=type(model).__name__,
            mode=mode,
            inputs=tuple(node.shape if graph.whole_batch else node.shape[1:] for node in graph.inputs),
            bracket=replace(found, layers=tuple(rows)),
            layers=tuple(rows),
            residual=any(len(link.sources) > 1 for link in above.links),
            statistics="example" if data is None or graph.whole_batch else "data",
            notes=(*_notes(graph, data, undefined), *above.notes, *_without_row(graph), *near.notes),
            local=near.bracket,
            local_radius=None if near.bracket is None else near.radius,
            curve=curve,
            floor=floor_of(graph, rows) if not undefined and data is not None else None,
            examine=partial(_examine, model, example, data, output) if isinstance(model, torch.nn.Module) else None,
        )


def _curve(found: Bracket, within: float, report: Report | None) -> GapCurve | None:
    """None where there is no upper bound on any region."""
    return None if found.upper is None else found.radius_within(within, progress=report)


def _examine(model: torch.nn.Module, example: Example, data: Data | None, output: str | int | None) -> Findings:
    from normscope._doctor.doctor import doctor

    return doctor(model, example, data=data, output=output)


def _notes(graph: Graph, data: Data | None, undefined: bool) -> tuple[str, ...]:
    notes = list(graph.notes)
    if undefined:
        notes.append("what enters a layer is not a function of one sample: there is no lower bound, and no variance of inputs")
    elif data is None:
        notes.append("input variances are those of the example; pass data= for the data's")
    if graph.whole_batch:
        notes.append("the whole batch is one input: the constant is that of the batch, not of a sample")
    return tuple(notes)


def _without_row(graph: Graph) -> list[str]:
    readers: dict[str, list[str]] = {}
    for name, reader in ledgers.weights_without_row(graph).items():
        readers.setdefault(reader, []).append(name)
    read = "; ".join(f"{', '.join(names)} (read by {reader})" for reader, names in readers.items())
    return [f"in no row and no product: {read}"] if read else []


def _row(row: LayerRow) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Magnitude):
            return json_number(float(value)) if -300 < value.log10 < 300 or not value else str(value)
        return json_number(value) if isinstance(value, float) else value

    return {item.name: plain(getattr(row, item.name)) for item in fields(row)}
