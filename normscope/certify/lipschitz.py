"""`ns.lipschitz`: the bracket of a model's Lipschitz constant."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.lower import Space, lower
from normscope.certify.upper import Report, Upper, upper
from normscope.certify.weights import weight_bracket
from normscope.core.bracket import Bracket
from normscope.core.data import Call, Data, Example, calls
from normscope.core.errors import InputError, boundary
from normscope.core.region import Region
from normscope.graph.graph import Graph

MOST_SEEDS = 64


@boundary
def lipschitz(
    model: torch.nn.Module | ExportedProgram,
    example: Example,
    region: Region | None = None,
    mode: str = "eval",
    output: str | int | None = None,
    data: Data | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    wrt: str = "input",
) -> Bracket:
    """Bracket the Lipschitz constant of `model` with respect to its input, in ℓ2, per sample.

    >>> import torch
    >>> bracket = lipschitz(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> bracket.lower <= bracket.upper
    True

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch.
    region: a `Ball` or `Box` of inputs; None for all of them.
    mode: "eval"; "train"; or "batch", the whole batch as one input, for models with batch statistics.
    output: name or position of the output to bound, where the model returns several.
    data: where the search for the lower bound starts, beside the example. effort: how long it searches.
    wrt: "input", or "weights": then the derivative in all parameters together, at the present weights (`.layers` holds the
    bound of each; `weight_sensitivities` says more).
    """
    if wrt == "weights":
        if not isinstance(model, torch.nn.Module) or mode != "eval":
            raise InputError('wrt="weights" takes an nn.Module in mode "eval", where statistics of BN are held fixed')
        return weight_bracket(model, example, region, output, generator)
    if wrt != "input":
        raise InputError(f'wrt is "input" or "weights", not {wrt!r}')
    graph = certifiable_graph(model, example, mode, output)
    return bracket(graph, upper(graph, region=region), Call.of(example), region, data, effort, generator)


def bracket(
    graph: Graph,
    above: Upper,
    example: Call,
    region: Region | None = None,
    data: Data | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
) -> Bracket:
    """Both sides of a bracket, given the upper one."""
    found, witness = lower(graph, seeds(graph, example, data), effort, generator, region)
    return Bracket(found, above.bound, witness, above.certificate, above.certificate.steps, graph.notes)


def seeds(graph: Graph, example: Call, data: Data | None) -> torch.Tensor:
    """(points, d): the samples of the example and the first few of the data."""
    space = Space(graph)
    if graph.whole_batch:
        return space.flat([value[None] for value in example.floats()])
    collected = [space.flat(example.floats())]
    if data is not None:
        for call in calls(data, example):
            collected.append(space.flat(call.floats()))
            if sum(map(len, collected)) >= MOST_SEEDS:
                break
    points = torch.cat([part.to(collected[0].dtype) for part in collected])[:MOST_SEEDS]
    return points[points.isfinite().all(1)] if bool(points.isfinite().all(1).any()) else torch.zeros(1, space.dimension)


__all__ = ["Report", "bracket", "lipschitz", "seeds"]
