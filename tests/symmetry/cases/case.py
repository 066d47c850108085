"""A small model with all of its symmetries, and how a group is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.symmetry.groups import Group
from tests.networks import randn


@dataclass(frozen=True)
class Case:
    """A model, an example, and its groups as `described` writes them; unnamed: null directions that no group names."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    groups: tuple[str, ...]
    mode: str = "train"
    unnamed: int = 0

    @property
    def example(self) -> Tensor:
        return randn(*self.shape)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().train()
            for name, buffer in model.named_buffers():  # as after training: initial statistics hide what they add
                if name.endswith("running_mean"):
                    buffer.normal_()
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 2.0)
            return model


def described(group: Group) -> str:
    """ "kind count: parameter[axes]", with /block where a member has several indices and ^degree where that is not 1."""
    parts = []
    for name, axes, block, degree in zip(group.parameters, group.axes, group.blocks, group.degrees, strict=True):
        each = f"[{','.join(map(str, axes))}]" if axes else ""
        parts.append(name + each + (f"/{block}" if block > 1 else "") + ("" if degree == 1 else f"^{degree:g}"))
    return f"{group.kind} {group.count}: {' '.join(parts)}"
