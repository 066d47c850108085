"""Random networks: no false group, no more named directions than there are, and on smooth networks hardly one missing."""

from __future__ import annotations

import pytest

import normscope as ns
from tests.symmetry.random_graphs import random_graph


def missed(seed: int) -> int:
    """How many null directions of a random network no group names, after the laws that hold for all of them."""
    model, example, mode = random_graph(seed)
    report = ns.symmetries(model, example, mode)
    assert report.check() == []
    complete = report.completeness()
    assert complete.named <= complete.null and complete.seen < 1e-9
    return complete.unnamed


@pytest.mark.parametrize("seed", range(16))
def test_groups_hold_on_random_graphs(seed):
    missed(seed)


@pytest.mark.full
def test_hardly_a_direction_is_missed_on_smooth_graphs():
    counts = [missed(seed) for seed in range(1000, 1500, 2)]
    share = sum(count == 0 for count in counts) / len(counts)
    print(f"all null directions named on {share:.1%} of {len(counts)} smooth random graphs")
    assert share > 0.9


@pytest.mark.full
def test_most_directions_are_named_on_graphs_with_kinks():
    counts = [missed(seed) for seed in range(1001, 1501, 2)]
    share = sum(count == 0 for count in counts) / len(counts)
    print(f"all null directions named on {share:.1%} of {len(counts)} random graphs with kinks")
    assert share > 0.6
