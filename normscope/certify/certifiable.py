"""Graphs whose constant is well defined: samples apart from each other, weights finite."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram

from normscope.core.data import Example
from normscope.graph.graph import Graph, Node, check_finite
from normscope.graph.samples import check_samples_independent
from normscope.graph.trace import trace


def certifiable_graph(model: torch.nn.Module | ExportedProgram, example: Example, mode: str, output: str | int | None) -> Graph:
    """The graph of a model whose constant per sample (or per batch) is well defined, with finite weights."""
    graph = trace(model, example, mode, output)
    check_finite(graph)
    if mode != "batch" and not _refused_by_rules(graph):
        note = check_samples_independent(model, example, mode, output)
        graph = graph if note is None else replace(graph, notes=(*graph.notes, note))
    return graph


def _refused_by_rules(graph: Graph) -> bool:
    """Whether a BN reads the batch or a node is random: rules refuse with better advice than the probe for mixed samples."""
    return any(is_random(node) or (node.op == "batch_norm" and (node.args[5] or node.args[4] is None)) for node in graph)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, as dropout in train mode does."""
    return "dropout" in node.op or (node.op == "rrelu" and bool(node.args[3]))
