"""Forty-odd networks that nobody here wrote, in good health: what the doctor says of them.

    python -m bench doctor_healthy [DIR] [--only NAME,…]

Models of `transformers` and `diffusers` are made from shrunk configurations, with random weights, and examined with random data and
AdamW that decays matrices alone. DIR holds trained networks: minilm/, crepe/, fcpe/ and smollm2/ are examined as models, the last
two as files too. A warning or an error is a false alarm unless it is below, with the reason why it is right. Information is
printed as it is.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normscope as ns
from bench.doctor_plants import apart

TRANSFORMERS = (
    "albert", "bart", "beit", "bert", "bloom", "clip_vision_model", "cohere", "convnext", "deit", "dinov2", "distilbert", "electra",
    "falcon", "gemma", "gemma2", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mobilenet_v2", "mpnet", "olmo", "olmo2", "opt",
    "phi", "qwen2", "qwen3", "regnet", "resnet", "roberta", "segformer", "siglip_vision_model", "swin", "swinv2", "t5", "vit",
    "vit_msn", "poolformer", "whisper", "xlm-roberta",
)  # fmt: skip
DIFFUSERS = ("AutoencoderKL", "DiTTransformer2DModel", "Transformer2DModel", "UNet2DConditionModel", "UNet2DModel", "VQModel")
RIGHT: dict[str, dict[str, str]] = {
    "mobilenet_v2": {"NS207": "its momentum of 0.997 is, in torch, the weight of the new batch"},
}


def examined(model: nn.Module, example: dict[str, torch.Tensor]) -> ns.Findings:
    """With everything that a user could pass: data, and an optimizer that a scheduler warms up."""
    model.train()
    optimizer = torch.optim.AdamW(apart(model, 0.01), lr=1e-3)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
    batch = {name: torch.cat([value] * 4) for name, value in example.items()}  # batches of two are a finding
    return ns.doctor(model, example, optimizer=optimizer, data=[batch])


def built(package: str, name: str) -> Callable[[], ns.Findings]:
    def run() -> ns.Findings:
        return examined(*import_module(f"bench.wild.{package}_models").build(name))

    return run


def trained(folder: Path) -> Iterator[tuple[str, Callable[[], ns.Findings]]]:
    from bench.in_the_wild import NETWORKS

    for name, (inside, load) in NETWORKS.items():
        if (folder / inside).is_dir():

            def run(load: Any = load, place: Path = folder / inside) -> ns.Findings:
                network = load(place)
                return ns.doctor(network.model, network.example)

            yield name, run
    for name in ("fcpe", "smollm2"):
        for path in sorted((folder / name).glob("*")):
            yield f"{name} (file)", lambda path=path: ns.checkpoint(path).findings  # type: ignore[misc]


def cases(given: list[str]) -> Iterator[tuple[str, Callable[[], ns.Findings]]]:
    for package, names in (("transformers", TRANSFORMERS), ("diffusers", DIFFUSERS)):
        if find_spec(package) is None:
            print(f"{package} is not installed: {len(names)} networks are left out")
            continue
        yield from ((name, built(package, name)) for name in names)
    for folder in given:
        yield from trained(Path(folder))


def main() -> None:
    warnings.simplefilter("ignore")
    given = sys.argv[sys.argv.index("doctor_healthy") + 1 :] if "doctor_healthy" in sys.argv else sys.argv[1:]
    only = next((given[i + 1].split(",") for i, word in enumerate(given) if word == "--only"), None)
    chosen = [case for case in cases([word for word in given if Path(word).is_dir()]) if only is None or case[0] in only]
    print(f"{'network':<28} {'checks':>6} {'CPU s':>6}  findings")
    clean = informed = right = alarms = 0
    for name, run in chosen:
        start = time.process_time()
        findings = run()
        reasons, loud = RIGHT.get(name, {}), [finding for finding in findings if finding.severity != "info"]
        false = [finding for finding in loud if finding.rule not in reasons]
        clean, informed = clean + (not len(findings)), informed + bool(len(findings) and not loud)
        right, alarms = right + bool(loud and not false), alarms + bool(false)
        said = [f"{rule}: {reasons[rule]}" for rule in sorted({finding.rule for finding in loud} & reasons.keys())]
        said += [f"FALSE ALARM {finding}" for finding in false]
        quiet = Counter(finding.rule for finding in findings if finding.severity == "info")
        said += [f"{rule} × {count} (information)" for rule, count in sorted(quiet.items())]
        print(f"{name:<28} {len(findings.checked):6} {time.process_time() - start:6.1f}  {'; '.join(said) or '-'}", flush=True)
    print(
        f"{len(chosen)} networks: {clean} without a finding, {informed} with information alone, {right} with a warning that is "
        f"right, {alarms} with false alarms"
    )


if __name__ == "__main__":
    main()
