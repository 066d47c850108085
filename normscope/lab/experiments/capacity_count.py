"""Capacity against the number of normalizers, in residual and attention networks, where the paper's theorems do not reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.lab.training import Training, TrainingSettings

BALL = 0.01  # radius of the balls on which constants are bracketed; attention has no finite constant everywhere
SAMPLES = 3
NORMALIZER = {"mlp": "batch", "vit": "layer", "resnet18": "batch"}
SIDES = {"upper": "certified upper bound", "lower": "witnessed lower bound"}


@dataclass(frozen=True)
class Kept(Training):
    """share: of the normalizers that stay, spread over the depth; the others are left out."""

    share: float = 1.0


@dataclass(frozen=True)
class CapacitySettings(TrainingSettings):
    networks: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {
            "mlp": {"width": 32, "depth": 10, "skip": True},
            "vit": {"patch": 4, "width": 16, "depth": 3, "heads": 2},
        }
    )
    normalizers: tuple[str, ...] = ()
    epochs: int = 10
    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
