"""Data sets: all samples once each, the same every time, files read as their formats say, and one line where they are missing."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from normscope.core.errors import InputError
from normscope.lab.datasets import DATASETS, digits, load_data


def test_images_and_classes() -> None:
    data = digits()
    for images, classes in (data.train, data.test):
        assert images.dtype == torch.float32 and images.shape[1:] == (1, 8, 8)
        assert float(images.min()) == 0 and float(images.max()) == 1
        assert classes.dtype == torch.int64 and len(classes) == len(images)
    assert len(data.train[0]) + len(data.test[0]) == 1797


def test_parts_share_no_image() -> None:
    data = digits()
    everything = torch.cat([data.train[0], data.test[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == len(everything)


def test_classes_are_in_proportion() -> None:
    data = digits()
    train, test = (part[1].bincount(minlength=10).double() for part in (data.train, data.test))
    assert bool(((test / (train + test) - 0.2).abs() < 0.01).all())


def test_split_depends_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    first = digits().test[1]
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(digits().test[1], first)
    seeded = [digits(torch.Generator().manual_seed(seed)).test[0] for seed in (5, 5, 6)]
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[0], seeded[2])


def test_global_random_state_is_untouched() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    digits()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


def cifar10_files(directory: Path, images: int = 10_000) -> np.ndarray:
    """The six files, with random content; what data_batch_2 holds."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = np.resize(np.arange(251, dtype=np.uint8) + ord(name[-5]), (images, 3073))  # 251 is prime: no two rows are equal
        records[:, 0] %= 10
        records.tofile(directory / name)
    return np.fromfile(directory / "data_batch_2.bin", dtype=np.uint8).reshape(images, 3073)


def test_cifar10_is_read_from_the_official_files(tmp_path: Path) -> None:
    second = cifar10_files(tmp_path / "cifar-10-batches-bin")
    split = load_data("cifar10", tmp_path)  # the directory that holds the unpacked one will do
    assert split.train[0].shape == (50_000, 3, 32, 32) and split.test[0].shape == (10_000, 3, 32, 32)
    assert split.classes == 10 and split.train[0].dtype == torch.float32
    record = second[7]
    assert int(split.train[1][10_007]) == record[0]
    green = 1024 + 5 * 32 + 6  # row 5, column 6 of the second channel
    assert float(split.train[0][10_007, 1, 5, 6]) == pytest.approx(record[1 + green] / 255)


def test_damaged_and_missing_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cifar10 is read from files: download cifar-10-binary\.tar\.gz"):
        load_data("cifar10")
    with pytest.raises(InputError, match=r"lacks data_batch_1\.bin, .* of cifar10: download"):
        load_data("cifar10", tmp_path)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (tmp_path / name).write_bytes(b"x" * 100)
    with pytest.raises(InputError, match=r"data_batch_1\.bin has 100 bytes, not 30730000"):
        load_data("cifar10", tmp_path)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape) + values.tobytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_read_from_idx_files(tmp_path: Path, packed: bool) -> None:
    random_bytes = np.random.default_rng(0)
    for part, count in {"train": 60_000, "t10k": 10_000}.items():
        images, classes = random_bytes.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
        for name, values in {f"{part}-images-idx3-ubyte": images, f"{part}-labels-idx1-ubyte": classes}.items():
            content = gzip.compress(idx(values), 1) if packed else idx(values)
            (tmp_path / (name + ".gz" if packed else name)).write_bytes(content)
    split = load_data("fashion-mnist", tmp_path)
    assert split.sample_shape == (1, 28, 28) and len(split.train[0]) == 60_000
    assert float(split.test[0][3, 0, 4, 5]) == pytest.approx(images[3, 4, 5] / 255) and int(split.test[1][13]) == 3


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_debians_fashion_mnist_is_found_by_itself() -> None:
    split = load_data("fashion-mnist")
    assert split.train[1].bincount().tolist() == [6_000] * 10 and split.test[1].bincount().tolist() == [1_000] * 10


def test_a_damaged_idx_file_is_one_line(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="cannot be unpacked"):
        load_data("fashion-mnist", tmp_path)


@pytest.mark.parametrize("name", [name for name, source in DATASETS.items() if not source.files])
def test_synthetic_sets_are_the_same_every_time_and_can_be_learned_from(name: str) -> None:
    first, second = load_data(name), load_data(name)
    assert torch.equal(first.train[0], second.train[0]) and torch.equal(first.test[1], second.test[1])
    if first.train[1].is_floating_point():
        with pytest.raises(InputError, match="real targets and no classes: choose others, such as digits"):
            _ = first.classes
    else:
        assert len(first.train[1].unique()) == first.classes


def test_scaling_subsets_and_channels() -> None:
    split = digits()
    scaled = split.in_unit_ball()
    assert float(scaled.train[0].flatten(1).norm(dim=1).max()) == pytest.approx(1)
    assert torch.allclose(scaled.test[0] / scaled.train[0].max(), split.test[0] / split.train[0].max())  # one number for all
    rgb = scaled.as_rgb()
    assert rgb.sample_shape == (3, 8, 8) and torch.allclose(
        rgb.train[0].flatten(1).norm(dim=1), scaled.train[0].flatten(1).norm(dim=1)
    )
    chosen = [split.subset(50, torch.Generator().manual_seed(seed)).train[0] for seed in (0, 0, 1)]
    assert len(chosen[0]) == 50 and torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])
    with pytest.raises(InputError, match="images must be from 1 to 1437"):
        split.subset(2000, torch.Generator())
