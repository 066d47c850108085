"""What a chain of torch's own modules proves of its weights without a trace, and where it is silent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from normscope.symmetry.chain import scale_free_in_chain

Pair = tuple[torch.Tensor, torch.Tensor]


def of_one_array(first: slice, second: slice) -> Pair:
    array = np.random.default_rng(0).standard_normal((12, 4))
    return torch.from_numpy(array[first]), torch.from_numpy(array[second])


def of_one_tensor() -> Pair:
    whole = torch.randn(8, 4, dtype=torch.float64)
    return whole[:4], whole[4:]


PAIRS: dict[str, tuple[Callable[[], Pair], bool]] = {
    "apart": (lambda: (torch.randn(4, 4), torch.randn(4, 4)), True),
    "one tensor": (lambda: (torch.randn(4, 4),) * 2, False),
    "parts of one tensor": (of_one_tensor, False),
    "arrays that overlap": (lambda: of_one_array(slice(0, 4), slice(1, 5)), False),
    "an array inside of another": (lambda: of_one_array(slice(0, 12), slice(4, 8)), False),
    "parts of an array that do not meet": (lambda: of_one_array(slice(0, 4), slice(4, 8)), True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_weights_that_share_memory_are_not_judged(name):
    make, apart = PAIRS[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].weight, model[2].weight = map(nn.Parameter, make())
    found = scale_free_in_chain(model, {name: True for name, _ in model.named_modules()})
    assert found == ({"0.weight": "1"} if apart else {})
