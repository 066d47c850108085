"""Theorem 20 with gradients on data of CIFAR-10's shape and ResNet-18: its time in epochs of inference, its memory above the data.

`python -m bench.generalization_scale --samples 2000 --stem small` for a part of it; times grow in proportion to the samples.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from normscope.bounds.generalization import generalization
from normscope.bounds.losses import l1
from normscope.bounds.partition import Partition, nearest
from normscope.bounds.sample import Sample
from normscope.bounds.setting import BATCH_SIZE, Setting
from normscope.lab.models import resnet18
from normscope.lab.models.resnet18 import STEMS

SAMPLES, HELD_OUT, CLASSES, CELLS = 50_000, 10_000, 10, 1_000  # N = 10,000 pairs of cell and label, and the remainder


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak() -> float:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def labelled(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(samples, 3, 32, 32, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)


def warm(model: torch.nn.Module, train: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What every process pays once: lazy imports and the kernels' own buffers."""
    with torch.no_grad():
        model(train[0][:BATCH_SIZE])
    Setting(model, l1(), (train[0][:8], train[1][:8])).train.risk  # noqa: B018


def measure(samples: int, stem: str) -> None:
    generator = torch.Generator().manual_seed(0)
    train, held_out = labelled(samples, generator), labelled(HELD_OUT, generator)
    model = resnet18(classes=CLASSES, stem=stem).eval()
    warm(model, train)
    before = peak()
    theorem = seconds(
        lambda: generalization(
            model, "l1", train, held_out=held_out, partition=Partition("voronoi", CELLS), select=["Than 2025, largest gradient"]
        )
    )
    memory = peak() - before

    def inference() -> None:
        Sample(Setting(model, l1(), train)._batches, model, l1()).columns  # noqa: B018

    epoch = seconds(inference)
    centers = held_out[0][:CELLS].flatten(1)
    distances = seconds(lambda: nearest(train[0].flatten(1), centers))
    distances += seconds(lambda: nearest(held_out[0].flatten(1), centers)) * 2  # to choose a radius, and for λ_i
    data = sum(part.numel() * part.element_size() for part in (*train, *held_out)) / 2**20
    print(f"ResNet-18 with the {stem} stem, {samples:,} × 3,072, N = {CELLS * CLASSES + 1:,}, data {data:.0f} MiB")
    print(f"epoch of inference {epoch:.1f} s, distances {distances:.1f} s, Theorem 20 {theorem:.1f} s")
    print(
        f"without the distances {(theorem - distances) / epoch:.2f} epochs, of which the model at the centres {CELLS / samples:.2f}"
    )
    print(f"peak memory +{memory:.0f} MiB above the data")


def main(samples: int = SAMPLES, stem: str = "imagenet") -> None:
    command = f"from bench.generalization_scale import measure; measure({samples}, {stem!r})"
    subprocess.run([sys.executable, "-c", command], check=True)  # peak memory never goes down


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--stem", choices=STEMS, default="imagenet")
    main(**vars(parser.parse_args()))
