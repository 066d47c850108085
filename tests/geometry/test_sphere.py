"""Laws of the sphere maps: idempotent, inverse, isometric, invariant; in float32 and float64, for any axes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope.core.errors import InputError
from normscope.geometry import sphere
from normscope.geometry.sphere import Spheres
from normscope.geometry.vectors import Vectors

LAYOUTS = [
    ((7,), (), 1), ((5, 4), (0,), 1), ((5, 4), (1,), 1), ((6, 4), (0,), 3), ((4, 3, 2, 2), (0,), 1), ((4, 3, 2, 2), (0,), 2),
    ((4, 3, 2, 2), (1,), 1), ((4, 3, 2, 2), (0, 1), 1), ((4, 3, 2, 2), (2, 0), 1), ((4, 3, 2, 2), (), 1), ((2, 9), (-2,), 1),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64]


def draw(shape, dtype, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def tolerance(dtype):
    return 64 * torch.finfo(dtype).eps


def same(first, second, size=None):
    size = 1.0 if size is None else size
    torch.testing.assert_close(first, second, rtol=tolerance(first.dtype), atol=tolerance(first.dtype) * float(size))


@pytest.mark.parametrize("shape, axes, block", LAYOUTS)
def test_gathered_rows_are_the_members_and_scatter_is_the_inverse(shape, axes, block):
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    vectors = Vectors.of((tensor,), (axes,), (block,))
    rows = vectors.gather((tensor,))
    assert rows.shape == (vectors.count, vectors.size) and rows.numel() == tensor.numel()
    assert torch.equal(vectors.scatter(rows)[0], tensor)
    axes = [axis % len(shape) for axis in axes]
    for number in range(vectors.count):
        members = {int(entry) for entry in rows[number]}
        for position in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
            index = 0
            for axis in axes:
                index = index * shape[axis] + position[axis]
            assert (int(tensor[tuple(position)]) in members) == (index // block == number)


def test_dense_tensors_are_gathered_without_a_copy():
    for kernel in (torch.ones(4, 3, 5, 5), torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last)):
        vectors = Vectors.of((kernel,), ((0,),))
        assert vectors.gather((kernel,)).data_ptr() == kernel.data_ptr()


def test_tensors_of_other_strides_are_gathered_in_the_same_order():
    kernel = draw((4, 3, 2, 2), torch.float64, 0)
    vectors = Vectors.of((kernel.to(memory_format=torch.channels_last),), ((0,),))
    assert torch.equal(vectors.gather((kernel,)), vectors.gather((kernel.to(memory_format=torch.channels_last),)))


def test_store_writes_copies_back():
    weight, bias = torch.zeros(3, 2), torch.zeros(3)
    vectors = Vectors.of((weight, bias), ((0,), (0,)))
    rows = vectors.gather((weight, bias)).add(torch.arange(3.0)[:, None])
    vectors.store(rows, (weight, bias))
    assert torch.equal(weight, torch.arange(3.0)[:, None].expand(3, 2)) and torch.equal(bias, torch.arange(3.0))


@pytest.mark.parametrize("axes, block", [((2,), 1), ((0, 0), 1), ((0,), 3), ((0, 1), 2), ((0,), 0)])
def test_layouts_that_do_not_fit_are_refused(axes, block):
    with pytest.raises(InputError, match="shape"):
        Spheres(axes, block).norm(torch.ones(4, 4))
    with pytest.raises(InputError, match="equally many"):
        Spheres(((0,), (0,))).norm((torch.ones(4, 2), torch.ones(3)))
    with pytest.raises(InputError, match="tuples of axes"):
        Spheres((0,)).norm((torch.ones(4, 2), torch.ones(4)))


@pytest.mark.quick(30)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, axes, block", LAYOUTS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_laws_on_every_layout(shape, axes, block, scale, dtype):
    spheres = Spheres(axes, block)
    point, vector, other = (draw(shape, dtype, seed, scale) for seed in range(3))
    tangent = spheres.project(point, vector)
    same(spheres.project(point, tangent), tangent, scale)
    same(spheres.metric(point, point, tangent), torch.zeros_like(spheres.norm(point)))
    end = spheres.exponential(point, tangent)
    same(spheres.norm(end), spheres.norm(point), scale)
    same(spheres.norm(spheres.retract(point, tangent)), spheres.norm(point), scale)
    moved = spheres.transport(point, tangent, spheres.project(point, other))
    same(spheres.metric(end, end, moved), torch.zeros_like(spheres.norm(point)))
    before = spheres.metric(point, spheres.project(point, other), tangent)
    after = spheres.metric(end, moved, spheres.transport(point, tangent, tangent))
    same(after, before, before.abs().max())
    logarithm = spheres.logarithm(point, other)
    arrived = spheres.exponential(point, logarithm)
    same(spheres.distance(arrived, other), torch.zeros_like(spheres.norm(point)))
    length = spheres.metric(point, logarithm, logarithm).sqrt()
    same(length, spheres.distance(point, other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_distance_and_maps_ignore_scale(dtype):
    spheres = Spheres((0,))
    point, other, factor = draw((5, 7), dtype, 0), draw((5, 7), dtype, 1), torch.tensor([1e-6, 0.1, 1, 10, 1e6], dtype=dtype)
    same(spheres.distance(point * factor[:, None], other), spheres.distance(point, other))
    tangent = spheres.project(point, other)
    scaled = point * factor[:, None], tangent * factor[:, None]
    same(spheres.exponential(*scaled) / factor[:, None], spheres.exponential(point, tangent))
    same(spheres.metric(*scaled, scaled[1]), spheres.metric(point, tangent, tangent), 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.floats(-15, math.log10(math.pi) - 1e-9), st.integers(0, 10**6))
def test_angles_are_exact_from_tiny_to_nearly_opposite(size, exponent, seed):
    angle = 10.0**exponent
    point = draw((1, size), torch.float64, seed)
    direction = sphere.project(point, draw((1, size), torch.float64, seed + 1))
    tangent = direction / sphere.norm(direction) * sphere.norm(point) * angle
    end = sphere.exponential(point, tangent)
    measured = float(sphere.distance(point, end))
    assert measured == pytest.approx(angle, rel=1e-12, abs=1e-15)
    if angle < math.pi - 1e-6:
        error = sphere.norm(sphere.logarithm(point, end) - tangent) / sphere.norm(point)
        assert float(error) <= 1e-9 * angle + 1e-15


@pytest.mark.parametrize("dtype", DTYPES)
def test_opposite_rays_are_joined_by_a_half_turn(dtype):
    point = torch.cat([draw((20, 6), dtype, 0), torch.eye(6, dtype=dtype)])
    tangent = sphere.logarithm(point, -point)
    same(sphere.norm(tangent), math.pi * sphere.norm(point), 3)
    same(sphere.inner(tangent, point), torch.zeros(len(point), 1, dtype=dtype), 10)
    same(sphere.exponential(point, tangent), -point, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_a_zero_vector_the_maps_are_flat(dtype):
    point, vector = torch.zeros(2, 3, dtype=dtype), draw((2, 3), dtype, 0)
    for result in (sphere.project(point, vector), sphere.exponential(point, vector), sphere.retract(point, vector)):
        assert torch.equal(result, vector)
    assert torch.equal(sphere.transport(point, vector, vector), vector)
    assert torch.equal(sphere.logarithm(point, vector), vector)
    zeros = torch.zeros_like(vector)
    for result in (sphere.exponential(vector, zeros), sphere.retract(vector, zeros), sphere.transport(vector, zeros, vector)):
        same(result, vector)
    assert torch.equal(sphere.logarithm(vector, vector), zeros)


def test_one_dimensional_spheres_are_two_points():
    point = torch.tensor([[2.0]])
    assert float(sphere.project(point, torch.tensor([[5.0]]))) == 0
    assert float(sphere.distance(point, -point)) == pytest.approx(math.pi)


def test_joint_vectors_run_through_several_tensors():
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(4, 3, generator=generator), torch.randn(2, 4, generator=generator)
    spheres = Spheres(((0,), (1,)))
    joined = torch.cat([point[0], point[1].T], 1)
    torch.testing.assert_close(spheres.norm(point), joined.norm(dim=1))
    vector = torch.ones(4, 3), torch.ones(2, 4)
    tangent = spheres.project(point, vector)
    assert [tensor.shape for tensor in tangent] == [(4, 3), (2, 4)]
    torch.testing.assert_close(spheres.norm(spheres.exponential(point, tangent)), joined.norm(dim=1))


def test_nan_stays_in_its_own_vector():
    point = torch.ones(3, 2)
    vector = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [0.0, 1.0]])
    result = sphere.exponential(point, sphere.project(point, vector))
    assert torch.isfinite(result[[0, 2]]).all() and result[1].isnan().all()
