"""Time to find all symmetries of a model, beside the time torch.export takes to trace it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import normscope as ns
from normscope.lab.models import mlp, resnet18

REPEATS = 3


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def models() -> dict[str, tuple[torch.nn.Module, object]]:
    """Models of full size; those of transformers where it is installed."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found: dict[str, tuple[torch.nn.Module, object]] = {
        "MLP, 100 layers, BN": (mlp(width=64, depth=100, inputs=64, normalizer="batch"), images[:, 0, 0]),
        "ResNet-18": (resnet18(), images),
    }
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel
    except ImportError:
        return found
    ids = {"input_ids": torch.arange(16).reshape(2, 8)}
    found["GPT-2 (124M)"] = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval(), ids
    small = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, use_cache=False
    )
    found["LLaMA, 8 layers"] = LlamaModel(small).eval(), ids
    return found


def main() -> None:
    print(f"{'model':<22} {'parameters':>12} {'groups':>7} {'export s':>9} {'symmetries s':>13} {'ratio':>6}")
    for name, (model, example) in models().items():
        args, kwargs = ((), example) if isinstance(example, dict) else ((example,), {})
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS):
            export = seconds(lambda a=args, k=kwargs, m=model: torch.export.export(m, a, k, strict=False))
            times.append((export, seconds(lambda m=model, e=example: ns.symmetries(m, e, mode="eval"))))
        export, found = (statistics.median(column) for column in zip(*times, strict=True))
        size = sum(parameter.numel() for parameter in model.parameters())
        count = len(ns.symmetries(model, example, mode="eval"))
        print(f"{name:<22} {size:>12,} {count:>7} {export:>9.2f} {found:>13.2f} {found / export:>6.1f}")


if __name__ == "__main__":
    main()
