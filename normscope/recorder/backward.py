"""What the autograd graph of a backward pass that is under way says of each weight. Nothing is run: the graph is only followed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from normscope.recorder.scales import ACTIVATIONS, CONSTANT, Scale, factors, kind_of, normalized, scale_of

AutogradNode = Any  # torch.autograd.graph.Node, which its annotations make abstract
LEAF = "torch::autograd::AccumulateGrad"
DIVIDING = frozenset({"Sqrt", "Rsqrt", "LinalgVectorNorm", "Std", "Var"})  # what a normalizer written by hand holds


@dataclass(frozen=True)
class Span:
    """One call of a module: the node of what entered it, None where that needs no gradient, and of what left it."""

    path: str
    entered: AutogradNode
    left: AutogradNode


@dataclass
class Spans:
    """The calls of a forward pass: of normalizers, of activations, and of modules of the user's own that have no children."""

    normalizers: list[Span] = field(default_factory=list)
    activations: list[Span] = field(default_factory=list)
    others: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Verdicts:
    """scale_free: weight → whether the loss ignores its scale, None where that cannot be told; absent if it was not met.

    followed_by: weight → module path of the normalizer that ends its scale. functions: activations that no module calls.
    activating, dividing: modules of the user's own that compute an activation, or divide by a root as a normalizer does.
    """

    scale_free: Mapping[str, bool | None] = field(default_factory=dict)
    followed_by: Mapping[str, str] = field(default_factory=dict)
    multiplying: frozenset[str] = frozenset()
    functions: tuple[str, ...] = ()
    activating: frozenset[str] = frozenset()
    dividing: frozenset[str] = frozenset()


def roots_of_this_pass() -> list[AutogradNode] | None:
    """The nodes that the backward pass started from, asked inside of one of its hooks; None where they cannot be told.

    They cannot within a pass that another one runs, as reentrant checkpointing does: its roots are not the loss. On an
    accelerator the hook runs on a thread of the engine, while the call of the pass waits on another.
    """
    own = list(_stack(sys._getframe(1)))
    if any(frame.f_code is BackwardCFunction.apply.__code__ for frame in own):
        return None
    calls = _calls(own) or [call for frame in sys._current_frames().values() for call in _calls(_stack(frame))]
    if len(calls) != 1:
        return None
    outputs = calls[0].f_locals["t_outputs"]
    nodes = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    return [node for node in nodes if node is not None]


def _calls(stack: Iterator[FrameType] | list[FrameType]) -> list[FrameType]:
    return [frame for frame in stack if frame.f_code is _engine_run_backward.__code__]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def judge(roots: Sequence[AutogradNode], names: Mapping[int, str], weights: Sequence[str], spans: Spans) -> Verdicts:
    """Follow the scale of every weight to the roots. names: id of a parameter → its name."""
    bits = {name: 1 << index for index, name in enumerate(weights)}
    leaves = {**{bias_of(name): bit for name, bit in bits.items()}, **bits}
    ends = {span.left: span for span in spans.normalizers}
    scales: dict[AutogradNode, Scale] = {}
    followed_by: dict[str, str] = {}
    met = multiplying = visible = unknown = 0
    order = _operands_first(roots)
    for node in order:
        if kind_of(node) == LEAF:
            bit = leaves.get(names.get(id(node.variable), ""), 0)
            met |= bit
            scales[node] = Scale({1.0: bit} if bit else {}, parameter=bit, leaf=True)
        elif (span := ends.get(node)) is not None:
            entering = scales.get(span.entered, CONSTANT)
            scales[node] = normalized(entering)
            for name, bit in bits.items() if (moved := entering.moved) else ():
                if bit & moved:
                    followed_by.setdefault(name, span.path)
        else:
            operands = [CONSTANT if below is None else scales[below] for below, _ in node.next_functions]
            multiplying |= factors(node, operands)
            scales[node] = scale_of(node, operands)
    for root in roots:
        visible, unknown = visible | scales[root].shown, unknown | scales[root].unknown
    free = {name: False if bit & visible else None if bit & unknown else True for name, bit in bits.items() if bit & met}
    multiply = frozenset(name for name, bit in bits.items() if bit & multiplying)
    return Verdicts(free, followed_by, multiply, *_activations(order, spans))


def bias_of(weight: str) -> str:
    """The parameter that is scaled with a weight: weight → bias, in_proj_weight → in_proj_bias."""
    path, dot, name = weight.rpartition(".")
    return f"{path}{dot}{name.replace('weight', 'bias')}"


def _operands_first(roots: Sequence[AutogradNode]) -> list[AutogradNode]:
    order: dict[AutogradNode, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if node in order:
            continue
        if ready:
            order[node] = None
        else:
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None and below not in order]
    return list(order)


def _activations(order: Sequence[AutogradNode], spans: Spans) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Functions that no module calls; modules of the user's own that compute an activation; those that may normalize."""
    activating, dividing, covered = set(), set(), set()
    for span in (*spans.normalizers, *spans.activations, *spans.others):
        covered |= (inside := _inside(span))
        if span in spans.others:
            kinds = {kind_of(node) for node in inside}
            dividing |= {span.path} if kinds & DIVIDING else set()
            activating |= {span.path} if kinds & set(ACTIVATIONS) and not kinds & DIVIDING else set()
    functions = [ACTIVATIONS[kind_of(node)] for node in order if kind_of(node) in ACTIVATIONS and node not in covered]
    return tuple(dict.fromkeys(functions)), frozenset(activating), frozenset(dividing)


def _inside(span: Span) -> set[AutogradNode]:
    """The nodes of a module's call."""
    found: set[AutogradNode] = set()
    stack = [span.left]
    while stack:
        node = stack.pop()
        if node is not None and node is not span.entered and node not in found:
            found.add(node)
            stack += [below for below, _ in node.next_functions]
    return found
