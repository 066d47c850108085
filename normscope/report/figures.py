"""Every figure, each a function of a result: what notebooks, reports and the dashboard show alike."""

from normscope.report.audits import depth_profile, model_graph
from normscope.report.curvature import densities, landscape, loss_slice
from normscope.report.runs import heatmap, layer_series, norm_angle, products, run_figure, series

__all__ = [
    "densities", "depth_profile", "heatmap", "landscape", "layer_series", "loss_slice", "model_graph", "norm_angle", "products",
    "run_figure", "series",
]  # fmt: skip
