"""Cells are disjoint, each lies in its ball, none has seen the training sample, and everything else is the remainder."""

from __future__ import annotations

import pytest
import torch

import normscope as ns
from normscope.bounds.partition import PAIRS, Partition, expanded, nearest, partitions
from normscope.bounds.table import NotApplicable
from normscope.core.errors import InputError


def points(count: int, dimension: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, dimension, generator=torch.Generator().manual_seed(seed))


def build(wanted: Partition, held_out: torch.Tensor | None, domain: ns.Box | ns.Ball | None = None):
    return wanted.build(held_out, domain, torch.Generator().manual_seed(3))


WANTED = [
    Partition("voronoi", 7),
    Partition("voronoi", 7, coverage=0.5),
    Partition("k-means", 7),
    Partition("grid", 9),
    Partition("grid", 8, axes=3),
    Partition("voronoi", 5, radius=0.2),
]


@pytest.mark.quick(12)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("dimension", [1, 3, 12])
@pytest.mark.parametrize("domain", [None, 1], ids=["held-out", "domain"])
def test_every_point_is_in_the_ball_of_its_cell_or_in_the_remainder(wanted, dimension, domain):
    box = None if domain is None else ns.Box(torch.zeros(dimension), torch.ones(dimension))
    cells = build(wanted, points(200, dimension), box)
    x = torch.cat([points(500, dimension, 1), 3 * points(50, dimension, 2)])
    cell, distance = cells.locate(x)
    inside = cell < cells.count
    assert bool((cell >= 0).all()) and bool((cell <= cells.count).all())
    own = (x[inside].double() - cells.centers[cell[inside]].double()).norm(dim=1)
    torch.testing.assert_close(distance[inside], own)
    assert bool((own <= cells.radii[cell[inside]]).all())
    again, _ = cells.locate(x.flip(0))
    assert torch.equal(again.flip(0), cell), "the cell of a point does not depend on the others"


@pytest.mark.parametrize("axes", [1, 2, 5])
@pytest.mark.parametrize(
    "domain", [ns.Box(torch.full((5,), -1.0), torch.full((5,), 2.0)), ns.Ball(torch.ones(5), 1.5)], ids=["box", "ball"]
)
def test_a_grid_holds_its_whole_domain(domain, axes):
    cells = build(Partition("grid", 30, axes=axes), None, domain)
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([domain.project(20 * torch.randn(2000, 5, generator=generator).double()), 0.5 + points(2000, 5).double() * 0.5])
    assert bool((cells.locate(x)[0] < cells.count).all())


def test_full_grids_have_cells_of_half_a_diagonal():
    cells = build(Partition("grid", 16, axes=2), None, ns.Box(torch.zeros(2), torch.ones(2)))
    assert cells.count == 16
    torch.testing.assert_close(cells.radii, torch.full((16,), 2**0.5 / 8, dtype=torch.float64))


def test_nearest_is_the_nearest():
    x, centers = points(300, 20), points(40, 20, 1)
    assert torch.equal(nearest(x, centers), torch.cdist(x, centers).argmin(1))


def test_coverage_of_held_out_points():
    held_out = points(1000, 4)
    for coverage in (0.3, 0.9):
        cells = build(Partition("k-means", 10, coverage=coverage), held_out)
        share = float((cells.locate(held_out)[0] < cells.count).double().mean())
        assert share == pytest.approx(coverage, abs=0.01)


@pytest.mark.parametrize("kind", ["voronoi", "k-means", "grid"])
def test_the_same_generator_gives_the_same_cells_and_the_global_one_is_left_alone(kind):
    before = torch.random.get_rng_state()
    first, second = (build(Partition(kind, 5), points(60, 6)) for _ in range(2))
    assert torch.equal(first.centers, second.centers) and torch.equal(first.radii, second.radii)
    assert torch.equal(before, torch.random.get_rng_state())


def test_sizes_that_are_tried():
    box = ns.Box(torch.zeros(1), torch.ones(1))
    assert [one.cells for one in partitions("voronoi", 10, 10_000, None)] == [pairs // 10 for pairs in PAIRS]
    assert [one.cells for one in partitions("voronoi", 2, 150, None)] == [5, 50]
    assert [one.cells for one in partitions(None, 2, 3, None)] == [1]
    assert [one.kind for one in partitions(None, 2, 0, box)] == ["grid"] * 4
    assert [one.kind for one in partitions(["grid", Partition("k-means", 3)], 1000, 0, box)][-2:] == ["grid", "k-means"]


@pytest.mark.parametrize(
    "bad", [{"kind": "cubes"}, {"cells": 0}, {"coverage": 0.0}, {"coverage": 1.5}, {"radius": -1.0}, {"axes": 0}]
)
def test_partitions_that_are_none(bad):
    with pytest.raises(InputError):
        Partition(**bad)


def test_what_a_kind_needs():
    with pytest.raises(NotApplicable, match="held_out="):
        build(Partition("voronoi", 3), None)
    with pytest.raises(NotApplicable, match="more held-out points"):
        build(Partition("voronoi", 3), points(3, 2))
    with pytest.raises(NotApplicable, match="domain="):
        build(Partition("grid", 3), None)
    with pytest.raises(InputError, match="empty"):
        partitions([], 2, 10, None)


def test_a_domain_of_numbers_takes_the_shape_of_a_sample():
    box = expanded(ns.Box(0, 1), [torch.Size((3, 4))])
    assert box.middle[0].shape == (3, 4) and box.reach == pytest.approx(3**0.5)
    ball = expanded(ns.Ball(0.5, 2.0), [torch.Size((3,))])
    assert ball.middle[0].tolist() == [0.5] * 3 and ball.radius == 2
    with pytest.raises(InputError, match=r"shape \(2,\), a sample has \(3,\)"):
        expanded(ns.Box(torch.zeros(2), torch.ones(2)), [torch.Size((3,))])


def test_points_that_are_not_numbers_go_to_the_remainder():
    cells = build(Partition("voronoi", 3), points(20, 2))
    assert cells.locate(torch.full((2, 2), torch.nan))[0].tolist() == [3, 3]
