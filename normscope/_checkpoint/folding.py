"""`ns.fold`: normalization moved into the weights beside it, proved by equal outputs in float64.

(1) BN with running statistics into the convolution or linear map before it. (2) γ and β of LN and RMSNorm into the linear maps that
read them: W (γ x̂ + β) + b = (W diag γ) x̂ + (W β + b). (3) LN's removal of the mean into what writes to its input: where a symmetry
lets every writer be shifted by a constant, their means can go, and then LN is RMSNorm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normscope._checkpoint.architecture import Flat, Found
from normscope._checkpoint.entries import Held
from normscope._checkpoint.running import TOLERANCE, inputs_like, outputs_apart, ran, without_dropout
from normscope._checkpoint.structure import Pair
from normscope.certify.fold import foldable
from normscope.core.data import Call, Example
from normscope.core.errors import InputError, InternalError, NormscopeError, Refusal, boundary, first_line
from normscope.core.rounding import euclidean_norm
from normscope.core.twins import twin_of
from normscope.graph.graph import Constant, Node
from normscope.graph.outlining import outline
from normscope.rules.readings import Joining, LinearMap, Normalizer, Permuting, Reshaping, Scaling, Sum
from normscope.rules.registry import registry
from normscope.symmetry.detect import symmetries
from normscope.symmetry.groups import ShiftGroup

KINDS = ("batch", "affine", "mean")
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CENTERED = 1e-9  # mean over root mean square of what enters LN, once it is removed before


@dataclass(frozen=True)
class Folded:
    """What `ns.fold` did: places with what was done, and others with why nothing was."""

    done: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    defect: float = 0.0


@boundary
def fold(model: nn.Module, example: Example, *, kinds: Sequence[str] = KINDS) -> nn.Module:
    """A new model that computes the same in eval mode, with normalization folded into the weights beside it.

    model: stays as it is. The new one has an attribute `folded`: what was done where, and why not elsewhere.
    example: inputs of the right shapes, on which outputs are compared in float64, with random ones like it.
    kinds: of "batch" (BN into the map before it), "affine" (γ and β into the maps behind), "mean" (LN becomes RMSNorm).

    Raises a Refusal where nothing can be folded, with the reason for each normalizer.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"fold takes a module, got {type(model).__name__}")
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise InputError(f"kinds must be some of {', '.join(KINDS)}, got {kinds!r}")
    made = twin_of(model).eval()
    work = made.double()
    call = Call.of(example)
    calls = inputs_like(call)
    before = [ran(without_dropout(twin_of(work)), one) for one in calls]
    done: dict[str, str] = {}
    refused: dict[str, str] = {}
    found = _structure(work, calls[0])
    if "batch" in kinds:
        _fold_batch_norms(work, found, done, refused)
    if "affine" in kinds:
        _fold_affine(work, _structure(work, calls[0]), done, refused)
    if "mean" in kinds:
        _fold_means(work, calls, done, refused)
    for node in found.graph:
        if (normalizer := registry.reading(node, Normalizer)) is not None and _path(node) not in done:
            refused.setdefault(_path(node), _left(normalizer, kinds))
    if not done:
        raise Refusal(
            "nothing can be folded", [f"{path}: {why}" for path, why in refused.items()] or ["the model has no normalizer"]
        )
    defect = outputs_apart(before, [ran(work, one) for one in calls])
    if not defect <= TOLERANCE:
        raise InternalError(f"folding changes the outputs by {defect:.2g} of their size")
    _as_stored(work, model)
    training = {path: module.training for path, module in model.named_modules()}
    for path, module in work.named_modules():
        module.training = training.get(path, model.training)
    work.folded = Folded(done, refused, defect)  # type: ignore[assignment]
    return work


def _left(normalizer: Normalizer, kinds: Sequence[str]) -> str:
    """Why a normalizer that no fold looked at stays."""
    if normalizer.kind in ("layer", "rms"):
        return "it has no γ and no β to move" if normalizer.gamma is None else f"γ and β stay with kinds={tuple(kinds)}"
    if normalizer.fixed:
        return f"it stays with kinds={tuple(kinds)}"
    return "it takes statistics of its input: normscope folds BN with running statistics, LN and RMSNorm"


def _as_stored(made: nn.Module, like: nn.Module) -> None:
    """Back to the types of the model, parameter by parameter; a new one has the type of the model's first."""
    own = {**dict(like.named_parameters()), **dict(like.named_buffers())}
    first = next((value.dtype for value in like.parameters() if value.is_floating_point()), torch.float32)
    for name, value in [*made.named_parameters(), *made.named_buffers()]:
        if value.is_floating_point():
            value.data = value.data.to(own[name].dtype if name in own else first)


def _structure(model: nn.Module, call: Call) -> Found:
    graph = outline(Flat(model), call.samples(slice(0, 1)) if call.batch_size > 1 else call)
    entries = {
        name: Held(name, value) for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
    }
    return Found(model, graph, ("", ""), entries)


# batch normalization -------------------------------------------------------------------------------------------------------------


def _fold_batch_norms(model: nn.Module, found: Found, done: dict[str, str], refused: dict[str, str]) -> None:
    possible = foldable(found.graph)
    nodes = [node for node in found.graph if registry.reading(node, Normalizer) is not None]
    used = Counter(_path(node) for node in nodes)
    for node in found.graph:
        normalizer = registry.reading(node, Normalizer)
        if normalizer is None or not normalizer.fixed:
            continue
        path = _path(node)
        if node not in possible:
            refused[path] = "its input does not come straight from a linear map, or something else reads that input too"
            continue
        reading = registry.reading(possible[node], LinearMap)
        owner, module = _owner(found, reading), _submodule(model, path)
        if type(module) not in BATCH:
            refused[path] = f"its type is {type(module).__name__}, which may do more than normalize its input"
        elif used[path] > 1 or _elsewhere(found, node.parameters, {node}):
            refused[path] = "it, or a parameter or statistic of it, is used elsewhere too"
        elif _hooked(module):
            refused[path] = "it has hooks, which would go with it"
        elif owner is None or reading is None:
            refused[path] = "the map before it is no plain layer with a weight and a bias of its own"
        else:
            scaled = reading.scaled(*normalizer.affine)
            assert isinstance(scaled.weight, Constant) and isinstance(scaled.bias, Constant)
            _assign(owner, scaled.weight.value, scaled.bias.value)
            _replace(model, path, nn.Identity())
            done[path] = f"folded into {_name(found, owner)}"


def _owner(found: Found, reading: LinearMap | None) -> nn.Module | None:
    """The layer whose weight a map is, if it is used there alone."""
    if reading is None or not isinstance(reading.weight, Constant) or len(reading.weight.sources) != 1:
        return None
    name = reading.weight.sources[0].removeprefix("inner.")
    module = found.model.get_submodule(name.rpartition(".")[0])
    bias = reading.bias.sources if isinstance(reading.bias, Constant) else ()
    alone = not _elsewhere(found, (name, *bias)) and type(module) in PLAIN and name.endswith(".weight")
    return module if alone else None


def _elsewhere(found: Found, names: Sequence[str], here: set[Node] | None = None) -> bool:
    """Whether a parameter or buffer is used by more than one operation, or by others than these."""
    for name in names:
        name = name.removeprefix("inner.")
        uses = found.uses.get(name, set())
        if f"inner.{name}" in found.graph.absorbed or (len(uses) > 1 if here is None else bool(uses - here)):
            return True
    return False


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# γ and β -----------------------------------------------------------------------------------------------------------------------


def _fold_affine(model: nn.Module, found: Found, done: dict[str, str], refused: dict[str, str]) -> None:
    structure = found.structure()
    for pair in structure.pairs:
        path = pair.gamma.rpartition(".")[0]
        if path in done or pair.kind not in ("layer", "rms"):
            continue
        why = _not_affine(model, found, pair)
        if why:
            refused[path] = why
            continue
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        gamma = state[pair.gamma].detach().flatten()
        gamma = gamma + 1 if pair.plus_one else gamma
        beta = state[pair.beta].detach().flatten() if pair.beta is not None else None
        for reader in pair.readers:
            layer = model.get_submodule(reader.rpartition(".")[0])
            weight: torch.Tensor = layer.weight.detach()  # type: ignore[union-attr,operator]
            shape = (-1, 1) if reader in pair.transposed else (1, -1, *[1] * (weight.dim() - 2))
            bias = layer.bias
            moved = None
            if beta is not None and bool(beta.any()):
                matrix = weight.T if reader in pair.transposed else weight.flatten(2).sum(2) if weight.dim() > 2 else weight
                moved = matrix @ beta + (bias.detach() if isinstance(bias, torch.Tensor) else 0)
            _assign(layer, weight * gamma.reshape(shape), moved)
        with torch.no_grad():
            state[pair.gamma].fill_(0.0 if pair.plus_one else 1.0)
            if pair.beta is not None:
                state[pair.beta].zero_()
        done[path] = f"γ{' and β' if beta is not None else ''} folded into {', '.join(r.rpartition('.')[0] for r in pair.readers)}"


def _not_affine(model: nn.Module, found: Found, pair: Pair) -> str:
    """Why γ and β cannot move, or nothing."""
    if not pair.readers:
        return "no weight reads its output directly"
    if not pair.complete:
        return "something else reads its output too, or scales it, or a weight that reads it is used elsewhere (tied)"
    if pair.plus_one is None:
        return "it is not known whether it stores γ or γ − 1"
    if _elsewhere(found, [pair.gamma, *([pair.beta] if pair.beta else [])]):
        return "its γ or β is used elsewhere too"
    for reader in pair.readers:
        layer = model.get_submodule(reader.rpartition(".")[0])
        plain = type(layer) in PLAIN[:4] or (type(layer).__name__ == "Conv1D" and reader in pair.transposed)
        if not plain or not reader.endswith(".weight"):
            return f"{reader} belongs to a layer of type {type(layer).__name__}, which may do more than multiply by its weight"
        moves = pair.beta is not None and bool(found.entries[pair.beta].tensor().any())
        padding = getattr(layer, "padding", 0)
        padded = padding == "same" if isinstance(padding, str) else any(padding) if isinstance(padding, tuple) else bool(padding)
        if padded and moves:
            return f"{reader} pads its input, where β would be needed"
        if moves and _elsewhere(found, [reader.removesuffix("weight") + "bias"]):
            return f"the bias beside {reader} is used elsewhere too"
    return ""


# the mean -----------------------------------------------------------------------------------------------------------------------


def _fold_means(model: nn.Module, calls: list[Call], done: dict[str, str], refused: dict[str, str]) -> None:
    """Writers lose their means by shifts that a symmetry allows; each LN that is then given centered inputs becomes RMSNorm."""
    norms = {
        path: module for path, module in model.named_modules() if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1
    }
    if not norms:
        return
    try:
        report = symmetries(model, calls[0].args or calls[0].kwargs, mode="eval")  # type: ignore[arg-type]
    except NormscopeError as error:
        refused |= {
            path: f"its mean stays: the search for symmetries failed ({first_line(error)})" for path in norms if path not in done
        }
        return
    parameters = dict(model.named_parameters())
    writers: set[str] = set()
    with torch.no_grad():
        for group in report.of_kind("shift", "weight-shift"):
            free = isinstance(group, ShiftGroup) and group.normal is None and group.compensation is None and len(group.actions) == 1
            if free and group.path and group.path[-1] in norms:
                action = group.actions[0]
                members = torch.tensor(action.members).expand(action.shape).flatten()
                value = parameters[action.parameter]
                kept = members >= 0
                flat = value.detach().flatten().clone()
                total = torch.zeros(int(members.max()) + 1, dtype=flat.dtype).index_add_(0, members[kept], flat[kept])
                count = torch.zeros_like(total).index_add_(0, members[kept], torch.ones_like(flat[kept]))
                flat[kept] -= (total / count.clamp(min=1))[members[kept]]
                value.copy_(flat.reshape(value.shape))
                writers.add(action.parameter)
    worst = _means(model, norms, calls)
    entered: dict[str, list[Node]] = {}
    for node in _structure(model, calls[0]).graph:
        if registry.reading(node, Normalizer) is not None:
            entered.setdefault(_path(node), []).append(node.inputs[0])
    for path, module in norms.items():
        if worst.get(path, 1.0) > CENTERED or path not in entered or not all(_written(node, writers) for node in entered[path]):
            refused.setdefault(path, "its mean stays: something that writes to its input cannot be centered")
            continue
        if _hooked(module):
            refused.setdefault(path, "its mean stays: it has hooks, which would go with it")
            continue
        if module.bias is not None and bool(module.bias.any()):
            refused.setdefault(path, "its mean stays: it has a β, and RMSNorm has none")
            continue
        new = nn.RMSNorm(module.normalized_shape[0], eps=module.eps, elementwise_affine=module.weight is not None).double()
        if module.weight is not None:
            new.weight = module.weight
        _replace(model, path, new.train(module.training))
        refused.pop(path, None)
        done[path] = (f"{done[path]}; " if path in done else "") + "LN became RMSNorm, because its input now has zero mean"


def _written(node: Node, writers: Collection[str]) -> bool:
    """Whether a value is, for every input, a sum of what centered weights, rows of tables and constants write."""
    reading = registry.reading(node)
    centered = all(name.removeprefix("inner.") in writers for name in node.parameters)
    centered &= all(constant.sources for constant in node.constants)
    if isinstance(reading, LinearMap):
        return centered and not isinstance(reading.weight, Node)
    passes = isinstance(reading, (Reshaping, Permuting, Joining, Sum)) or (
        isinstance(reading, Scaling) and isinstance(reading.factor, (int, float))
    )
    looked_up = bool(node.parameters) and all(one.dtype is not None and not one.dtype.is_floating_point for one in node.inputs)
    return centered and (looked_up or (passes and bool(node.inputs) and all(_written(one, writers) for one in node.inputs)))


def _means(model: nn.Module, norms: Mapping[str, nn.Module], calls: list[Call]) -> dict[str, float]:
    """The largest |mean|/rms of what enters each normalizer."""
    found: dict[str, float] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach().double()
            size = euclidean_norm(x, -1) / math.sqrt(x.shape[-1])
            ratio = (x.mean(-1).abs() / torch.where(size > 0, size, 1.0)).max()
            found[path] = max(found.get(path, 0.0), float(ratio))

        return hook

    handles = [module.register_forward_pre_hook(watch(path)) for path, module in norms.items()]
    try:
        for call in calls:
            ran(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return found


# modules -----------------------------------------------------------------------------------------------------------------------


def _path(node: Node) -> str:
    return node.path.removeprefix("inner.").removeprefix("inner")


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _name(found: Found, module: nn.Module) -> str:
    return next((path for path, one in found.model.named_modules() if one is module), "")


def _assign(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with torch.no_grad():
        layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=bool(layer.weight.requires_grad))
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bool(layer.weight.requires_grad))


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
