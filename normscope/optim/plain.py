"""The steps of torch.optim.SGD and torch.optim.AdamW for the parameters that no symmetry touches, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from normscope.core.errors import InputError

States = Mapping[torch.Tensor, dict[str, Any]]


def step_sgd(states: States, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
    """The step of torch.optim.SGD, with its penalty λ/2 ‖θ‖² where weight decay is asked for."""
    gradients = [parameter.grad for parameter in parameters]
    momenta = [states[parameter].get("momentum_buffer") for parameter in parameters]
    sgd(
        list(parameters), gradients, momenta, has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
        foreach=group["foreach"], weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"], dampening=0,
        nesterov=group["nesterov"], maximize=False,
    )  # fmt: skip
    if group["momentum"]:
        for parameter, momentum in zip(parameters, momenta, strict=True):
            states[parameter]["momentum_buffer"] = momentum


def step_adamw(states: States, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
    """The step of torch.optim.AdamW; without weight decay it is that of torch.optim.Adam."""
    if any(parameter.grad.is_sparse for parameter in parameters):
        raise InputError("Adam's moments need dense gradients: use sparse=False in the embedding, or an SGD of normscope")
    for parameter in parameters:
        state = states[parameter]
        state.setdefault("step", torch.zeros(()))
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
    beta1, beta2 = group["betas"]
    columns = ([states[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq"))
    adamw(
        list(parameters), [parameter.grad for parameter in parameters], *columns, [],
        [states[parameter]["step"] for parameter in parameters], foreach=group["foreach"],
        has_complex=any(parameter.is_complex() for parameter in parameters), amsgrad=False, beta1=beta1, beta2=beta2,
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
