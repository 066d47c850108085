"""Peak memory of an audit above what the process holds before it, against the size of the model."""

from __future__ import annotations

import resource
import subprocess
import sys

import torch

import normscope as ns
from normscope.lab.models import resnet18


def measure(size: int) -> None:
    model = resnet18().eval()
    ns.audit(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval(), torch.randn(1, 3, 8, 8))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ns.audit(model, torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"resnet18, 3x{size}x{size}: model {weights / 2**20:.0f} MiB, audit +{(after - before) / 2**10:.0f} MiB above it")


def main() -> None:
    for size in (32, 224):  # each in a process of its own: peak memory never goes down
        subprocess.run([sys.executable, "-c", f"from bench.memory import measure; measure({size})"], check=True)


if __name__ == "__main__":
    main()
