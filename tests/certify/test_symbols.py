"""What a remainder leaves becomes symbols, or part of κ: no more of it than is forgotten."""

from __future__ import annotations

import math

import pytest
import torch

from normscope.certify.symbols import symbols_of
from normscope.rules.remainder import Remainder


def symbols(sizes: list[float], left: float, most: int = 100):
    entries = torch.tensor(sizes, dtype=torch.float64)
    return symbols_of(Remainder(torch.ones_like(entries), entries, None), left, most)


def test_where_nothing_is_forgotten_nothing_is_added():
    """Most units of a network have no symbol: κ would double at every layer with one that has."""
    made, left, folded = symbols([0.0] * 50 + [5.0], 1e-9)
    assert made is not None and made.places.tolist() == [50] and left == 1e-9 and folded == 0


def test_symbols_no_larger_than_the_error_become_part_of_it():
    made, left, _ = symbols([0.0] * 50 + [3e-10, 4e-10, 5.0], 1e-9)
    assert made is not None and made.places.tolist() == [52]
    assert left >= 1e-9 + 5e-10 and left == pytest.approx(1.5e-9, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_an_error_and_what_is_forgotten_are_within_the_new_error(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = (10 ** (4 * torch.rand(30, generator=generator, dtype=torch.float64) - 3)).tolist()
    made, left, _ = symbols([0.0] * 100 + sizes, 0.1)
    kept = set() if made is None else set(made.places.tolist())
    forgotten = math.sqrt(sum(size**2 for place, size in enumerate(sizes, 100) if place not in kept))
    assert 0.1 + forgotten <= left <= 0.2 * (1 + 1e-9)
