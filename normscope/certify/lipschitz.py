"""`ns.lipschitz`: the bracket of a model's Lipschitz constant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from normscope.certify.certifiable import certifiable_graph
from normscope.certify.known import Known
from normscope.certify.lower import Space, lower
from normscope.certify.unbounded import proved_infinite
from normscope.certify.upper import Upper, upper
from normscope.certify.weights import weight_bracket
from normscope.core.bracket import Bracket, Explorer
from normscope.core.data import Call, Data, Example, calls
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, NoConstant, boundary
from normscope.core.magnitude import ZERO
from normscope.core.progress import Progress, shown
from normscope.core.randomness import copied
from normscope.core.region import Region
from normscope.graph.graph import Graph
from normscope.graph.holding import of_one_input

MOST_SEEDS = 64


@earlier(positional=7)
@boundary
def lipschitz(
    model: torch.nn.Module | ExportedProgram,
    example: Example,
    *,
    region: Region | None = None,
    mode: str = "eval",
    output: str | int | None = None,
    data: Data | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    wrt: str = "input",
    progress: Progress = None,
) -> Bracket:
    """Bracket the Lipschitz constant of `model` with respect to its input, in ℓ2, per sample.

    >>> import torch
    >>> bracket = lipschitz(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> bracket.lower <= bracket.upper
    True

    example: a tensor, a tuple of arguments or a dict of keyword arguments, with axis 0 the batch.
    region: a `Ball` or `Box` of inputs; None for all of them.
    mode: "eval"; "train"; or "batch", the whole batch as one input, for models with batch statistics.
    output: name or position of the output to bound, where the model returns several; without it `logits` or `last_hidden_state`.
    data: where the search for the lower bound starts, beside the example.
    effort: how long to search, and how much the upper bound on a region may cost; the bracket's `notes` say what was left out.
    generator: what the search draws from; the same numbers every time if not given.
    wrt: "input", all floating-point inputs together; "input:NAME", that one alone, the others held at the example's first sample;
    or "weights": then the derivative in all parameters together, at the present weights (`.layers` holds the bound of each;
    `weight_sensitivities` says more).

    progress: True for a bar on stderr while the upper bound is made, or a function to call. Ctrl-C during affine forms on a region
    ends them with the best bound so far.

    Infinity comes with evidence that no finite constant exists (certify/unbounded.py). Where there is neither a bound nor such
    evidence, the call is refused with the reason.
    """
    if wrt == "weights":
        if not isinstance(model, torch.nn.Module) or mode != "eval":
            raise InputError('wrt="weights" takes an nn.Module in mode "eval", where statistics of BN are held fixed')
        fresh = copied(generator)
        found = weight_bracket(model, example, region, output, generator)
        if region is None:
            return found

        def on(other: Region) -> Bracket:
            return weight_bracket(model, example, other, output, fresh())

        return replace(found, region=region, explore=Explorer(_unless_changed([*model.parameters()], on)))
    kind, _, name = wrt.partition(":")
    if kind != "input":
        raise InputError(f'wrt must be "input", "input:NAME" or "weights", got {wrt!r}')
    graph, call, known = certifiable_graph(model, example, mode, output), Call.of(example), Known()
    if name:
        graph, call = of_one_input(graph, call, name)
    with shown("bounding", progress) as bar:
        above = upper(graph, bar.report, region, known, effort=effort)
    found = bracket(graph, above, call, region, data, effort, generator, known)
    known.forget()
    _ = found.proved  # refused where no bound is proved
    return found


def bracket(
    graph: Graph,
    above: Upper,
    example: Call,
    region: Region | None = None,
    data: Data | None = None,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
    known: Known | None = None,
) -> Bracket:
    """Both sides of a bracket, given the upper one, or why there is none; no lower one of what is no function of a sample.

    known: what is shared with the brackets of other regions that this one is asked for (`Bracket.explore`).
    """
    found, witness = ZERO, None
    fresh = copied(generator)
    above = proved_infinite(graph, above, seeds(graph, example, None), region)
    if not isinstance(above.refusal, NoConstant):
        searched = graph if region is None else above.graph  # the same function there, with its decisions made
        found, witness = lower(searched, seeds(graph, example, data), effort, generator, region)
    bound = above.bound if above.refusal is None else None

    def again(other: Region) -> Bracket:
        """Whatever the data, a search on a region begins at its middle: so data may be walked once only."""
        beyond = upper(graph, region=other, known=known, effort=effort)
        if beyond.interrupted:
            raise KeyboardInterrupt
        return bracket(graph, beyond, example, other, None, effort, fresh(), known)

    held = [constant.value for node in graph for constant in node.constants]
    known = Known() if known is None else known
    return Bracket(
        found,
        bound,
        witness,
        above.certificate,
        above.certificate.steps,
        (*graph.notes, *above.notes),
        above.excess.shares(found, bound) if above.excess is not None and bound is not None else (),
        region,
        everywhere=region is None,
        explore=None if region is None else Explorer(_unless_changed(held, again), known.forget),
    )


def _unless_changed(held: Sequence[torch.Tensor], again: Callable[[Region], Bracket]) -> Callable[[Region], Bracket]:
    """The bracket of another region, as long as the tensors that it is about, which belong to the model, are what they were."""
    before = _digest(held)

    def checked(region: Region) -> Bracket:
        if _digest(held) != before:
            raise InputError("the model has changed since this bracket was computed: compute it again, then ask")
        return again(region)

    return checked


def _digest(held: Sequence[torch.Tensor]) -> bytes:
    """Of every bit of them, and of their types and shapes."""
    found = hashlib.sha256()
    for value in held:
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().to_dense().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        found.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy())  # one entry may have any stride
    return found.digest()


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
