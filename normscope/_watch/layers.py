"""The layer table: weights, normalizers and activations in the order in which the first batch meets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from normscope._watch.backward import Spans
from normscope.rules.normalizers import Normalizer

NORMALIZING = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
RECTIFYING = (nn.ReLU, nn.ReLU6, nn.Threshold)  # an input below the threshold is a unit that does not learn
ACTIVATING = (
    *RECTIFYING, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanh, nn.Hardtanh, nn.Softplus, nn.Softsign,
)  # fmt: skip
MULTIPLYING = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)
CHANNELS_SECOND = (_ConvNd, _BatchNorm, _InstanceNorm, nn.GroupNorm)


PLAIN = (torch.Tensor, nn.Parameter)  # a subclass may run code of its own in every operation


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it can be read without running code of the user's: also in shards, or not yet initialized."""
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed.tensor"):
        return type(tensor._local_tensor) in PLAIN
    return kind in PLAIN or is_lazy(tensor)


@dataclass(frozen=True)
class WatchedLayer:
    """One row of the table.

    role: weight, normalizer, activation, block or attention. parameter: the weight, or a normalizer's γ. module, call: which call
    of which module an input is seen at (call 1 is the first in a forward pass). normalizer: the name of the one that follows a
    weight. scale_free: whether the loss ignores the weight's length, None where that was not judged.
    in_product: whether it counts in the product over depth.
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
    scale_free: bool | None = False
    in_product: bool = False
    epsilon: float | None = None
    sharded: bool = False
    replicas: int = 1
    effective_power: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class FirstForward:
    """What the first forward pass showed.

    calls: (module path, which call of it), in order. training: module path → whether it was in train mode. whole: whether the
    model itself was called. hooked: whether others have hooks on all modules. parameters: id → name and parameter, as the modules
    held them in the pass (FSDP puts others in their place). blocks, attentions: calls of modules that are one, or compute one.
    """

    calls: list[tuple[str, int]] = field(default_factory=list)
    training: dict[str, bool] = field(default_factory=dict)
    whole: bool = False
    hooked: bool = False
    spans: Spans = field(default_factory=Spans)
    parameters: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    blocks: set[tuple[str, int]] = field(default_factory=set)
    attentions: set[tuple[str, int]] = field(default_factory=set)


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
        return replace(self.normalizer, weight=None if self.gamma is None else module._parameters[self.gamma])


@dataclass(frozen=True)
class Pairing:
    """What is known beside the modules: for a weight its normalizer, and normalizers that are written by hand.

    scale_free: parameter → whether it is; None, or absent, where that was not judged.
    """

    followed_by: Mapping[str, str] = field(default_factory=dict)  # parameter → module path of a normalizer
    scale_free: Mapping[str, bool | None] = field(default_factory=dict)
    multiplying: frozenset[str] = frozenset()  # parameters
    handwritten: Mapping[str, Handwritten] = field(default_factory=dict)  # module path → what its forward does
    notes: tuple[str, ...] = ()


def is_observable(module: nn.Module) -> bool:
    """Whether what enters this module is recorded."""
    return isinstance(module, (*NORMALIZING, *ACTIVATING))


def layer_table(model: nn.Module, seen: FirstForward, pairing: Pairing) -> list[WatchedLayer]:
    """Rows in the order of calls; weights whose module is never called as such stand where the module order puts them."""
    modules = dict(model.named_modules())
    owners = _owners(model)
    rows: list[WatchedLayer] = []
    for path, call in _in_order(list(modules), seen.calls):
        module = modules[path]
        for role, places in (("block", seen.blocks), ("attention", seen.attentions)):
            if (path, call) in places:
                rows.append(WatchedLayer(f"{_numbered(path, call)}:{role}", type(module).__name__, role, path, call))
        if is_observable(module) or path in pairing.handwritten:
            rows.append(_observed(path, call, module, owners.get(path, []), pairing.handwritten.get(path)))
        elif call <= 1:
            rows += _weights(path, call, module, owners.get(path, []), pairing)
    return [replace(row, normalizer=_called_next(row.normalizer, rows, place)) for place, row in enumerate(rows)]


def _called_next(path: str | None, rows: Sequence[WatchedLayer], place: int) -> str | None:
    """The row of a normalizer that follows a place; of one that is called several times, the first call after it."""
    calls = [(index < place, index) for index, row in enumerate(rows) if row.role == "normalizer" and row.module == path]
    return rows[min(calls)[1]].name if calls else None


def _owners(model: nn.Module) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Module path → its own parameters, a shared one under its first name only."""
    owners: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if is_plain(parameter):
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


def _numbered(path: str, call: int) -> str:
    return path if call <= 1 else f"{path}#{call}"


def _observed(
    path: str, call: int, module: nn.Module, own: list[tuple[str, torch.Tensor]], known: Handwritten | None
) -> WatchedLayer:
    name = _numbered(path, call)
    if isinstance(module, ACTIVATING) or (known is not None and known.normalizer is None):
        return WatchedLayer(name, type(module).__name__, "activation", path, max(call, 1))
    gamma, shape = next(((n, tuple(p.shape)) for n, p in own if call <= 1 and n.rpartition(".")[2] == "weight"), (None, ()))
    epsilon = known.normalizer.epsilon if known is not None and known.normalizer is not None else vars(module).get("eps")
    return WatchedLayer(name, type(module).__name__, "normalizer", path, max(call, 1), gamma, shape, epsilon=epsilon)


def _weights(path: str, call: int, module: nn.Module, own: list[tuple[str, torch.Tensor]], pairing: Pairing) -> list[WatchedLayer]:
    matrices = [(name, parameter) for name, parameter in own if parameter.dim() >= 2]
    return [
        WatchedLayer(
            path if path and len(matrices) == 1 else name, type(module).__name__, "weight", path, call, name,
            tuple(parameter.shape),
            normalizer=pairing.followed_by.get(name), scale_free=pairing.scale_free.get(name),
            in_product=isinstance(module, MULTIPLYING) or name in pairing.multiplying,
        )
        for name, parameter in matrices
    ]  # fmt: skip


def is_own_leaf(module: nn.Module) -> bool:
    """Whether it is a module of the user's own, without children and without weights: perhaps an activation or a normalizer."""
    own = not type(module).__module__.startswith("torch.") and not is_observable(module)
    return (
        own
        and not module._modules
        and all(is_plain(parameter) and parameter.dim() < 2 for parameter in module._parameters.values() if parameter is not None)
    )


def parameter_at(model: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter of this name where the modules hold it, without calling `named_parameters`, which may be the user's own."""
    *path, last = name.split(".")
    module: Any = model
    for part in path:
        module = _entry(module, "_modules", part)
    found = _entry(module, "_parameters", last)
    return found if isinstance(found, torch.Tensor) else None


def _entry(module: Any, kind: str, name: str) -> Any:
    entries = vars(module).get(kind) if isinstance(module, nn.Module) else None
    return entries.get(name) if isinstance(entries, dict) else None


def weight_names(model: nn.Module) -> list[str]:
    """The parameters that have a row of their own as weights."""
    normalizers = {path for path, module in model.named_modules() if isinstance(module, NORMALIZING)}
    plain = [(name, parameter) for name, parameter in model.named_parameters() if is_plain(parameter)]
    return [name for name, parameter in plain if parameter.dim() >= 2 and name.rpartition(".")[0] not in normalizers]
