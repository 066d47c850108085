"""Mechanical fixes, each followed by a comparison of outputs before and after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from normscope.core.data import Call, Example
from normscope.findings.finding import Finding, Repair

Fix = Callable[[nn.Module, Finding], str]  # changes a model in place, says what it did or nothing


def repaired(model: nn.Module, example: Example, findings: Sequence[Finding]) -> tuple[nn.Module, list[Repair]]:
    """A repaired copy, and what each repair did to its output in eval mode on the example."""
    mended = copy.deepcopy(model)
    repairs = []
    for finding in findings:
        fix = FIXES.get(finding.rule)
        if fix is None:
            continue
        before = _outputs(mended, example)
        what = fix(mended, finding)
        if what:
            repairs.append(Repair(finding.rule, finding.where, what, _change(before, _outputs(mended, example))))
    return mended, repairs


def _outputs(model: nn.Module, example: Example) -> list[torch.Tensor]:
    call, modes = Call.of(example), {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        outputs = model(*call.args, **call.kwargs)
    for module, training in modes.items():
        module.training = training
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _change(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    changes = [
        float((a.double() - b.double()).abs().max()) / max(float(a.double().abs().max()), 1e-30)
        for a, b in zip(before, after, strict=True)
        if a.numel()
    ]
    return max(changes, default=0.0)


def drop_bias(model: nn.Module, finding: Finding) -> str:
    """Remove a bias before normalizers and take it off their running means, so that eval mode computes the same."""
    layer = model.get_submodule(finding.where)
    if getattr(layer, "bias", None) is None:
        return ""
    bias: Any = layer.bias.detach()
    layer.bias = None
    for path in str(finding.evidence["removed_by"]).split(", "):
        mean: Any = getattr(model.get_submodule(path), "running_mean", None)
        if mean is not None:
            mean.sub_(bias.to(mean.dtype))
    return "bias dropped, running means lowered by it"


def drop_parametrization(model: nn.Module, finding: Finding) -> str:
    """Keep the weight that a parametrization computes, and train it as it is."""
    layer = model.get_submodule(finding.where)
    if not parametrize.is_parametrized(layer, "weight"):
        return ""
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return "parametrization removed, weight kept"


def stop_gradient(model: nn.Module, finding: Finding) -> str:
    """Freeze the layer with the statistics that it has."""
    layer = model.get_submodule(finding.where)
    layer.eval()
    layer.requires_grad_(False)
    return "frozen: eval mode, no gradient"


def full_precision(model: nn.Module, finding: Finding) -> str:
    """Compute the layer in float32."""
    model.get_submodule(finding.where).float()
    return "in float32"


FIXES: dict[str, Fix] = {"NS101": drop_bias, "NS109": drop_parametrization, "NS206": stop_gradient, "NS307": full_precision}
