"""The report of a run, or of several side by side: a summary in words, figures, the layers, findings, settings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normscope._watch.columns import PRODUCTS
from normscope.report import summary as summaries
from normscope.report import thinning
from normscope.report.html import Drawing, Page, columns, number, section, titled, words
from normscope.report.markup import Child, Markup, element, table
from normscope.report.quantities import quantity
from normscope.report.results import Shown, anchors, headlines, result_sections
from normscope.report.runs import HEATMAPS, ColourScale, heatmap, norm_angle, products, series
from normscope.report.snapshot import Snapshot
from normscope.report.summary import MOST_OUTLIERS, Summary, extent, summarize

CELLS, FEWEST_COLUMNS = 30_000, 40  # layers × buckets of a heatmap in a file of a few megabytes, and buckets at least
DECADES = "Decades: 3 is a factor of 1000, −3 a thousandth."
SERIES = {
    "loss": "As the training loop gave it.",
    "accuracy": "As the training loop gave it.",
    "learning_rate": "Of the first group of parameters.",
    "sharpness": "The largest eigenvalue of the Hessian on a fixed batch.",
    "gradient_predictiveness": "How much the gradient changes along a step, on a fixed batch: the smaller, the better.",
    "jacobian_norm": "How much the output moves with the input, on a fixed batch.",
}
CAPTIONS = {
    "spectral_norm": "Each row is a weight. A row that brightens is a weight whose norm grows; crosses are findings.",
    "input_variance": "Each row is a normalizer or activation: what it divides by or is fed. Dark is collapse, bright explosion.",
    "gradient_norm": "Each row is a weight or a γ. Bright is explosion, dark is vanishing.",
    "effective_lr": "Each row is a scale-free weight: how fast it really turns. Dark is a layer that is freezing.",
}
LEDGER = (
    "spectral_norm",
    "frobenius_norm",
    "gain_tight",
    "input_variance",
    "gradient_norm",
    "update_ratio",
    "angle",
    "effective_lr",
)
COLUMNS = tuple(dict.fromkeys([*summaries.COLUMNS, *LEDGER, *SERIES, *PRODUCTS]))  # what is read
SECTIONS = (
    ("summary", "Summary"), ("layers", "Layers over time"), ("time", "Over time"), ("ledger", "Ledger"),
    ("findings", "Findings"), ("settings", "Settings and versions"),
)  # fmt: skip


def run_report(runs: Sequence[Snapshot], results: Sequence[Shown] = ()) -> str:
    """The report as HTML text; results follow what is of the runs."""
    names = distinct_names([run.path for run in runs])
    told = [summarize(run, steps=run.life.step) for run in runs]
    page = Page()
    together = list(zip(names, runs, told, strict=True))
    cards = element("div", [_verdict(name, run, summary, len(runs) > 1) for name, run, summary in together], class_="cards")
    body = [
        section("summary", "Summary", cards, _comparison(together) if len(runs) > 1 else None, headlines(results)),
        section("layers", "Layers over time", [_heatmaps(page, metric, names, runs) for metric in HEATMAPS]),
        section("time", "Over time", [page.draw(drawing) for drawing in _lines(names, runs)]),
        section("ledger", "Ledger: every layer at the last step", [_ledger(name, run) for name, run, _ in together]),
        section("findings", "Findings", [_findings(name, run) for name, run, _ in together]),
        section("settings", "Settings and versions", [_settings(name, run) for name, run, _ in together]),
        *result_sections(page, results),
    ]
    title = f"Run {names[0]}" if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return page.render(title, *body, sections=[*SECTIONS, *anchors(results)])


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart.

    >>> distinct_names([Path("a/run"), Path("b/run")])
    ['a/run', 'b/run']
    """
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(("/".join(own[-1:]) for own in parts), start=1)]


# words ---------------------------------------------------------------------------------------------------------------


def _verdict(name: str, run: Snapshot, summary: Summary, named: bool) -> Markup:
    """What is not fine, what to do, what is fine."""
    wrong, past = (
        [[element("code", problem.name), f" at {problem}"] for problem in summary.problems if problem.now == now]
        for now in (True, False)
    )
    remedies = list(dict.fromkeys(f"{problem.where}: {problem.fix}" for problem in summary.problems if problem.fix))
    return element(
        "article",
        element("h3", name) if named else None,
        element("p", summary.headline, class_="headline"),
        element("p", extent(run, summary), class_="soft"),
        element(
            "div",
            titled("What could not be read", list(run.notes), "wrong"),
            titled("What is not fine", wrong, "wrong"),
            titled("What was not fine and is over", past, "wrong"),
            titled("What to do", remedies, "todo"),
            titled("What stands out at the last step", list(map(str, summary.outliers[:MOST_OUTLIERS])), "apart"),
            titled("What is fine", list(summary.fine), "right", fold=True),
            titled("What was not judged", list(summary.not_judged), "notes", fold=True),
            class_="lists",
        ),
        class_=f"verdict{' bad' if summary.problems else ''}",
    )


def _comparison(together: Sequence[tuple[str, Snapshot, Summary]]) -> Markup:
    shown = ("loss", "accuracy", *PRODUCTS)
    rows: list[list[Child]] = [["layer to look at first", *(summary.worst_layer or "none" for _, _, summary in together)]]
    rows.append(["findings", *(str(len(run.findings)) for _, run, _ in together)])
    for column in shown:
        values = [run.arrays(column)[column] for _, run, _ in together]
        if any(np.isfinite(own).any() for own in values):
            rows.append([f"{quantity(column).axis}, last", *(number(_last(own)) for own in values)])
    return table(["value", *(name for name, _, _ in together)], rows, "The runs side by side")


# figures -------------------------------------------------------------------------------------------------------------


def _heatmaps(page: Page, metric: str, names: Sequence[str], runs: Sequence[Snapshot]) -> Markup:
    scale = ColourScale.shared(runs, metric) if len(runs) > 1 else None
    buckets = CELLS // max(1, sum(len(run.layers) for run in runs))
    drawn = []
    for name, run in zip(names, runs, strict=True):
        title = quantity(metric).axis + (f": {name}" if len(runs) > 1 else "")
        numbers = _layers_table(run, metric, f"{title}, by layer")
        made = heatmap(run, metric, scale=scale, columns=min(thinning.COLUMNS, max(FEWEST_COLUMNS, buckets)))
        drawn.append(page.draw(Drawing(title, made, CAPTIONS[metric], numbers)))
    return columns(drawn)


def _lines(names: Sequence[str], runs: Sequence[Snapshot]) -> list[Drawing]:
    recorded = [column for column in SERIES if any(np.isfinite(run.arrays(column)[column]).any() for run in runs)]
    drawn = [_line(column, names, runs) for column in recorded]
    if len(runs) > 1:
        return drawn + [_line(column, names, runs) for column in PRODUCTS]
    caption = f"The weights' norms, and the normalizers' gains by each definition. {DECADES}"
    numbers = _numbers_table({quantity(name).title: _one(runs[0], name) for name in PRODUCTS}, "Products over depth, log10")
    turning = "Where a path comes to rest, weight decay and growth of the norm balance. The large dot is the end."
    angles = _layers_table(runs[0], "angle", "Rotation per step, by layer [rad]")
    return [
        *drawn,
        Drawing("Products over depth [log10]", products(runs[0]), caption, numbers),
        Drawing("Norm and rotation of scale-free weights", norm_angle(runs[0]), turning, angles),
    ]


def _line(column: str, names: Sequence[str], runs: Sequence[Snapshot]) -> Drawing:
    title = quantity(column).axis
    numbers = _numbers_table({name: _one(run, column) for name, run in zip(names, runs, strict=True)}, f"{title}, by run")
    return Drawing(title, series(runs, column, names=names), SERIES.get(column, DECADES), numbers)


# tables --------------------------------------------------------------------------------------------------------------


def _one(run: Snapshot, column: str) -> tuple[np.ndarray, np.ndarray]:
    arrays = run.arrays(column)
    return arrays["step"], arrays[column]


def _layers_table(run: Snapshot, metric: str, caption: str) -> Markup:
    steps, values = _one(run, metric)
    named = zip((layer["name"] for layer in run.layers), values.T, strict=True)
    return _numbers_table({name: (steps, own) for name, own in named if np.isfinite(own).any()}, caption)


def _numbers_table(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], caption: str) -> Markup:
    """First, least, greatest and last value of every line, with the steps of the two in the middle."""
    rows = [[name, *_extremes(steps, values)] for name, (steps, values) in lines.items()]
    return table(["name", "first", "least", "at step", "greatest", "at step", "last"], rows, caption)


def _extremes(steps: np.ndarray, values: np.ndarray) -> list[str]:
    seen = ~np.isnan(values)
    if not seen.any():
        return ["–"] * 6
    steps, values = steps[seen], values[seen]
    least, greatest = int(values.argmin()), int(values.argmax())
    ends = number(float(values[0])), number(float(values[-1]))
    middle = [cell for place in (least, greatest) for cell in (number(float(values[place])), f"{int(steps[place]):,}")]
    return [ends[0], *middle, ends[1]]


def _last(values: np.ndarray) -> float | None:
    seen = values[~np.isnan(values)]
    return float(seen[-1]) if len(seen) else None


def _ledger(name: str, run: Snapshot) -> Markup:
    values = run.arrays(*LEDGER)
    last = {metric: values[metric][-1] for metric in LEDGER}
    rows = [
        [layer["name"], str(layer.get("kind", "")), *(number(float(last[metric][index])) for metric in LEDGER)]
        for index, layer in enumerate(run.layers)
    ]
    step = int(values["step"][-1])
    return table(["layer", "kind", *(quantity(metric).axis for metric in LEDGER)], rows, f"{name} at step {step:,}")


def _findings(name: str, run: Snapshot) -> Child:
    rows: list[list[Child]] = [
        [" ".join(dict.fromkeys([finding.rule, finding.name])), finding.when, finding.where or "the whole network",
         words(finding.message), words(finding.fix), words(json.dumps(finding.evidence, ensure_ascii=False, default=str))]
        for finding in run.findings
    ]  # fmt: skip
    notes = [event for event in run.events if event["kind"] in ("note", "error")]
    said = [f"{event['kind']}: {event.get('message', json.dumps(event, default=str))}" for event in notes]
    found = (
        table(["rule", "when", "layer", "what", "what to try", "evidence"], rows, f"{name}: {len(rows)} findings") if rows else None
    )
    nothing = element("p", f"{name}: no early warning was written.") if not rows else None
    return [nothing, found, titled(f"{name}: what the recorder noted", said, "notes")]


def _said(event: Mapping[Any, Any], key: str) -> Markup:
    value = event.get(key, "")
    return words(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _settings(name: str, run: Snapshot) -> Markup:
    manifest = run.manifest
    try:
        begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest["created"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):  # no time, or none that a calendar has
        begun = "unknown"
    known = {key: manifest[key] for key in ("model", "optimizer", "config", "process", "versions") if key in manifest}
    rows: list[list[Child]] = [["begun", begun], ["directory", run.path.name]]
    rows += [[key, _said(known, key)] for key in known]
    return table(["setting", "value"], rows, f"{name}: settings")
