"""Handwritten digits that come with scikit-learn: what the demo trains on, and `digits` on the command line."""

from __future__ import annotations

import torch

TEST_PART = 0.2

Labelled = tuple[torch.Tensor, torch.Tensor]  # inputs (samples, …) and classes (samples,)


def digits(generator: torch.Generator | None = None) -> tuple[Labelled, Labelled]:
    """A training and a test part of 1,797 handwritten digits: float32 images of 1×8×8 in [0, 1] and their classes.

    >>> train, test = digits()
    >>> test[0].shape
    torch.Size([360, 1, 8, 8])

    A fifth is the test part, with every class in proportion. generator: of the split; without one it is always the same.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator))
    images, classes = load_digits(return_X_y=True)
    parts = train_test_split(images, classes, test_size=TEST_PART, random_state=seed, stratify=classes)
    train_x, test_x = (torch.tensor(part / 16, dtype=torch.float32).reshape(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return (train_x, train_y), (test_x, test_y)
