"""What rules on weights alone ask for: the same of a model in memory and of tensors in files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from normscope.findings.table import NEEDS


@dataclass(frozen=True)
class StoredNormalizer:
    """γ, β and running statistics of one normalizer, None where it has none or nothing is known of it."""

    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    running_mean: torch.Tensor | None = None
    running_var: torch.Tensor | None = None
    epsilon: float | None = None


class Weights(Protocol):
    """trained: whether it is known that these are the weights of a training, not of an initialization."""

    @property
    def trained(self) -> bool: ...

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Every tensor of floating-point numbers by name, one at a time."""

    def normalizers(self) -> Mapping[str, StoredNormalizer]:
        """By module path; they are small."""


class HasWeights(Protocol):
    """What a rule on weights alone is run on."""

    @property
    def weights(self) -> Weights: ...


@dataclass(frozen=True)
class WeightsAlone:
    """A subject for rules that need nothing but weights: `judged(WeightsAlone(weights), chosen_rules())` of findings.catalogue."""

    weights: Weights

    def missing(self, needs: tuple[str, ...]) -> str:
        return next((NEEDS[need] for need in needs if need != "weights"), "")
