"""How long the doctor takes without data, tracing aside: ResNet-18 and GPT-2 in their standard sizes."""

from __future__ import annotations

import statistics
import time

import torch

from normscope.findings.catalogue import RULES, chosen_rules
from normscope.findings.subject import Subject
from normscope.lab.models import resnet18

REPEATS = 3


def main() -> None:
    import transformers

    generator = torch.Generator().manual_seed(0)
    settings = transformers.GPT2Config(use_cache=False)
    cases = {
        "ResNet-18": (resnet18(), torch.randn(1, 3, 224, 224, generator=generator), None),
        "GPT-2": (
            transformers.GPT2Model(settings),
            {"inputs_embeds": torch.randn(1, 16, settings.n_embd, generator=generator)},
            "last_hidden_state",
        ),
    }
    print(f"{'model':>10} {'tracing':>9} {'checks':>9}   slowest checks, seconds")
    for name, (model, example, output) in cases.items():
        rows = [examined(model, example, output) for _ in range(REPEATS)]
        tracing, checks = (statistics.median(row[i] for row in rows) for i in (0, 1))
        slowest = sorted(rows[-1][2].items(), key=lambda item: -item[1])[:3]
        print(f"{name:>10} {tracing:9.2f} {checks:9.2f}   " + ", ".join(f"{rule} {spent:.2f}" for rule, spent in slowest))


def examined(model: torch.nn.Module, example: object, output: str | None) -> tuple[float, float, dict[str, float]]:
    """Seconds of tracing, of all checks, and of each."""
    subject = Subject(model, example, output=output)
    start = time.perf_counter()
    assert subject.graph is not None, subject.why_no_graph
    traced = time.perf_counter()
    spent = {}
    for rule in chosen_rules():
        if not subject.missing(RULES[rule].needs):
            begun = time.perf_counter()
            RULES[rule].run(subject)
            spent[rule] = time.perf_counter() - begun
    return traced - start, sum(spent.values()), spent


if __name__ == "__main__":
    main()
