"""SGD, SGDG, AdamG and AdamP on digits and, given its directory, on a subset of CIFAR-10; test accuracy over three seeds.

    python -m bench.optim_training [DIR] [--images 2000] [--epochs 10] [--seeds 3]

DIR holds cifar-10-batches-bin, the official binary version. Settings are fixed beforehand and are the same everywhere: those of the
papers where they give any, nothing is tuned on these data. The learning rate falls to zero along a cosine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from normscope.lab.datasets import Split, digits
from normscope.optim import SGDG, AdamG, AdamP

BATCH = 64
RECORD = 1 + 3 * 32 * 32  # a label, then the pixels of the three channels

Optimizers = dict[str, Callable[[nn.Module, torch.Tensor], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "SGD": lambda model, example: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    "SGDG": lambda model, example: SGDG(model, lr=0.01, momentum=0.9, weight_decay=5e-4, example=example),
    "AdamG": lambda model, example: AdamG(model, lr=1e-3, example=example),
    "AdamP": lambda model, example: AdamP(model, lr=1e-3, weight_decay=1e-2, example=example),
}


class Residual(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x))))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*convolution(width, width), *convolution(width, width)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.branch(x))


def convolution(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def vgg(channels: int) -> nn.Sequential:
    """Five convolutions, two poolings, a linear classifier."""
    layers = [*convolution(channels, 16), *convolution(16, 16), nn.MaxPool2d(2), *convolution(16, 32), *convolution(32, 32)]
    layers += [nn.MaxPool2d(2), *convolution(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def residual(channels: int) -> nn.Sequential:
    """A stem and two residual blocks, each followed by a strided convolution, a linear classifier."""
    layers = [*convolution(channels, 16), Residual(16), *convolution(16, 32, 2), Residual(32), *convolution(32, 64, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


NETWORKS = {"VGG-like": vgg, "residual": residual}


def cifar10(directory: Path, images: int) -> Split:
    """The first images of the training and of the test set, each channel standardized with the training images."""
    parts = []
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = np.fromfile(directory / "cifar-10-batches-bin" / name, dtype=np.uint8, count=images * RECORD).reshape(-1, RECORD)
        pixels = torch.from_numpy(records[:, 1:].astype(np.float32)).reshape(-1, 3, 32, 32) / 255
        parts.append((pixels, torch.from_numpy(records[:, 0].astype(np.int64))))
    (train, train_labels), (test, test_labels) = parts
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    return Split(((train - mean) / deviation, train_labels), ((test - mean) / deviation, test_labels))


def accuracy_after_training(network: Callable, optimizer: Callable, data: Split, epochs: int, seed: int) -> tuple[float, float]:
    """(test accuracy in percent, seconds per run)."""
    inputs, labels = data.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(inputs.shape[1])
    generator = torch.Generator().manual_seed(seed)
    stepper = optimizer(model, inputs[:4])
    batches = len(inputs) // BATCH
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, epochs * batches)
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(inputs), generator=generator)
        for chosen in order[: batches * BATCH].split(BATCH):
            stepper.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            stepper.step()
            scheduler.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(*(part.split(500) for part in data.test), strict=True))
    return 100 * correct / len(data.test[0]), seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="SGD, SGDG, AdamG and AdamP on digits and a subset of CIFAR-10")
    parser.add_argument("directory", nargs="?", type=Path, help="where cifar-10-batches-bin is; without it digits alone")
    parser.add_argument("--images", type=int, default=2000, help="of CIFAR-10, for training and for testing")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments or [])
    data = {"digits": digits()}
    if options.directory is None:
        print("CIFAR-10 is left out: python -m bench.optim_training DIR")
    else:
        data["CIFAR-10 subset"] = cifar10(options.directory, options.images)
    print(f"{'data':<16} {'network':<9} {'optimizer':<9} {'test accuracy, %':>18} {'s a run':>8}", flush=True)
    for dataset, split in data.items():
        for architecture, network in NETWORKS.items():
            for name, optimizer in OPTIMIZERS.items():
                runs = [accuracy_after_training(network, optimizer, split, options.epochs, seed) for seed in range(options.seeds)]
                accuracies, seconds = zip(*runs, strict=True)
                spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
                middle = f"{statistics.mean(accuracies):.1f} ± {spread:.1f}"
                print(f"{dataset:<16} {architecture:<9} {name:<9} {middle:>18} {statistics.median(seconds):8.1f}", flush=True)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
