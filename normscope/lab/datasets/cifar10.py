"""CIFAR-10 from the official binary files (Krizhevsky 2009); the pickled version is never read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from normscope.core.errors import InputError
from normscope.lab.datasets.source import Source
from normscope.lab.datasets.split import Labelled, Split

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # a class, then the pixels, channel by channel
IMAGES = 10_000  # a file
HOW = (
    "download cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it and pass its directory with --dir"
)


def cifar10(directory: Path) -> Split:
    """50,000 and 10,000 colour images, float32 of 3×32×32 in [0, 1], in the order of the files."""
    parts = [_read(directory / name) for name in TRAIN]
    train = torch.cat([images for images, _ in parts]), torch.cat([classes for _, classes in parts])
    return Split(train, _read(directory / TEST))


def _read(path: Path) -> Labelled:
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) != IMAGES * RECORD:
        raise InputError(f"{path} has {len(content)} bytes, not {IMAGES * RECORD}: it is damaged or another file; {HOW}")
    records = content.reshape(IMAGES, RECORD)
    if records[:, 0].max() > 9:
        raise InputError(f"{path} holds class {records[:, 0].max()}, beyond 9: it is damaged or another file; {HOW}")
    images = torch.from_numpy(records[:, 1:].astype(np.float32) / 255).reshape(IMAGES, *SHAPE)
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


SOURCE = Source(cifar10, (*TRAIN, TEST), HOW, folders=("cifar-10-batches-bin",))
