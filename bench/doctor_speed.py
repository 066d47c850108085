"""How long the doctor takes without data: ResNet-18 and GPT-2 in their standard sizes, and a Llama of 135 million parameters.

Seconds of CPU, so that other work on the machine counts little; torch.export, which tracing begins with, is measured beside it.
"""

from __future__ import annotations

import statistics
import time

import torch

from normscope.core.data import Call
from normscope.findings.catalogue import RULES, chosen_rules
from normscope.findings.subject import Subject
from normscope.graph.exporting import export
from normscope.lab.models import resnet18

REPEATS = 3
LLAMA = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
    "vocab_size": 49152, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip  # the sizes of SmolLM2-135M


def main() -> None:
    import transformers

    generator = torch.Generator().manual_seed(0)
    settings = transformers.GPT2Config(use_cache=False)
    small = transformers.LlamaConfig(**LLAMA)
    cases = {
        "ResNet-18": (resnet18(), torch.randn(1, 3, 224, 224, generator=generator), None),
        "GPT-2": (
            transformers.GPT2Model(settings),
            {"inputs_embeds": torch.randn(1, 16, settings.n_embd, generator=generator)},
            "last_hidden_state",
        ),
        "Llama": (
            transformers.LlamaForCausalLM(small),
            {"input_ids": torch.randint(small.vocab_size, (2, 16), generator=generator)},
            "logits",
        ),
    }
    print(f"{'model':>10} {'parameters':>12} {'export':>8} {'tracing':>8} {'checks':>8} {'in all':>8}   slowest checks, seconds")
    for name, (model, example, output) in cases.items():
        size = sum(parameter.numel() for parameter in model.parameters())
        rows = [examined(model, example, output) for _ in range(REPEATS)]
        exporting = statistics.median(exported(model, example) for _ in range(REPEATS))
        tracing, checks = (statistics.median(row[i] for row in rows) for i in (0, 1))
        slowest = sorted(rows[-1][2].items(), key=lambda item: -item[1])[:3]
        print(
            f"{name:>10} {size:12,} {exporting:8.2f} {tracing:8.2f} {checks:8.2f} {tracing + checks:8.2f}   "
            + ", ".join(f"{rule} {spent:.2f}" for rule, spent in slowest),
            flush=True,
        )


def exported(model: torch.nn.Module, example: object) -> float:
    """Seconds of torch.export alone."""
    start = time.process_time()
    export(model, Call.of(example).samples(slice(0, 1)))
    return time.process_time() - start


def examined(model: torch.nn.Module, example: object, output: str | None) -> tuple[float, float, dict[str, float]]:
    """Seconds of tracing, of all checks, and of each."""
    subject = Subject(model, example, output=output)
    start = time.process_time()
    assert subject.graph is not None, subject.why_no_graph
    traced = time.process_time()
    spent = {}
    for rule in chosen_rules():
        if not subject.missing(RULES[rule].needs):
            begun = time.process_time()
            RULES[rule].run(subject)
            spent[rule] = time.process_time() - begun
    return traced - start, sum(spent.values()), spent


if __name__ == "__main__":
    main()
