"""Which normalizer for this model and batch size, as advice (Akbar, sections 9.1 and 9.4, as a start)."""

from __future__ import annotations

from torch import nn

from normscope.core.data import Example
from normscope.findings.subject import Subject
from normscope.rules.readings import Attention
from normscope.rules.registry import registry

SMALL_BATCH = 8


def choice(model: nn.Module, example: Example, batch: int) -> str:
    """A paragraph that names a normalizer and says why; the facts it rests on come first."""
    subject = Subject(model, example)
    graph = subject.graph
    if graph is None:
        return f"No advice: {subject.why_no_graph}"
    convolutions = sum(applied.kernel is not None for applied in subject.weighted.values())
    attention = sum(registry.reading(node, Attention) is not None for node in graph)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    present = sorted({normalizer.kind for _, normalizer in subject.normalizers}) or ["none"]
    facts = (
        f"{len(subject.weighted)} weight layers, {convolutions} convolutions, {attention} attention layers, batches of {batch}; "
        f"normalizers now: {', '.join(present)}."
    )
    if attention or recurrent:
        name, why = "RMSNorm or LayerNorm, before each branch", (
            "tokens of one sequence share weights but not statistics, and a normalizer that depends on other samples leaks across "
            "positions and fails at generation; inside the branch it leaves the skip path alone"
        )  # fmt: skip
    elif convolutions and batch < SMALL_BATCH:
        name, why = "GroupNorm with 16 to 32 groups", (
            f"statistics of {batch} samples are too noisy for BatchNorm, while groups of channels have many elements"
        )  # fmt: skip
    elif convolutions:
        name, why = "BatchNorm, directly behind each convolution without bias", (
            "batches are large enough for its statistics, in eval mode it folds into the convolution and costs nothing, and it "
            "makes every filter scale-free"
        )  # fmt: skip
    else:
        name, why = ("BatchNorm" if batch >= 32 else "LayerNorm"), (
            "for a plain dense network the choice matters less; BatchNorm needs batches of some dozens, LayerNorm none"
        )  # fmt: skip
    return f"{facts}\nAdvice: {name}, because {why}.\nThis is advice, not a finding; train both if it matters."
