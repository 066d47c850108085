"""The page of a checkpoint: a summary in words, layers × quantities as a heatmap, and every table."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from normscope.report.audit_page import findings_table
from normscope.report.html import Drawing, Page, number, section, words
from normscope.report.markup import Markup, element, table
from normscope.report.theme import SEQUENTIAL, figure, label

if TYPE_CHECKING:
    from normscope._checkpoint.report import CheckpointReport

SECTIONS = (
    ("summary", "Summary"), ("heatmap", "Layers and quantities"), ("findings", "Findings"), ("tensors", "Tensors"),
    ("pairs", "Pairs"), ("attention", "Attention"),
)  # fmt: skip
NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.*)$")
CAPTION = "log10 of the spectral norm; one row per block, one column per kind of tensor. "
MOST_COLUMNS = 40


def checkpoint_report(report: CheckpointReport) -> str:
    """The page as HTML text."""
    page = Page()
    numbers = _by_block(report)
    drawn = [page.draw(Drawing("Spectral norms by block", heatmap(report), CAPTION, _heat_table(report)))] if numbers[0] else []
    summary = [*report.headline(), *report.largest(), *report.notes]
    body = [
        section("summary", "Summary", element("ul", *(element("li", line) for line in summary))),
        section("heatmap", "Layers and quantities", drawn or element("p", "There are no numbered blocks.")),
        section("findings", "Findings", findings_table(report.findings)),
        section("tensors", "Tensors", _tensors(report)),
        section("pairs", "Pairs", _pairs(report)),
        section("attention", "Attention", _attention(report)),
    ]
    return page.render(f"Checkpoint {report.source}", *body, sections=SECTIONS)


def heatmap(report: CheckpointReport) -> go.Figure:
    """Blocks × kinds of tensor, log10 of the spectral norm."""
    rows, columns, values = _by_block(report)
    made = figure(
        go.Heatmap(
            z=values, x=[label(name) for name in columns], y=[label(name) for name in rows], colorscale=SEQUENTIAL,
            colorbar={"title": {"text": "log10 ‖W‖"}}, hovertemplate="%{y} %{x}: 10^%{z:.2f}<extra></extra>",
        ),
        title="Spectral norms by block", x="tensor", y="block",
    )  # fmt: skip
    return made.update_layout(
        height=max(320, 90 + 18 * len(rows)), yaxis={"type": "category", "autorange": "reversed"}, showlegend=False
    )


def _by_block(report: CheckpointReport) -> tuple[list[str], list[str], list[list[float | None]]]:
    found: dict[str, dict[str, float]] = {}
    for row in report.tensors:
        place = NUMBERED.match(row.name)
        if place and row.spectral_norm:
            found.setdefault(f"{place[1]}.{place[2]}", {})[place[3]] = math.log10(row.spectral_norm)
    columns = list(dict.fromkeys(name for own in found.values() for name in own))[:MOST_COLUMNS]
    return list(found), columns, [[own.get(name) for name in columns] for own in found.values()]


def _heat_table(report: CheckpointReport) -> Markup:
    rows, columns, values = _by_block(report)
    return table(["block", *columns], ([name, *map(number, own)] for name, own in zip(rows, values, strict=True)), "log10 ‖W‖")


def _tensors(report: CheckpointReport) -> Markup:
    head = [
        "tensor",
        "role",
        "shape",
        "type",
        "‖W‖",
        "‖W‖_F",
        "stable rank",
        "largest",
        "zeros",
        "ones",
        "not finite",
        "why this role",
    ]
    norm = "estimate" if report.sample else "proved"
    return table(
        head,
        (
            [row.name, row.role, "×".join(map(str, row.shape)), row.dtype, number(row.spectral_norm), number(row.frobenius_norm),
             number(row.stable_rank), number(row.largest), number(row.zeros), number(row.ones), number(row.not_finite),
             words(row.rule)]
            for row in report.tensors
        ),
        f"All tensors; ‖W‖ is {norm}",
    )  # fmt: skip


def _pairs(report: CheckpointReport) -> Markup:
    convention = {True: "1 + w", False: "w", None: "unknown"}
    return table(
        ["γ", "read by", "‖W diag γ‖", "γ is", "nothing else reads it", "known from"],
        (
            [row.gamma, row.reader, number(row.norm), convention[row.plus_one], "yes" if row.complete else "no", words(row.rule)]
            for row in report.pairs
        ),
        "Pairs of γ and weights",
    )


def _attention(report: CheckpointReport) -> Markup:
    return table(
        ["layer", "largest logit", "heads", "heads of keys", "basis"],
        ([row.layer, number(row.bound), str(row.heads), str(row.key_heads), words(row.basis)] for row in report.attention),
        "Bounds on attention logits",
    )
