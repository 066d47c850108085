"""Where the autograd graph of a backward pass that is under way leads. Nothing is run: the graph is only followed."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

AutogradNode = Any  # torch.autograd.graph.Node, which its annotations make abstract
LEAF = "torch::autograd::AccumulateGrad"
DIVIDING = frozenset({"Sqrt", "Rsqrt", "LinalgVectorNorm", "Std", "Var"})  # what a normalizer written by hand holds
RESHAPE = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select",
    "Split", "SplitWithSizes", "Unbind", "Clone", "Alias", "ToCopy", "Narrow", "Repeat",
})  # fmt: skip
PRODUCTS = {  # node → which operand is the first of its two factors
    "Mm": 0, "Bmm": 0, "Mv": 0, "Dot": 0, "Convolution": 0, "Linear": 0, "Addmm": 1, "Addmv": 1, "Baddbmm": 1,
}  # fmt: skip
ACTIVATIONS = {  # node → function
    "Relu": "relu", "LeakyRelu": "leaky_relu", "Prelu": "prelu", "Rrelu": "rrelu", "Tanh": "tanh", "Sigmoid": "sigmoid",
    "Gelu": "gelu", "Silu": "silu", "Mish": "mish", "Elu": "elu", "Hardtanh": "hardtanh", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "Softplus": "softplus", "LogSigmoidForward": "logsigmoid",
}  # fmt: skip


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

    observed: of normalizers and activations. others: of modules of the user's own that have no children. outputs: what left the
    whole model.
    """

    observed: list[Span] = field(default_factory=list)
    others: list[Span] = field(default_factory=list)
    outputs: set[Key] = field(default_factory=set)


@dataclass(frozen=True)
class Routes:
    """How the loss of a step depends on weights, as far as its backward passes were read.

    met: weights that a gradient reaches, themselves or their bias. beside: those with a path to the loss that does not pass through
    the model's output, or perhaps one in a pass that was not read. multiplying: weights that multiply something. functions:
    activations that no module calls. activating, dividing: modules of the user's own that compute an activation, or divide by a
    root as a normalizer does.
    """

    met: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    multiplying: frozenset[str] = frozenset()
    functions: tuple[str, ...] = ()
    activating: frozenset[str] = frozenset()
    dividing: frozenset[str] = frozenset()

    @staticmethod
    def together(passes: Sequence[Routes], gradients: Mapping[str, int]) -> Routes:
        """Of all backward passes of a step. gradients: parameter → how many of them gave it one, read or not."""
        times = Counter(name for one in passes for name in one.met)
        unread = (name for name in times if max(gradients.get(name, 0), gradients.get(bias_of(name), 0)) > times[name])
        return Routes(
            frozenset(times),
            frozenset(unread).union(*(one.beside for one in passes)),
            frozenset().union(*(one.multiplying for one in passes)),
            tuple(dict.fromkeys(function for one in passes for function in one.functions)),
            frozenset().union(*(one.activating for one in passes)),
            frozenset().union(*(one.dividing for one in passes)),
        )

    @property
    def through_output(self) -> frozenset[str]:
        """Weights of which the loss knows what the model's output says, and no more."""
        return self.met - self.beside


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


def routes(roots: Sequence[AutogradNode], names: Mapping[int, str], weights: Sequence[str], spans: Spans) -> Routes:
    """From the roots to the weights. names: id of a parameter → its name."""
    order = nodes_below(roots)
    leaves = {names.get(id(node.variable), "") for node in order if kind_of(node) == LEAF}
    ahead = {names.get(id(node.variable), "") for node in nodes_below(roots, spans.outputs) if kind_of(node) == LEAF}
    met, beside = (frozenset(name for name in weights if {name, bias_of(name)} & found) for found in (leaves, ahead))
    return Routes(met, beside, _multiplying(order, names) & set(weights), *_activations(order, spans))


def kind_of(node: AutogradNode) -> str:
    """AddmmBackward0 → Addmm; the name of a user's own autograd function, which has no number, stays whole."""
    return re.sub(r"Backward\d+$", "", node.name())


def _multiplying(order: Sequence[AutogradNode], names: Mapping[int, str]) -> frozenset[str]:
    """Parameters that multiply something else, as they are or rearranged."""
    entries: dict[AutogradNode | None, str] = {}  # node → the parameter whose own entries these are
    found = set()
    for node in order:
        kind, operands = kind_of(node), [below for below, _ in node.next_functions]
        if kind == LEAF:
            entries[node] = names.get(id(node.variable), "")
        elif kind in RESHAPE and operands[0] in entries:
            entries[node] = entries[operands[0]]
        elif kind in PRODUCTS:
            factors = operands[PRODUCTS[kind] : PRODUCTS[kind] + 2]
            found |= {entries[factor] for factor in factors if factor in entries}
    return frozenset(found)


def bias_of(weight: str) -> str:
    """The parameter that is scaled with a weight: weight → bias, in_proj_weight → in_proj_bias."""
    path, dot, name = weight.rpartition(".")
    return f"{path}{dot}{name.replace('weight', 'bias')}"


def nodes_below(roots: Sequence[AutogradNode], until: Set[Key] = frozenset()) -> list[AutogradNode]:
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


def _activations(order: Sequence[AutogradNode], spans: Spans) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Functions that no module calls; modules of the user's own that compute an activation; those that may normalize."""
    keys = Counter(key_of(node) for node in order)
    nodes = {key: node for node in order if keys[key := key_of(node)] == 1}  # threads number their nodes alike
    activating, dividing, covered = set(), set(), set[AutogradNode]()
    for span in spans.observed:
        covered |= _inside(span, nodes)
    for span in spans.others:
        inside = _inside(span, nodes)
        covered |= inside
        kinds = {kind_of(node) for node in inside}
        dividing |= {span.path} if kinds & DIVIDING else set()
        activating |= {span.path} if kinds & set(ACTIVATIONS) and not kinds & DIVIDING else set()
    functions = [ACTIVATIONS[kind_of(node)] for node in order if kind_of(node) in ACTIVATIONS and node not in covered]
    return tuple(dict.fromkeys(functions)), frozenset(activating), frozenset(dividing)


def _inside(span: Span, nodes: Mapping[Key, AutogradNode]) -> set[AutogradNode]:
    """The nodes that a call made; none where it cannot be found."""
    left = nodes.get(span.left)
    if left is None:
        return set()
    entered = nodes.get(span.entered) if span.entered is not None and span.entered != span.left else None
    inside, stack = {left}, [left]
    while stack:
        for below, _ in stack.pop().next_functions:
            made = below is not None and below is not entered and kind_of(below) != LEAF and below._sequence_nr() >= span.began
            if made and below not in inside:
                inside.add(below)
                stack.append(below)
    return inside
