"""Every figure, each a function of a result: what notebooks, reports and the dashboard show alike."""

from normscope.report.audits import certificate_gap, depth_profile, model_graph
from normscope.report.bounds import bound_comparison, bounds_against_gaps, flatness_curves, margin_histogram
from normscope.report.curvature import densities, eigenvalues, landscape, loss_slice
from normscope.report.plots import plot
from normscope.report.runs import heatmap, layer_series, norm_angle, products, run_figure, series

__all__ = [
    "bound_comparison", "bounds_against_gaps", "certificate_gap", "densities", "depth_profile", "eigenvalues", "flatness_curves",
    "heatmap", "landscape", "layer_series", "loss_slice", "margin_histogram", "model_graph", "norm_angle", "plot", "products",
    "run_figure", "series",
]  # fmt: skip
