"""The digits: all of them, once each, every class in proportion, the same split every time."""

from __future__ import annotations

import random

import numpy as np
import torch

from normscope.lab.datasets import digits


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
