"""What the rules say about a checkpoint: those on weights alone, which the doctor has too, and those on files."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from normscope._checkpoint.opening import Checkpoint
from normscope._checkpoint.report import CheckpointReport
from normscope._checkpoint.structure import Structure
from normscope.findings import state, stored  # noqa: F401  the rules register themselves
from normscope.findings.finding import SEVERITIES, Findings
from normscope.findings.stored import StoredSubject
from normscope.findings.table import RULES, chosen_rules, judged
from normscope.findings.weights import StoredNormalizer

EXCESS, LEAST = 1.5, 64  # ‖W‖ over that of independent entries of its size, from which it was trained; rows and columns it needs
EPSILON_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint as rules see it: small tensors are read when asked for, and of large ones the report's numbers are used."""

    opened: Checkpoint
    structure: Structure
    report: CheckpointReport

    @cached_property
    def trained(self) -> bool:
        """Whether most matrices have a larger norm than independent entries of their size would give them.

        The norm of an m × n matrix of independent entries of size s is about s (√m + √n).
        """
        excess = [
            row.spectral_norm * (row.shape[0] * columns) ** 0.5 / (row.frobenius_norm * (row.shape[0] ** 0.5 + columns**0.5))
            for row in self.report.tensors
            if len(row.shape) >= 2 and row.spectral_norm and row.role != "embedding"
            and (columns := _columns(row.shape)) >= LEAST and row.shape[0] >= LEAST
        ]  # fmt: skip
        return bool(excess) and statistics.median(excess) > EXCESS

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors with entries that are not finite, and the small ones: the report has counted those of the others."""
        for row in self.report.tensors:
            if row.not_finite:
                yield row.name, self.opened.entries[row.name].tensor()

    def normalizers(self) -> Mapping[str, StoredNormalizer]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        parts = {"γ": "gamma", "β": "beta", "running mean": "running_mean", "running variance": "running_var"}
        for name, role in self.structure.roles.items():
            if role.kind in parts:
                found.setdefault(name.rpartition(".")[0], {})[parts[role.kind]] = self.opened.entries[name].tensor()
        made = {}
        for path, own in found.items():
            if "gamma" in own and self.reads.get(f"{path}.weight"):
                own["gamma"] = 1 + own["gamma"]
            made[path] = StoredNormalizer(**own, epsilon=self._epsilon(f"{path}.weight"))
        return made

    @cached_property
    def reads(self) -> dict[str, bool | None]:
        # BN of any kind is read as it is
        return {name: None if pair is None else pair.plus_one for name, pair in self.structure.gammas.items()}

    @cached_property
    def gammas(self) -> dict[str, torch.Tensor]:
        return {name: self.opened.entries[name].tensor() for name in self.structure.gammas}

    @property
    def peers(self) -> list[dict[str, float]]:
        groups: dict[str, dict[str, float]] = {}
        for row in self.report.tensors:
            if len(row.shape) >= 2 and row.spectral_norm is not None:
                groups.setdefault(re.sub(r"\d+", "#", row.name), {})[row.name] = row.spectral_norm
        return list(groups.values())

    @property
    def logits(self) -> dict[str, tuple[float, str]]:
        types = {row.name: row.dtype for row in self.report.tensors}
        found = {}
        for row in self.report.attention:
            if row.bound is not None:
                own = next(
                    (dtype for name, dtype in types.items() if name.startswith(row.layer) and "q" in name.rpartition(row.layer)[2]),
                    "",
                )
                found[row.layer] = (row.bound, own)
        return found

    @property
    def epsilons(self) -> dict[str, tuple[float, str]]:
        found = {}
        for name in self.structure.gammas:
            epsilon = self._epsilon(name)
            if epsilon is not None:
                found[name] = (epsilon, self.opened.entries[name].dtype)
        return found

    def _epsilon(self, gamma: str) -> float | None:
        pair = self.structure.gammas.get(gamma)
        if pair is not None and pair.epsilon is not None:
            return pair.epsilon
        given = (self.opened.config.get(name) for name in EPSILON_KEYS)
        return next((float(value) for value in given if isinstance(value, (int, float))), None)


def judge(opened: Checkpoint, structure: Structure, report: CheckpointReport) -> Findings:
    """What every rule that needs only weights or files finds."""
    weights = StoredWeights(opened, structure, report)
    rules = [id for id in chosen_rules() if {*RULES[id].needs} <= {"weights", "files"}]
    found, checked, not_checked = judged(StoredSubject(weights, weights), rules)
    ordered = sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
    return Findings(tuple(ordered), tuple(checked), not_checked)


def _columns(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[1:]:
        count *= size
    return count
