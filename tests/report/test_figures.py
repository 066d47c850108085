"""Figures of audits and of curvature show the numbers of their results, each with labelled axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.curvature.estimators import Density
from normscope.curvature.slices import Slice
from normscope.report import figures
from normscope.report.theme import decade_ticks, in_scheme, labels, line_style


@pytest.fixture(scope="module")
def audit() -> ns.Audit:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        model[1].running_var.uniform_(0.2, 2.0, generator=generator)
    return ns.audit(model, torch.randn(4, 5, generator=generator), effort=0.2, generator=generator)


def test_the_depth_profile_shows_both_sides_at_every_layer(audit):
    made = figures.depth_profile(audit)
    below, above, bare, whole = made.data
    assert list(above.x) == [row.name for row in audit.layers]
    assert list(above.y) == [row.upper_here.log10 for row in audit.layers]
    assert list(bare.y) == [row.upper_without_gains.log10 for row in audit.layers]
    assert list(below.y) == [row.separation.log10 for row in audit.layers]
    assert list(whole.y) == [audit.bracket.lower.log10, audit.bracket.upper.log10]


def test_the_graph_has_every_layer_and_every_edge(audit):
    arcs, layers = figures.model_graph(audit).data
    assert list(layers.text) == [row.name for row in audit.layers]
    assert sum(x is None for x in arcs.x) == sum(len(row.reads) for row in audit.layers)
    assert np.allclose(layers.marker.color, [100 * row.share_of_log_upper for row in audit.layers])


def test_a_residual_network_has_an_arc_over_what_it_skips():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.c(x + self.b(x))

    arcs, _ = figures.model_graph(ns.audit(Residual(), torch.randn(2, 4), effort=0.1)).data
    assert max(y for y in arcs.y if y is not None) > 0


def density(center: float) -> Density:
    return Density(np.array([center, center + 1]), np.array([0.5, 0.5]), 0.1, ())


def test_densities_share_their_axes():
    made = density(0).figure(quotient=density(5))
    assert [trace.name for trace in made.data] == ["plain", "quotient"] and made.layout.yaxis.type == "log"
    assert np.array_equal(made.data[0].x, made.data[1].x)
    assert len(density(0).figure().data) == 1


def test_a_plane_takes_the_path_of_a_training():
    offsets = np.linspace(-1, 1, 5)
    plane = Slice(("one", "other"), offsets, np.add.outer(offsets**2, offsets**2) + 1e-6)
    path = np.array([[0.5, 0.5], [0.0, 0.0]])
    contours, drawn = figures.loss_slice(plane, path).data
    assert np.array_equal(contours.customdata, plane.losses.T)
    assert np.array_equal(np.stack([drawn.x, drawn.y], 1), path)
    with pytest.raises(ns.InputError, match="lost its objective"):
        plane.figure([{}])


@pytest.mark.parametrize("low, high", [(-500.0, 300.0), (-0.1, 0.1), (2.0, 2.0), (0.31, 0.47)])
def test_ticks_lie_within_the_axis(low, high):
    values, texts = decade_ticks(low, high)
    assert 1 < len(values) == len(texts) <= 10
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)


def test_lines_and_labels_can_be_told_apart():
    styles = [tuple(line_style(position).items()) for position in range(28)]
    assert len(set(styles)) == 28
    assert len(set(labels(["same"] * 5 + ["x" * 100 + end for end in "ab"]))) == 7


def test_text_has_contrast_on_its_page(audit):
    pages = {"light": "#ffffff", "dark": "#0d1117"}
    for scheme, page in pages.items():
        assert contrast(in_scheme(figures.depth_profile(audit), scheme).layout.font.color, page) > 7
        assert contrast(figures.depth_profile(audit).layout.template.layout.font.color, page) > 4


def contrast(one: str, other: str) -> float:
    """The ratio of luminances of WCAG 2."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else math.pow((part + 0.055) / 1.055, 2.4) for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
