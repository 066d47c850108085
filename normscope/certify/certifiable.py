"""Graphs whose constant is well defined: samples apart from each other, weights finite."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram

from normscope.core.data import Example
from normscope.graph.graph import Graph, check_finite
from normscope.graph.samples import check_samples_independent
from normscope.graph.trace import trace
from normscope.rules.readings import Normalizer, Random
from normscope.rules.registry import registry


def certifiable_graph(model: torch.nn.Module | ExportedProgram, example: Example, mode: str, output: str | int | None) -> Graph:
    """The graph of a model whose constant per sample (or per batch) is well defined, with finite weights."""
    graph = trace(model, example, mode, output)
    check_finite(graph)
    notes: list[str] = []
    if len(graph.inputs) > 1:
        names = ", ".join(node.name for node in graph.inputs)
        notes.append(f'the constant is with respect to {names} together; wrt="input:NAME" takes one')
    if mode != "batch" and not _refused_by_rules(graph):
        note = check_samples_independent(model, example, mode, output)
        notes += [] if note is None else [note]
    return replace(graph, notes=(*graph.notes, *notes))


def _refused_by_rules(graph: Graph) -> bool:
    """Whether a BN reads the batch or a node is random: rules refuse with better advice than the probe for mixed samples."""
    return any(
        isinstance(reading, Random) or (isinstance(reading, Normalizer) and reading.kind == "batch" and not reading.fixed)
        for reading in map(registry.reading, graph)
    )
