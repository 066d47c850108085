"""NS6xx: what files of weights say when nothing but the files is there."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from normscope.findings.finding import Evidence
from normscope.findings.table import NEEDS, Hit, rule
from normscope.findings.weights import Weights

NEGATIVE, POSITIVE = 0.25, 0.01  # shares of entries below zero: of w in γ = 1 + w, and of γ itself
AROUND = (0.8, 1.2)  # where the medians of γ lie that nobody subtracted 1 from
FEW, OUT_OF_LINE = 6, 20.0  # peers that make a line, and how many times their median is out of it
LARGEST_HALF = 65504.0


class StoredTensors(Protocol):
    """What the rules below ask for."""

    @property
    def reads(self) -> Mapping[str, bool | None]:
        """γ by name, and whether its model makes γ = 1 + w of what is stored; None where nobody says."""

    @property
    def gammas(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def peers(self) -> Sequence[Mapping[str, float]]:
        """Spectral norms of the same tensor in every block."""

    @property
    def logits(self) -> Mapping[str, tuple[float, str]]:
        """Attention layers, the largest logit and the type of the weights."""

    @property
    def epsilons(self) -> Mapping[str, tuple[float, str]]:
        """γ by name, its ε and the type in which it is stored."""


@dataclass(frozen=True)
class StoredSubject:
    """A subject for rules on files: `judged(StoredSubject(weights, stored), chosen_rules())`."""

    weights: Weights
    stored: StoredTensors
    have: frozenset[str] = field(default=frozenset({"weights", "files"}))

    def missing(self, needs: tuple[str, ...]) -> str:
        return next((NEEDS[need] for need in needs if need not in self.have), "")


@rule(
    "NS601", "γ stored in the other convention", "error",
    fix="Store 1 + w where the model reads γ, and γ − 1 where it reads 1 + w; then compare with ns.diff.",
    reference="llama.cpp #22565, vllm #31464, mlx-vlm #2041", needs=("files",),
)  # fmt: skip
def other_convention(subject: StoredSubject) -> Iterator[Hit]:
    """Some models store γ, others w with γ = 1 + w. A file in the wrong convention loads without an error and gives garbage.
    Entries of w scatter around 0, and at least a quarter are below it; entries of γ are hardly ever below 0. BN is always stored
    as γ."""
    stored = subject.stored
    batch = {f"{path}.weight" for path, own in subject.weights.normalizers().items() if own.running_var is not None}
    read = {name: plus_one for name, plus_one in stored.reads.items() if stored.gammas[name].numel() > 1 and name not in batch}
    for expected in (False, True):
        names = [name for name, plus_one in read.items() if plus_one is expected]
        values = [stored.gammas[name].double() for name in names]
        if len(names) < 2 or not all(bool(value.isfinite().all()) for value in values):
            continue
        pooled = torch.cat(values)
        below, medians = float((pooled < 0).double().mean()), [float(value.median()) for value in values]
        spread = any(bool((value != value[0]).any()) for value in values)
        evidence: Evidence = {"normalizers": len(names), "below_zero": below, "median": float(pooled.median())}
        if not expected and spread and below >= NEGATIVE and abs(float(pooled.median())) < 0.5:
            yield Hit(names[0], f"γ of {len(names)} norms is read as it is, but scatters around 0 as w of 1 + w does", evidence)
        around = sum(AROUND[0] <= median <= AROUND[1] for median in medians)
        if expected and below <= POSITIVE and around >= 0.8 * len(medians):
            yield Hit(names[0], f"w of {len(names)} norms is read as γ = 1 + w, but lies around 1 as γ does", evidence)


@rule(
    "NS602", "a norm out of line with its peers", "warning",
    fix="Compare the tensor with an earlier checkpoint (ns.diff): it diverged, or was damaged on the way.",
    reference="docs/checkpoints.md", needs=("files",),
)  # fmt: skip
def out_of_line(subject: StoredSubject) -> Iterator[Hit]:
    """The same tensor has norms of the same size in every block of a network. One that is twenty times the median of its peers, or
    a twentieth, has diverged, or was scaled or cut by mistake when files were converted."""
    for group in subject.stored.peers:
        if len(group) < FEW:
            continue
        usual = statistics.median(group.values())
        for name, norm in group.items():
            if usual > 0 and not usual / OUT_OF_LINE <= norm <= usual * OUT_OF_LINE:
                yield Hit(name, f"its norm is {norm:.3g}, that of its peers {usual:.3g}", {"norm": norm, "peers": usual})


@rule(
    "NS603", "attention logits that float16 cannot hold", "info",
    fix="Compute attention in bfloat16 or float32, normalize queries and keys, or clip their weights (QK-clip).",
    reference="Dehghani et al. 2023, section 2; docs/checkpoints.md", needs=("files",),
)  # fmt: skip
def large_logits(subject: StoredSubject) -> Iterator[Hit]:
    """Logits are at most the product of the norms of queries and keys. Where that product exceeds 65504 and the weights are
    float16, float16 may overflow; q·k that grows without limit is how trainings diverge."""
    for layer, (bound, dtype) in subject.stored.logits.items():
        if bound > LARGEST_HALF and dtype == "F16":
            yield Hit(layer, f"logits can be as large as {bound:.3g}", {"bound": bound})


@rule(
    "NS604", "an ε that the stored type cannot hold", "warning",
    fix="Compute normalizers in float32, or raise ε to 1e-5.",
    reference="docs/doctor.md", needs=("files",),
)  # fmt: skip
def lost_epsilon(subject: StoredSubject) -> Iterator[Hit]:
    """In float16 an ε below 6e-8 is zero, and one below 6e-5 is not exact: an input of zeros is then divided by zero, unless the
    normalizer computes in float32."""
    lost = [name for name, (epsilon, dtype) in subject.stored.epsilons.items() if dtype == "F16" and epsilon < 2.0**-25]
    if lost:
        yield Hit(lost[0], f"ε of {len(lost)} norms is zero in float16", {"normalizers": len(lost)})
