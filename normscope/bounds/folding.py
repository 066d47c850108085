"""The same function without statistics: normalizers with running statistics become part of the weights that theory counts.

Running statistics depend on the training data and are not parameters, so a bound on a class of networks must not see them.
In eval mode BN is the affine map s ⊙ x + t with s = γ/√(v + ε) and t = β − s ⊙ μ: folded into the map before it where that has
no other reader, else counted once as a diagonal map of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from normscope.certify.fold import foldable
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, InternalError, NormscopeError
from normscope.core.twins import twin_of
from normscope.core.vector_layout import movable
from normscope.core.wrapping import unwrapped
from normscope.geometry.quotient import canonical
from normscope.graph.graph import Constant, Graph, Node
from normscope.graph.trace import trace
from normscope.rules.readings import LinearMap, Normalizer
from normscope.rules.registry import registry
from normscope.symmetry.detect import symmetries

BALANCE = 1e-9  # of a factor of scale, at which rescaled layers count as balanced
LARGEST_BALANCED = 4_000_000  # parameters; beyond, balancing takes minutes
ROUNDING = 1e-10  # relative: a group that moves outputs by more meets some ε
TOLERANCE = 1e-6  # relative, in float64: what ε and deep stacks may make of rounding

Maps = (nn.Linear, nn.modules.conv._ConvNd)


class ChannelScale(nn.Module):
    """s ⊙ x + t, one s and one t per channel."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * self.weight.reshape(shape) + self.bias.reshape(shape)


def folded(model: nn.Module, example: Example) -> nn.Module:
    """A copy of a model in eval mode and float64 that computes the same without running statistics.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
    >>> folded(model, torch.zeros(1, 2))[1]
    Identity()

    That it computes the same is checked on the example.
    """
    twin = _without_whole_numbers(twin_of(unwrapped(model))).double().eval().requires_grad_(True)
    before = twin_of(twin)
    graph = trace(twin, as_double(example), "eval")
    for path, owner in _owners(graph, twin).items():
        _fold(twin, path, *owner)
    for path, module in list(twin.named_modules()):
        if isinstance(module, _NormBase) and module.running_var is not None:
            _replace(twin, path, _scale_of(module))
    check_same_function(before, twin, example)
    return twin


def _without_whole_numbers(model: nn.Module) -> nn.Module:
    """The model, whose parameters of whole numbers are buffers now: they cannot move, so no bound on parameters counts them."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name in own.keys() - movable(own.items()):
            del module._parameters[name]
            module.register_buffer(name, own[name].detach())
    return model


@dataclass(frozen=True)
class Canonical:
    """A model at the canonical representative of its orbit under its symmetries in eval mode; notes: where that falls short."""

    model: nn.Module
    notes: tuple[str, ...] = ()


def canonical_form(model: nn.Module, example: Example) -> Canonical:
    """A copy of a model in float64 whose parameters depend on its function alone, as far as its symmetries are known.

    Rescalings and shifts leave the function as it is, which is checked. Scale-free weights get unit norm, and then ε of the
    normalizer behind them weighs differently: the note says by how much that moves the outputs.
    """
    twin = twin_of(model)
    if sum(value.numel() for value in twin.parameters()) > LARGEST_BALANCED:
        return Canonical(twin, (f"not invariant under rescalings: above {LARGEST_BALANCED:,} parameters none is preferred",))
    try:
        report = symmetries(twin, as_double(example), mode="eval")
        point = canonical(report, dict(twin.named_parameters()), tolerance=BALANCE)
    except NormscopeError as error:
        return Canonical(twin, (f"not invariant under symmetries: no representative was found ({error})",))
    with torch.no_grad():
        for name, value in twin.named_parameters():
            value.copy_(point[name])
    notes = []
    moved = difference(model, twin, example)
    rescaled = report.of_kind("rescale")  # several of which may make up a scale
    if report.of_kind("scale", "joint-scale") or (moved > TOLERANCE and any(group.defect > ROUNDING for group in rescaled)):
        notes.append(f"norms are those of scale-free weights at unit norm, where ε moves outputs by {moved:.1e}")
    else:
        check_same_function(model, twin, example)
    if report.of_kind("linear"):
        notes.append("not invariant under the model's linear symmetries, which have no preferred element")
    return Canonical(twin, tuple(notes))


def check_same_function(first: nn.Module, second: nn.Module, example: Example) -> None:
    """Raise unless two models in float64 agree on the example."""
    if not difference(first, second, example) <= TOLERANCE:
        raise InternalError("rewriting the model changed its function")


def difference(first: nn.Module, second: nn.Module, example: Example) -> float:
    """The largest difference of two models' outputs on the example, over the largest output."""
    call = Call.of(as_double(example))
    with torch.no_grad():
        expected, found = (module(*call.args, **call.kwargs) for module in (first, second))
    if not bool(expected.isfinite().all()):
        raise InputError("the model's outputs are not finite: look for nan in the data and the weights")
    return float((expected - found).abs().max()) / (float(expected.abs().max()) + 1e-300)


def _owners(graph: Graph, model: nn.Module) -> dict[str, tuple[Node, Node]]:
    """From the path of each BN module to its node and the node of the map that takes it up, both modules of one call."""
    calls = Counter(node.path for node in graph if not node.is_input)
    modules = dict(model.named_modules())
    found = {}
    for node, before in foldable(graph).items():
        own, other = modules.get(node.path), modules.get(before.path)
        if not isinstance(own, _NormBase) or not isinstance(other, Maps) or parametrize.is_parametrized(other):
            continue
        single = calls[node.path] == 1 and calls[before.path] == 1 and before.parameters[:1] == (f"{before.path}.weight",)
        applied = registry.reading(before, LinearMap)
        assert applied is not None and isinstance(applied.weight, Constant)
        as_stored = applied.weight.shape == tuple(other.weight.shape) and torch.equal(applied.weight.value, other.weight)
        if single and as_stored and "weight" in other._parameters:
            found[node.path] = node, before
    return found


def _fold(model: nn.Module, path: str, node: Node, before: Node) -> None:
    normalizer, applied = registry.reading(node, Normalizer), registry.reading(before, LinearMap)
    assert normalizer is not None and applied is not None
    taken = applied.scaled(*normalizer.affine)
    target = model.get_submodule(before.path)
    assert isinstance(target, Maps) and isinstance(taken.weight, Constant) and isinstance(taken.bias, Constant)
    target.weight, target.bias = nn.Parameter(taken.weight.double()), nn.Parameter(taken.bias.double())
    _replace(model, path, nn.Identity())


def _scale_of(module: _NormBase) -> ChannelScale:
    assert module.running_mean is not None and module.running_var is not None
    scale = (module.running_var + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight.detach()
    shift = -scale * module.running_mean
    return ChannelScale(scale.clone(), (shift if module.bias is None else shift + module.bias.detach()).clone())


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    if not path:
        raise InputError("the model is a single normalizer: there is no network to bound")
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def as_double(example: Example) -> Example:
    """The example in float64, as tuple or dict."""
    call = Call.of(example)

    def cast(value: object) -> object:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: cast(value) for name, value in call.kwargs.items()} if call.kwargs else tuple(map(cast, call.args))
