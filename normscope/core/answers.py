"""Right answers of a classifier."""

from __future__ import annotations

import torch


def right_answers(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """(samples,) where the largest output is that of the class; a row with NaN or +∞ has no largest output.

    >>> right_answers(torch.tensor([[2.0, 1.0], [float("nan"), 1.0]]), torch.tensor([0, 0])).tolist()
    [True, False]
    """
    return (outputs.argmax(1) == classes) & has_answer(outputs)


def has_answer(outputs: torch.Tensor) -> torch.Tensor:
    """(samples,) where outputs can be compared: no NaN, which compares with nothing, and no overflow."""
    return (outputs < torch.inf).all(1)
