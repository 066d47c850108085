"""Figures of a run: what they show is what was recorded, whatever the layers are called."""

from __future__ import annotations

import json

import numpy as np
import pytest

import normscope as ns
from normscope._watch.columns import METRICS, PRODUCTS, SCALARS
from normscope.report.quantities import QUANTITIES, quantity
from normscope.report.runs import HEATMAPS, ColourScale, heatmap, layer_series, products, run_figure, series
from tests.report.recordings import write_run

NAMES = ["stem", "block.0.linear", "block.1.linear", "head"]
FINDING = {
    "rule": "exploding-gradient",
    "step": 20,
    "layer": "block.1.linear",
    "evidence": {},
    "message": "the gradient is large",
    "fix": "clip",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ns.Run:
    return ns.load_run(write_run(tmp_path_factory.mktemp("runs") / "one", 40, NAMES, finding=FINDING))


def test_every_column_has_a_title_and_a_figure(run):
    assert set(QUANTITIES) == {*METRICS, *(name for name in SCALARS if not name.endswith("_trend"))}
    for name in ("products", "norm_angle", *METRICS, *SCALARS):
        made = run.figure(name)
        json.loads(made.to_json())
        assert made.layout.xaxis.title.text and (made.layout.yaxis.title.text or made.layout.yaxis.type == "category")
    with pytest.raises(ns.InputError, match="no figure 'nothing': choose from products"):
        run_figure(run, "nothing")


@pytest.mark.parametrize("metric", HEATMAPS)
def test_a_heatmap_shows_what_was_recorded(run, metric):
    cells = heatmap(run, metric).data[0]
    recorded = run.arrays(metric)
    assert list(cells.y) == NAMES
    assert np.array_equal(np.array(cells.customdata), recorded[metric].T)
    assert np.array_equal(np.array(cells.hovertext)[0], recorded["step"])


def test_findings_are_marked_where_they_are(run):
    marks = heatmap(run, "gradient_norm").data[1]
    assert (list(marks.x), list(marks.y)) == ([20], ["block.1.linear"])
    assert len(heatmap(run, "gradient_norm", between=(25, 30)).data) == 1


def test_only_the_layers_and_steps_asked_for(run):
    cells = heatmap(run, "gradient_norm", layers=[1, 3], between=(10, 19)).data[0]
    assert list(cells.y) == ["block.0.linear", "head"]
    assert min(cells.x) == 9 and max(cells.x) == 19  # one more row on the left, so that the picture has no gap there


def test_lines_are_named_and_compared(run):
    assert [line.name for line in series([run, run], "loss").data] == ["one", "one"]
    assert [line.name for line in layer_series(run, "angle", [0, 2]).data] == ["stem", "block.1.linear"]
    assert [line.name for line in products(run).data] == [quantity(name).title for name in PRODUCTS]


@pytest.mark.parametrize("low, high, logarithmic", [(1e-9, 1e3, True), (0.5, 2.0, False), (0.0, 0.0, False)])
def test_scales_are_logarithmic_where_values_span_decades(low, high, logarithmic):
    scale = ColourScale.of(np.array([low, high, np.nan, np.inf]))
    assert scale.logarithmic is logarithmic and scale.low < scale.high
    assert np.isfinite(scale.place(np.array([0.0, low, high, np.inf]))).all()


def test_names_are_text_not_markup(tmp_path):
    hostile = [
        "<b>bold</b>",
        "<a href='https://example.com'>x</a>",
        "%{x}",
        "</script><script>alert(1)</script>",
        "x" * 500,
        "x" * 500,
    ]
    run = ns.load_run(write_run(tmp_path / "hostile", 10, hostile, finding={**FINDING, "layer": hostile[0], "message": "<i>m</i>"}))
    for name in (*HEATMAPS, "norm_angle", "products"):
        text = run.figure(name).to_json()
        assert "<a href" not in text and "<script" not in text and "<i>" not in text
    shown = list(run.figure("gradient_norm").data[0].y)
    assert len(set(shown)) == len(hostile) and shown[0] == "&lt;b&gt;bold&lt;/b&gt;"


def test_a_run_without_what_is_asked_for_says_so(tmp_path):
    run = ns.load_run(write_run(tmp_path / "bare", 3, []))
    assert "no layer has spectral norm" in run.figure("spectral_norm").layout.annotations[0].text
    assert "no scale-free weight" in run.figure("norm_angle").layout.annotations[0].text
