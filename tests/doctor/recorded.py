"""Recorded runs for the doctor: healthy ones, and ones in which a column changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope._watch.life import Life
from normscope.findings.catalogue import RULES
from normscope.findings.finding import Finding
from normscope.findings.table import Hit
from tests.doctor.patients import Patient, conv

STEPS = 160  # of a recorded run, one sample each
LAYERS = (
    {"name": "first", "role": "weight", "scale_free": True, "in_product": True, "parameter": "first.weight", "epsilon": None},
    {
        "name": "second",
        "role": "normalizer",
        "scale_free": None,
        "in_product": False,
        "parameter": "second.weight",
        "epsilon": 1e-5,
    },
)
HEALTHY: dict[str, Any] = {
    "loss": 1.0, "total_gradient_norm": 1.0, "learning_rate": 0.1, "log10_weight_product": 2.0, "log10_gain_tight": 0.5,
    "spectral_norm": [1.0, np.nan], "gain_tight": [np.nan, 1.0], "frobenius_norm": [3.0, 2.0], "gradient_norm": [0.6, 0.8],
    "input_variance": [np.nan, 1.0], "dead_fraction": [np.nan, 0.1], "effective_lr": [0.1, np.nan],
    "running_divergence": [np.nan, 0.1], "running_shift": [np.nan, 0.1], "update_norm": [0.1, 0.1], "largest_input": [np.nan, 2.5],
    "update_ratio": [0.01, 0.01], "batch_size": [np.nan, 32.0], "update_rms": [0.01, 0.01], "attention_logit": [5.0, np.nan], "attention_entropy": [0.5, np.nan], "write_ratio": [0.5, np.nan],
}  # fmt: skip


@dataclass
class Recorded:
    """A run as `ns.load_run` gives it."""

    held: dict[str, np.ndarray]
    findings: tuple[Finding, ...] = ()
    layers = LAYERS
    judged = {}

    @property
    def life(self) -> Life:
        return Life("finished", int(self.held["step"][-1]))

    @property
    def columns(self) -> list[str]:
        return list(self.held)

    def arrays(self, *columns: str) -> dict[str, np.ndarray]:
        return {name: self.held[name] for name in ("step", *columns)}


APART = RULES["NS515"].finding(Hit("first.weight", "first.weight differs on rank 1"))  # seen between processes, not in rows


def recorded(every: int = 1, seen: tuple[Finding, ...] = (), **changed: Any) -> Patient:
    """A healthy run in which, from sample 120 on, a column has another value: one for each layer, a function of the step, or a number.

    every: steps between samples. seen: findings of the training itself.
    """
    steps = every * np.arange(1, STEPS + 1)
    held = {name: np.tile(np.array(value, float), (STEPS, 1)).squeeze() for name, value in HEALTHY.items()} | {"step": steps}
    for name, value in changed.items():
        late = [value(step) for step in steps[119:]] if callable(value) else [value] * (STEPS - 119)
        held[name] = np.concatenate([held[name][:119], np.array(late, float)])
    patient = conv()
    patient.settings["run"] = Recorded(held, seen)
    return patient
