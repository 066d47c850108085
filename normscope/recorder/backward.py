"""What the autograd graph of a backward pass that is under way says of each weight. Nothing is run: the graph is only followed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from normscope.recorder.scales import ACTIVATIONS, CONSTANT, Scale, factors, kind_of, normalized, normalizes, scale_of

AutogradNode = Any  # torch.autograd.graph.Node, which its annotations make abstract
LEAF = "torch::autograd::AccumulateGrad"
DIVIDING = frozenset({"Sqrt", "Rsqrt", "LinalgVectorNorm", "Std", "Var"})  # what a normalizer written by hand holds


Key = tuple[int, str]  # of a node, without keeping it and the activations it holds alive


def key_of(node: AutogradNode) -> Key:
    """Its number in the order in which its thread made nodes, and its name; of a leaf, the parameter's id."""
    name = node.name()
    return (id(node.variable) if name == LEAF else node._sequence_nr()), name


def key_of_tensor(tensor: torch.Tensor) -> Key | None:
    """The key of the node that a tensor comes from; None where it needs no gradient."""
    if tensor.grad_fn is not None:
        return key_of(tensor.grad_fn)
    return (id(tensor), LEAF) if tensor.requires_grad else None


def next_number() -> int:
    """What the next node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


@dataclass(frozen=True)
class Span:
    """One call of a module: the number of the first node that it could make, what entered it, and what left it."""

    path: str
    began: int
    entered: Key | None
    left: Key


@dataclass
class Spans:
    """The calls of the forward passes.

    normalizers: of torch's own. observed: of other normalizers, and of activations. others: of modules of the user's own that have
    no children. outputs: what left the whole model.
    """

    normalizers: list[Span] = field(default_factory=list)
    observed: list[Span] = field(default_factory=list)
    others: list[Span] = field(default_factory=list)
    outputs: set[Key] = field(default_factory=set)


@dataclass(frozen=True)
class Verdicts:
    """scale_free: weight → whether the loss ignores its scale, None where that cannot be told; absent if it was not met.

    followed_by: weight → module path of the normalizer that ends its scale. functions: activations that no module calls.
    activating, dividing: modules of the user's own that compute an activation, or divide by a root as a normalizer does.
    beside: weights with a path to the loss that does not pass through the model's output.
    """

    scale_free: Mapping[str, bool | None] = field(default_factory=dict)
    followed_by: Mapping[str, str] = field(default_factory=dict)
    multiplying: frozenset[str] = frozenset()
    functions: tuple[str, ...] = ()
    activating: frozenset[str] = frozenset()
    dividing: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()

    @staticmethod
    def together(passes: Sequence[Verdicts], gradients: Mapping[str, int]) -> Verdicts:
        """Of all backward passes of a step. gradients: parameter → how many gave it one; if more than were read, None."""

        def judged(name: str) -> bool | None:
            found = [one.scale_free[name] for one in passes if name in one.scale_free]
            unread = max(gradients.get(name, 0), gradients.get(bias_of(name), 0)) > len(found)
            return False if False in found else None if unread or None in found else True

        return Verdicts(
            {name: judged(name) for one in passes for name in one.scale_free},
            {name: path for one in reversed(passes) for name, path in one.followed_by.items()},
            frozenset().union(*(one.multiplying for one in passes)),
            tuple(dict.fromkeys(function for one in passes for function in one.functions)),
            frozenset().union(*(one.activating for one in passes)),
            frozenset().union(*(one.dividing for one in passes)),
            frozenset().union(*(one.beside for one in passes)),
        )


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
    order = _operands_first(roots)
    calls = _Calls(order)
    ends = {call.left: call for span in spans.normalizers if (call := calls.of(span)) is not None and call.is_whole}
    paths = {node: span.path for span in spans.observed if (call := calls.of(span)) for node in call.inside}
    scales: dict[AutogradNode, Scale] = {}
    followed_by: dict[str, str] = {}
    met = multiplying = visible = unknown = 0
    for node in order:
        operands = [CONSTANT if below is None else scales[below] for below, _ in node.next_functions]
        if kind_of(node) == LEAF:
            bit = leaves.get(names.get(id(node.variable), ""), 0)
            met |= bit
            scales[node] = Scale({1.0: bit} if bit else {}, parameter=bit, leaf=True)
            continue
        call = ends.get(node)
        if call is not None:
            entering = CONSTANT if call.entered is None else scales[call.entered]
            scales[node] = normalized(entering, [scales[operand] for operand in call.beside])
        else:
            entering = operands[0] if normalizes(node) else CONSTANT
            multiplying |= factors(node, operands)
            scales[node] = scale_of(node, operands)
        path = paths.get(node) if call is None else call.path
        if path is not None and (moved := entering.moved):
            followed_by = {**{name: path for name, bit in bits.items() if bit & moved}, **followed_by}
    for root in roots:
        visible, unknown = visible | scales[root].shown, unknown | scales[root].unknown
    free = {name: False if bit & visible else None if bit & unknown else True for name, bit in bits.items() if bit & met}
    multiply = frozenset(name for name, bit in bits.items() if bit & multiplying)
    ahead = _operands_first(roots, spans.outputs)
    direct = {names.get(id(node.variable), "") for node in ahead if kind_of(node) == LEAF}
    alone = {name for name in free if free[name] is False and bias_of(name) in direct and name not in direct}
    free |= dict.fromkeys(alone)  # the loss shows the bias itself; it may still ignore the weight's own scale
    beside = frozenset(name for name in bits if name in direct or bias_of(name) in direct)
    return Verdicts(free, followed_by, multiply, *_activations(order, spans, calls), beside)


def bias_of(weight: str) -> str:
    """The parameter that is scaled with a weight: weight → bias, in_proj_weight → in_proj_bias."""
    path, dot, name = weight.rpartition(".")
    return f"{path}{dot}{name.replace('weight', 'bias')}"


def _operands_first(roots: Sequence[AutogradNode], until: Set[Key] = frozenset()) -> list[AutogradNode]:
    """All nodes, each after what it was computed from; nothing from the nodes `until` on."""
    order: dict[AutogradNode, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if node in order or (until and key_of(node) in until):
            continue
        if ready:
            order[node] = None
        else:
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None and below not in order]
    return list(order)


@dataclass(frozen=True)
class _Call:
    """A span in the graph. inside: its nodes. entered: the node of its input; beside: of all else that it used."""

    path: str
    left: AutogradNode
    inside: Set[AutogradNode]
    entered: AutogradNode | None
    beside: Set[AutogradNode]
    is_whole: bool  # what entered was found, or needs no gradient


class _Calls:
    """Finds spans in a graph. Threads number their nodes alike: a key that two nodes have finds neither."""

    def __init__(self, order: Sequence[AutogradNode]) -> None:
        keys = Counter(key_of(node) for node in order)
        self.nodes = {key: node for node in order if keys[key := key_of(node)] == 1}

    def of(self, span: Span) -> _Call | None:
        left = self.nodes.get(span.left)
        if left is None:
            return None
        entered = self.nodes.get(span.entered) if span.entered is not None and span.entered != span.left else None
        inside, used, stack = {left}, set[AutogradNode](), [left]
        while stack:
            for below, _ in stack.pop().next_functions:
                if below is None or below in inside:
                    continue
                if below is entered or kind_of(below) == LEAF or below._sequence_nr() < span.began:
                    used.add(below)
                else:
                    inside.add(below)
                    stack.append(below)
        return _Call(span.path, left, inside, entered, used - {entered}, span.entered is None or entered in used)


def _activations(
    order: Sequence[AutogradNode], spans: Spans, calls: _Calls
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Functions that no module calls; modules of the user's own that compute an activation; those that may normalize."""
    activating, dividing, covered = set(), set(), set[AutogradNode]()
    for span in (*spans.normalizers, *spans.observed):
        covered |= call.inside if (call := calls.of(span)) is not None else set()
    for span in spans.others:
        inside = call.inside if (call := calls.of(span)) is not None else frozenset()
        covered |= inside
        kinds = {kind_of(node) for node in inside}
        dividing |= {span.path} if kinds & DIVIDING else set()
        activating |= {span.path} if kinds & set(ACTIVATIONS) and not kinds & DIVIDING else set()
    functions = [ACTIVATIONS[kind_of(node)] for node in order if kind_of(node) in ACTIVATIONS and node not in covered]
    return tuple(dict.fromkeys(functions)), frozenset(activating), frozenset(dividing)
