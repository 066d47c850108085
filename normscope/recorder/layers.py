"""The layer table: weights, normalizers and activations in the order in which the first batch meets them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normscope.core.data import Call
from normscope.core.errors import InputError
from normscope.core.randomness import preserved_random_state
from normscope.graph.graph import Graph, Node
from normscope.graph.trace import trace
from normscope.rules.normalizers import NORMALIZERS, Normalizer, normalizer_of

NORMALIZING = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
RECTIFYING = (nn.ReLU, nn.ReLU6, nn.Threshold)  # an input below the threshold is a unit that does not learn
ACTIVATING = (
    *RECTIFYING, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanh, nn.Hardtanh, nn.Softplus, nn.Softsign,
)  # fmt: skip
MULTIPLYING = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)
CHANNELS_SECOND = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)
WEIGHTED_OPERATIONS = (
    "linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d", "convolution",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
ACTIVATING_OPERATIONS = (
    "relu", "relu6", "leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish",
    "sigmoid", "log_sigmoid", "hardsigmoid", "tanh", "hardtanh", "softplus",
)  # fmt: skip
KEEP_THE_DEGREE = {  # f(cx) = c f(x) for c > 0: what a scale of the weight passes through unchanged
    "relu", "leaky_relu", "prelu", "dropout", "reshape", "permute", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "center", "t", "movedim",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One row of the table.

    role: weight, normalizer or activation. parameter: the weight, or a normalizer's γ. module, call: which call of which
    module an input is seen at (call 1 is the first in a forward pass). normalizer: the name of the one that follows a weight.
    scale_free: whether the loss ignores the weight's length. in_product: whether it counts in the product over depth.
    sharded, replicas: whether processes hold parts of the weight, and how many whole copies they hold together.
    """

    name: str
    kind: str
    role: str
    module: str
    call: int = 0
    parameter: str | None = None
    shape: tuple[int, ...] = ()
    normalizer: str | None = None
    scale_free: bool = False
    in_product: bool = False
    epsilon: float | None = None
    sharded: bool = False
    replicas: int = 1
    effective_power: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Seen:
    """What the first forward pass showed.

    calls: (module path, which call of it), in order. direct: normalizer → the module whose output it reads as it is.
    example: the call of the whole model.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    direct: dict[str, str] = field(default_factory=dict)
    example: Call | None = None


@dataclass(frozen=True)
class Handwritten:
    """What a module of the user's own computes: a normalizer, or else an activation.

    gamma: the parameter that multiplies the normalizer's output, if one does.
    """

    normalizer: Normalizer | None
    gamma: str | None = None

    def now(self, module: nn.Module) -> Normalizer | None:
        """The normalizer, with γ as it is at this moment."""
        if self.normalizer is None:
            return None
        return replace(self.normalizer, weight=None if self.gamma is None else getattr(module, self.gamma).detach())


@dataclass(frozen=True)
class Pairing:
    """What the graph adds to the modules: for a weight its normalizer, and normalizers that are written by hand."""

    followed_by: Mapping[str, str]  # parameter → module path of a normalizer
    scale_free: frozenset[str]  # parameters
    multiplying: frozenset[str]  # parameters
    handwritten: Mapping[str, Handwritten]  # module path → what its forward does
    note: str = ""


def is_observable(module: nn.Module) -> bool:
    """Whether what enters this module is recorded."""
    return isinstance(module, (*NORMALIZING, *ACTIVATING))


def layer_table(model: nn.Module, seen: Seen, pairing: Pairing) -> list[Layer]:
    """Rows in the order of calls; weights whose module is never called as such stand where the module order puts them."""
    modules = dict(model.named_modules())
    owners = _owners(model)
    rows: list[Layer] = []
    for path, call in _in_order(list(modules), seen.calls):
        module = modules[path]
        if is_observable(module) or path in pairing.handwritten:
            rows.append(_observed(path, call, module, owners.get(path, []), pairing.handwritten.get(path)))
        elif call <= 1:
            rows += _weights(path, call, module, owners.get(path, []), pairing)
    names = {row.module: row.name for row in reversed(rows) if row.role == "normalizer"}
    return [replace(row, normalizer=names.get(row.normalizer)) if row.normalizer else row for row in rows]


def _owners(model: nn.Module) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Module path → its own parameters, a shared one under its first name only."""
    owners: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        owners.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    return owners


def _in_order(paths: Sequence[str], calls: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The calls, and every module that was not called (call 0) right after the module before it in module order."""
    called = {path for path, _ in calls}
    ordered = list(calls)
    previous = ""
    for path in paths:
        if path not in called:
            after = next((index + 1 for index, (other, _) in enumerate(ordered) if other == previous), len(ordered))
            ordered.insert(after if path else 0, (path, 0))
        previous = path
    return ordered


def _observed(path: str, call: int, module: nn.Module, own: list[tuple[str, torch.Tensor]], known: Handwritten | None) -> Layer:
    name = path if call <= 1 else f"{path}#{call}"
    if isinstance(module, ACTIVATING) or (known is not None and known.normalizer is None):
        return Layer(name, type(module).__name__, "activation", path, max(call, 1))
    gamma, shape = next(((n, tuple(p.shape)) for n, p in own if call <= 1 and n.rpartition(".")[2] == "weight"), (None, ()))
    epsilon = known.normalizer.epsilon if known is not None and known.normalizer is not None else getattr(module, "eps", None)
    return Layer(name, type(module).__name__, "normalizer", path, max(call, 1), gamma, shape, epsilon=epsilon)


def _weights(path: str, call: int, module: nn.Module, own: list[tuple[str, torch.Tensor]], pairing: Pairing) -> list[Layer]:
    matrices = [(name, parameter) for name, parameter in own if parameter.dim() >= 2]
    return [
        Layer(
            path if len(matrices) == 1 else name, type(module).__name__, "weight", path, call, name, tuple(parameter.shape),
            normalizer=pairing.followed_by.get(name), scale_free=name in pairing.scale_free,
            in_product=isinstance(module, MULTIPLYING) or name in pairing.multiplying,
        )
        for name, parameter in matrices
    ]  # fmt: skip


# pairing -------------------------------------------------------------------------------------------------------------


def pair(model: nn.Module, seen: Seen, use_graph: bool = True) -> Pairing:
    """Through the graph of the first batch; by the order of calls, with a note, where there is no graph."""
    if not use_graph:
        return pair_by_order(model, seen, "weights are paired with normalizers by the order of calls, as asked")
    if seen.example is None:
        why = "no call of the whole model was seen"
    else:
        try:
            return pair_by_graph(model, _graph(model, seen.example))
        except Exception as error:  # whatever the export of somebody's model may raise
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
    return pair_by_order(model, seen, f"no graph, so weights are paired with normalizers by the order of calls ({why})")


def _graph(model: nn.Module, example: Call) -> Graph:
    """The traced model, of a copy, with random state as it was."""
    with preserved_random_state():
        copied = copy.deepcopy(model)
        given = example.args if not example.kwargs else example.kwargs
        if example.args and example.kwargs:
            raise InputError("the model is called with positional and keyword arguments")
        try:
            return trace(copied, given, ids=True)
        except InputError as error:
            if "choose one with output=" not in str(error):
                raise
            return trace(copied, given, output=0, ids=True)


def pair_by_graph(model: nn.Module, graph: Graph) -> Pairing:
    """Follow each weight's output through maps that keep its scale, while it has one reader."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    followed_by, free, multiplying = {}, set(), set()
    users = graph.users
    for node in graph:
        weight = next((name for name in node.parameters if name in parameters and parameters[name].dim() >= 2), None)
        if weight is None or node.op not in WEIGHTED_OPERATIONS or len(node.inputs) != 1:
            continue
        multiplying.add(weight)
        follower = _following_normalizer(node, users)
        if follower is not None:
            followed_by[weight] = follower.path
            free.add(weight)
    handwritten: dict[str, Handwritten] = {}
    functions = []
    for node in graph:
        module = modules.get(node.path)
        if node.op not in (*NORMALIZERS, *ACTIVATING_OPERATIONS) or (module is not None and is_observable(module)):
            continue
        if module is None or any(True for _ in module.children()):
            functions.append(node.label)
        elif node.op == "standardize":
            handwritten[node.path] = Handwritten(normalizer_of(node), _gamma(module, users[node]))
        elif node.op in ACTIVATING_OPERATIONS:
            handwritten.setdefault(node.path, Handwritten(None))
    note = f"called as functions, so what enters them is not recorded: {', '.join(dict.fromkeys(functions))}" if functions else ""
    return Pairing(followed_by, frozenset(free), frozenset(multiplying), handwritten, note)


def _following_normalizer(node: Node, users: Mapping[Node, Sequence[Node]]) -> Node | None:
    """The normalizer that a weight's output reaches through maps with f(cx) = c f(x), read by nothing else on the way.

    Then the weight, with its bias, is scale-free (THEORY, Symmetry).
    """
    while len(readers := users[node]) == 1:
        node = readers[0]
        if node.op in NORMALIZERS and len(node.inputs) == 1:
            return node
        if node.op not in KEEP_THE_DEGREE or len(node.inputs) != 1:
            return None
    return None


def _gamma(module: nn.Module, readers: Sequence[Node]) -> str | None:
    """The parameter of the module that multiplies what it normalized, as it is."""
    if len(readers) != 1 or readers[0].op != "mul":
        return None
    factors = [constant.value for constant in readers[0].constants if constant.learned]
    own = module.named_parameters(recurse=False)
    return next((name for name, parameter in own for factor in factors if torch.equal(factor, parameter.detach())), None)


def pair_by_order(model: nn.Module, seen: Seen, note: str) -> Pairing:
    """Each weight with the normalizer that is called next, before any other weight.

    Scale-free is only what goes there directly: between two calls there may be a sum with something else.
    """
    modules = dict(model.named_modules())
    followed_by = {}
    waiting: str | None = None
    for path, _ in seen.calls or [(path, 1) for path in modules]:
        module = modules[path]
        if isinstance(module, MULTIPLYING):
            waiting = f"{path}.weight" if isinstance(getattr(module, "weight", None), nn.Parameter) else None
        elif isinstance(module, NORMALIZING) and waiting is not None:
            followed_by[waiting], waiting = path, None
    free = frozenset(weight for weight, path in followed_by.items() if f"{seen.direct.get(path)}.weight" == weight)
    return Pairing(followed_by, free, frozenset(), {}, note)
