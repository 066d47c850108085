"""Mechanical fixes, each followed by a comparison of outputs before and after."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope._doctor.recalibration import recalibrate
from normscope.core.data import Call, Example
from normscope.core.errors import InputError
from normscope.core.twins import twin_of
from normscope.findings.finding import Finding, Repair
from normscope.findings.subject import Subject
from normscope.findings.training import HALF, harmed_by_decay

CHANNELS_PER_GROUP = 16  # Wu & He 2018, table 3: as good as a fixed number of groups, and never down to two elements


def repaired(subject: Subject, findings: Sequence[Finding], select: Sequence[str] = ()) -> tuple[nn.Module, list[Repair]]:
    """A repaired copy, and what each repair did to its output in eval mode on the example.

    select: rules whose fixes are wanted, those among them that change what the model computes.
    """
    for rule in select:
        if rule not in FIXES:
            raise InputError(f"no mechanical fix for {rule}: choose from {', '.join(sorted(FIXES))}")
    mended, repairs, done = twin_of(subject.model), [], set()
    for finding in findings:
        fix = FIXES.get(finding.rule)
        if fix is None or (finding.rule not in select if select else fix.asked_for) or fix.change in done:
            continue
        before = _outputs(mended, subject.example)
        what = fix.change(mended, finding, subject)
        if what:
            repairs.append(Repair(finding.rule, finding.where, what, _change(before, _outputs(mended, subject.example))))
            done |= {fix.change} if fix.whole else set()
    return mended, repairs


def _outputs(model: nn.Module, example: Example) -> list[torch.Tensor]:
    call, modes = Call.of(example), {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        outputs = model(*call.args, **call.kwargs)
    for module, training in modes.items():
        module.training = training
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _change(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    changes = [
        float((a.double() - b.double()).abs().max()) / max(float(a.double().abs().max()), 1e-30)
        for a, b in zip(before, after, strict=True)
        if a.numel()
    ]
    return max(changes, default=0.0)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


# each changes a model in place, and says what it did, or nothing where there was nothing to do -----------------------------------


def drop_bias(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """Remove a bias before normalizers and take it off their running means, so that eval mode computes the same."""
    layer, removers = model.get_submodule(finding.where), str(finding.evidence["removed_by"]).split(", ")
    uses = [node.path for node, _ in subject.normalizers]
    if getattr(layer, "bias", None) is None or any(uses.count(path) > 1 for path in removers):  # one mean, several biases (NS104)
        return ""
    bias: Any = layer.bias.detach()
    layer.bias = None
    for path in removers:
        mean: Any = getattr(model.get_submodule(path), "running_mean", None)
        if mean is not None:
            mean.sub_(bias.to(mean.dtype))
    return "bias dropped, running means lowered by it"


def drop_parametrization(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """Keep the weight that a parametrization computes, and train it as it is."""
    layer = model.get_submodule(finding.where)
    if not parametrize.is_parametrized(layer, "weight"):
        return ""
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return "parametrization removed, weight kept"


class FrozenBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch normalizer that stays in eval mode and has no gradient, whatever `model.train()` says."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Whatever the layer took before."""


def freeze(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """Freeze the layer for good, with the statistics that it has."""
    layer = model.get_submodule(finding.where)
    frozen = FrozenBatchNorm.__new__(FrozenBatchNorm)
    frozen.__dict__ = layer.__dict__
    _put(model, finding.where, frozen.train().requires_grad_(False))
    return "frozen: no gradient, and eval mode even after model.train()"


def full_precision(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """Keep every normalizer in half precision in float32, and compute it there; what it returns has the type that it had."""
    names = {name.rpartition(".")[0] for name, p in subject.normalizer_parameters.items() if p.dtype in HALF}
    names |= {
        path for path, module in subject.batch_norms.items() if module.running_var is not None and module.running_var.dtype in HALF
    }
    changed = 0
    for path in sorted(names):
        layer = model.get_submodule(path)
        tensors = [*layer.parameters(), *layer.buffers()]
        if any(tensor.dim() > 1 for tensor in tensors):  # more than a normalizer
            continue
        dtype = next(tensor.dtype for tensor in tensors if tensor.dtype in HALF)
        layer.float()
        layer.register_forward_pre_hook(partial(_cast_inputs, dtype=torch.float32), with_kwargs=True)
        layer.register_forward_hook(partial(_cast_output, dtype=dtype))
        changed += 1
    return f"{changed} normalizers in float32, their outputs as before" if changed else ""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(module: nn.Module, args: Any, output: Any, dtype: torch.dtype) -> Any:
    return _cast(output, dtype)


def new_statistics(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """Estimate all running statistics anew on the data, if there is any."""
    if subject.data is None:
        return ""
    renewed = recalibrate(model, subject.data, example=subject.example)
    model.load_state_dict(renewed.state_dict())
    return "running statistics estimated anew on the data (ns.recalibrate)"


def group_norms(model: nn.Module, finding: Finding, subject: Subject) -> str:
    """GroupNorm in the place of every batch normalizer, with its γ and β."""
    for path, layer in list(subject.batch_norms.items()):
        channels = layer.num_features
        groups = max(count for count in range(1, max(channels // CHANNELS_PER_GROUP, 1) + 1) if channels % count == 0)
        made = nn.GroupNorm(groups, channels, layer.eps, affine=layer.affine)
        if layer.affine:
            made.load_state_dict({"weight": layer.weight, "bias": layer.bias})
            made.to(layer.weight)
        _put(model, path, made.train(layer.training))
    return f"GroupNorm for {len(subject.batch_norms)} batch normalizers, with their γ and β; to be trained before use"


@dataclass(frozen=True)
class Fix:
    """asked_for: only where its rule is selected, because it replaces what was trained. whole: once for the whole model."""

    change: Callable[[nn.Module, Finding, Subject], str]
    asked_for: bool = False
    whole: bool = False


FIXES: dict[str, Fix] = {
    "NS101": Fix(drop_bias), "NS109": Fix(drop_parametrization), "NS206": Fix(freeze),
    "NS201": Fix(new_statistics, whole=True), "NS205": Fix(new_statistics, whole=True),
    "NS307": Fix(full_precision, whole=True), "NS312": Fix(full_precision, whole=True),
    "NS302": Fix(group_norms, asked_for=True, whole=True), "NS311": Fix(group_norms, asked_for=True, whole=True),
}  # fmt: skip


def optimizer_for(subject: Subject, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings for a repaired model, without decay where NS301 finds harm; its state is new."""
    assert subject.optimizer is not None
    old, harmed = subject.optimizer, harmed_by_decay(subject)
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}
    there = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for group in old.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for apart in (False, True):
            own = [there[name] for name in held if name in there and (name in harmed) is apart]
            if own:
                groups.append({**settings, "params": own, **({"weight_decay": 0.0} if apart else {})})
    forgotten = [name for name in subject.forgotten if name in there]
    if forgotten:
        groups.append({"params": [there[name] for name in forgotten], "weight_decay": 0.0})
    taken = inspect.signature(type(old)).parameters
    return type(old)(groups, **{key: value for key, value in old.defaults.items() if key in taken})
