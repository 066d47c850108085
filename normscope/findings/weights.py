"""What rules on weights alone ask for: the same of a model in memory and of tensors in files, one tensor at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from normscope.findings.table import NEEDS

if TYPE_CHECKING:
    from normscope.findings.subject import Subject

FEW_STEPS = 10  # after which weights count as trained


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


@dataclass(frozen=True)
class ModelWeights:
    """What rules on weights alone ask of a model in memory."""

    subject: Subject

    @property
    def trained(self) -> bool:
        """An optimizer that has made steps with them says so; so do running statistics."""
        norms = self.subject.batch_norms.values()
        tracked = any(module.num_batches_tracked is not None and int(module.num_batches_tracked) >= FEW_STEPS for module in norms)
        return self.subject.stepped or tracked

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.subject.model
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                yield name, tensor.detach()

    def normalizers(self) -> dict[str, StoredNormalizer]:
        """Torch's own, and those written by hand whose γ the graph shows."""
        found = {path: _stored(module) for path, module in self.subject.torch_normalizers.items()}
        for name, gamma in self.subject.handwritten_scales.items():
            found.setdefault(name.rpartition(".")[0] or name, StoredNormalizer(gamma=gamma))
        return found


def _stored(module: Any) -> StoredNormalizer:
    parts = (getattr(module, name, None) for name in ("weight", "bias", "running_mean", "running_var"))
    gamma, beta, mean, variance = (None if part is None else part.detach() for part in parts)
    return StoredNormalizer(gamma, beta, mean, variance, getattr(module, "eps", None))
