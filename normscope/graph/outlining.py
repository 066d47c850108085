"""The graph of a model that has shapes but no values (device meta): which operation reads which parameter, and nothing else.

Nothing is compared with the model as it runs, for it cannot run: a graph for names and readers, never for a certificate.
"""

from __future__ import annotations

import torch

from normscope.core.data import Call
from normscope.graph.exporting import export
from normscope.graph.graph import Graph
from normscope.graph.patterns.normalizers import as_centering, as_standardization
from normscope.graph.trace import Conversion, in_one_line


def outline(model: torch.nn.Module, call: Call, output: str | int | None = None) -> Graph:
    """The graph of `model` in eval mode on meta tensors, with hand-written normalizers as one node each."""
    with in_one_line(model):
        graph = Conversion(export(model, call, "eval"), call, "eval", output, ids=not call.floats()).graph()
        for recogniser in (as_centering, as_standardization):
            graph = graph.replace({node: match for node in graph if (match := recogniser(node)) is not None})
        return graph
