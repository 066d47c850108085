"""`normscope doctor --optimizer`: any of torch.optim by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.cli.doctor import optimizer_of


def test_an_optimizer_by_its_name() -> None:
    made = optimizer_of("adamw:lr=1e-3,weight_decay=0.1", nn.Linear(2, 2))
    assert type(made) is torch.optim.AdamW and made.param_groups[0]["lr"] == 1e-3 and made.param_groups[0]["weight_decay"] == 0.1
    assert type(optimizer_of("SGD:lr=0.1,nesterov=True,momentum=0.9", nn.Linear(2, 2))) is torch.optim.SGD


@pytest.mark.parametrize(
    "text", ["adamx:lr=1", "adamw:lr=q", "adamw:lr", "adamw:rate=1", "adamw:lr=-1", "adamw:lr=__import__('os')"]
)
def test_what_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ns.InputError, match=r"choose from|adamw:lr=1e-3,weight_decay=0\.1"):
        optimizer_of(text, nn.Linear(2, 2))
