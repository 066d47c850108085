"""Fashion-MNIST from its idx files (Xiao et al. 2017), gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from normscope.core.errors import InputError
from normscope.lab.datasets.source import Source
from normscope.lab.datasets.split import Labelled, Split

PARTS = {"train": 60_000, "t10k": 10_000}
FILES = tuple(f"{part}-{kind}-ubyte" for part in PARTS for kind in ("images-idx3", "labels-idx1"))
HOW = (
    "install Debian's dataset-fashion-mnist, whose files are found by themselves, or download the four files from "
    "https://github.com/zalandoresearch/fashion-mnist and pass their directory with --dir"
)


def fashion_mnist(directory: Path) -> Split:
    """60,000 and 10,000 grey images, float32 of 1×28×28 in [0, 1]."""
    train, test = (_part(directory, part, count) for part, count in PARTS.items())
    return Split(train, test)


def _part(directory: Path, part: str, count: int) -> Labelled:
    images = _idx(directory / f"{part}-images-idx3-ubyte", (count, 28, 28))
    classes = _idx(directory / f"{part}-labels-idx1-ubyte", (count,))
    return torch.from_numpy(images.astype(np.float32) / 255)[:, None], torch.from_numpy(classes.astype(np.int64))


def _idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An idx file of unsigned bytes: two zero bytes, type 8, the number of axes, each length, then the entries."""
    content = _content(path)
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if content[: len(header)] != header or len(content) != len(header) + math.prod(shape):
        raise InputError(f"{path} is not an idx file of {'×'.join(map(str, shape))} bytes: it is damaged or another file; {HOW}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def _content(path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    packed = path.with_name(path.name + ".gz")
    try:
        return gzip.decompress(packed.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{packed} cannot be unpacked ({error}): it is damaged; {HOW}") from error


SOURCE = Source(fashion_mnist, FILES, HOW, folders=("/usr/share/datasets/fashion-mnist",))
