"""Convolution norms against the matrix itself: dense where it is small, sparse where it is large."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

import normscope as ns
from tests.cases import randn

# axes, channels in, channels out, size, kernel, stride, padding, dilation, groups
PLAIN = [
    (1, 1, 1, 7, 1, 1, 0, 1, 1), (1, 2, 3, 12, 3, 1, 1, 1, 1), (1, 3, 2, 11, 4, 2, 1, 1, 1), (1, 4, 4, 13, 3, 3, 0, 2, 2),
    (1, 6, 6, 9, 5, 1, 2, 1, 6), (1, 2, 2, 40, 7, 4, 3, 2, 1), (1, 1, 5, 3, 3, 1, 2, 1, 1), (1, 2, 2, 10, 2, 3, 1, 3, 1),
    (2, 1, 1, 4, 3, 1, 1, 1, 1), (2, 2, 3, 6, 3, 1, 0, 1, 1), (2, 3, 4, 7, 3, 2, 1, 1, 1), (2, 4, 4, 5, 2, 1, 1, 2, 2),
    (2, 4, 8, 6, 3, 1, 1, 1, 4), (2, 1, 2, 9, 5, 3, 2, 1, 1), (2, 2, 2, 8, 3, 2, 2, 2, 1), (2, 3, 3, 8, 1, 2, 0, 1, 1),
    (2, 6, 3, 5, 3, 1, 1, 1, 3), (2, 1, 1, 12, 7, 2, 3, 1, 1), (2, 2, 5, 6, 4, 1, 2, 1, 1), (2, 5, 2, 7, 2, 2, 0, 1, 1),
    (3, 1, 2, 4, 2, 1, 0, 1, 1), (3, 2, 2, 4, 3, 1, 1, 1, 1), (3, 2, 4, 5, 2, 2, 1, 1, 2), (3, 1, 1, 5, 2, 1, 1, 2, 1),
]  # fmt: skip
SMALL = [
    (*case, *way)
    for case in PLAIN
    for way in (("zeros", False), ("zeros", True), ("circular", False), ("reflect", False), ("replicate", False))
    if way[0] == "zeros" or (case[6] > 0 and case[6] < case[3])  # torch pads by less than the size
]


def kernel_of(case, seed: int = 0) -> Tensor:
    axes, before, after, _, kernel, _, _, _, groups, _, transposed = case
    first, second = (before, after // groups) if transposed else (after, before // groups)
    return randn(first, second, *[kernel] * axes, seed=seed).double()


def settings_of(case) -> dict:
    _, _, _, _, _, stride, padding, dilation, groups, mode, transposed = case
    plain = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return {**plain, "padding_mode": mode, "transposed": transposed}


def dense(case, kernel: Tensor) -> Tensor:
    """The matrix, by torch's own convolution of every unit vector."""
    axes, before, after, size, _, stride, padding, dilation, groups, mode, transposed = case
    basis = torch.eye(before * size**axes, dtype=torch.float64).reshape(-1, before, *[size] * axes)
    name = f"Conv{'Transpose' if transposed else ''}{axes}d"
    kind = {"padding_mode": mode} if not transposed else {}
    module = getattr(torch.nn, name)(
        before, after, kernel.shape[2:], stride, padding, bias=False, groups=groups, dilation=dilation, **kind
    )
    module.weight = torch.nn.Parameter(kernel, requires_grad=False)
    return module(basis).flatten(1).T


def test_there_are_enough_cases():
    assert len(SMALL) >= 60


@pytest.mark.quick(25)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: "-".join(map(str, case)))
def test_exact_where_the_matrix_is_small(case):
    kernel = kernel_of(case)
    truth = float(torch.linalg.matrix_norm(dense(case, kernel), 2))
    bracket = ns.certify.operator_norm(kernel, (case[3],) * case[0], **settings_of(case))
    assert float(bracket.lower) <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= float(bracket.upper) <= truth * (1 + 1e-6)


def test_unequal_axes_and_settings():
    kernel = randn(3, 2, 3, 2).double()
    module = torch.nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 3), bias=False)
    module.weight = torch.nn.Parameter(kernel, requires_grad=False)
    truth = float(torch.linalg.matrix_norm(module(torch.eye(2 * 7 * 9).double().reshape(-1, 2, 7, 9)).flatten(1).T, 2))
    bracket = ns.certify.operator_norm(kernel, (2, 7, 9), stride=(2, 1), padding=(0, 1), dilation=(1, 3))
    assert truth * (1 - 1e-12) <= float(bracket.upper) <= truth * (1 + 1e-6)
    assert ns.certify.operator_norm(module, (2, 7, 9)).upper == bracket.upper


# Large maps -----------------------------------------------------------------------------------------------------------

PADS = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}


def sparse(kernel: Tensor, size: tuple[int, ...], stride: int, padding: int, dilation: int, mode: str) -> scipy.sparse.csr_matrix:
    """The matrix, from a padded array of indices: entry −1 reads nothing."""
    extra = {"constant_values": -1} if mode == "zeros" else {}
    index = np.pad(np.arange(math.prod(size)).reshape(size), padding, mode=PADS[mode], **extra)
    weights, blocks = kernel.numpy(), []
    taps = list(itertools.product(*map(range, weights.shape[2:])))
    reach = [dilation * (k - 1) + 1 for k in weights.shape[2:]]
    outputs = [(n - r) // stride + 1 for n, r in zip(index.shape, reach, strict=True)]
    reads = []
    for tap in taps:
        read = index[tuple(slice(t * dilation, t * dilation + stride * m, stride) for t, m in zip(tap, outputs, strict=True))]
        rows, columns = np.nonzero(read.reshape(-1) >= 0)[0], read.reshape(-1)[read.reshape(-1) >= 0]
        shape = (math.prod(outputs), math.prod(size))
        reads.append(scipy.sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape))
    for out in weights:
        blocks.append([sum(float(channel[tap]) * read for tap, read in zip(taps, reads, strict=True)) for channel in out])
    return scipy.sparse.bmat(blocks, format="csr")


def largest_singular_value(matrix: scipy.sparse.csr_matrix) -> float:
    return float(scipy.sparse.linalg.svds(matrix, k=1, tol=1e-6, return_singular_vectors=False)[0])


LARGE = [  # out, in, kernel, size, stride, padding, dilation, padding mode
    (2, 2, (3,), (1100,), 1, 1, 1, "zeros"), (2, 2, (5,), (1100,), 3, 2, 2, "zeros"), (1, 2, (3,), (1100,), 1, 1, 1, "circular"),
    (2, 2, (4,), (1100,), 2, 1, 1, "circular"), (2, 2, (3, 3), (64, 64), 1, 1, 1, "zeros"), (3, 2, (3, 3), (66, 64), 2, 1, 1, "zeros"),
    (2, 2, (5, 5), (64, 64), 1, 2, 1, "zeros"), (2, 2, (3, 3), (64, 64), 1, 2, 2, "zeros"), (2, 2, (3, 3), (64, 64), 1, 0, 1, "zeros"),
    (2, 2, (3, 3), (64, 64), 1, 1, 1, "circular"), (2, 3, (3, 3), (64, 60), 2, 1, 1, "circular"), (1, 1, (3, 3), (96, 96), 1, 1, 1, "zeros"),
    (1, 1, (2, 2, 2), (16, 16, 16), 1, 0, 1, "zeros"), (1, 1, (3, 3, 3), (14, 14, 14), 1, 1, 1, "circular"),
]  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_close_where_the_matrix_is_large(case):
    out, inner, taps, size, stride, padding, dilation, mode = case
    assert min(size) >= 8 * max(taps) or mode == "circular"
    kernel = randn(out, inner, *taps).double()
    truth = largest_singular_value(sparse(kernel, size, stride, padding, dilation, mode))
    bracket = ns.certify.operator_norm(kernel, size, stride=stride, padding=padding, dilation=dilation, padding_mode=mode)
    assert truth <= float(bracket.upper) <= 1.02 * truth
    assert 0.98 * truth <= float(bracket.lower) <= truth * (1 + 1e-5)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_that_repeats_is_never_below_the_truth(mode):
    kernel = randn(2, 2, 3, 3).double()
    truth = largest_singular_value(sparse(kernel, (64, 64), 1, 1, 1, mode))
    assert truth <= float(ns.certify.operator_norm(kernel, (64, 64), padding=1, padding_mode=mode).upper) <= 4 * truth


def test_transposed_is_the_adjoint():
    kernel = randn(2, 3, 3, 3).double()
    plain = ns.certify.operator_norm(kernel, (3, 64, 64), padding=1).upper
    adjoint = ns.certify.operator_norm(kernel, (2, 64, 64), padding=1, transposed=True).upper
    assert float(adjoint / plain) == pytest.approx(1, abs=1e-9)


def test_groups_are_the_maximum_and_not_the_product():
    kernel = randn(6, 2, 3, 3).double()
    kernel[2:4] *= 5
    groups = [float(ns.certify.operator_norm(part, (8, 8), padding=1).upper) for part in kernel.split(2)]
    assert float(ns.certify.operator_norm(kernel, (8, 8), padding=1, groups=3).upper) == pytest.approx(max(groups), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-200, 1e-6, 1e6, 1e200])
def test_homogeneous(scale):
    kernel = randn(2, 2, 3, 3).double()
    for size in ((8, 8), (64, 64)):
        scaled = ns.certify.operator_norm(kernel * scale, size, padding=1).upper / scale
        assert float(scaled / ns.certify.operator_norm(kernel, size, padding=1).upper) == pytest.approx(1, abs=1e-6)


# The two numeric facts of the theory ------------------------------------------------------------------------------------


def circular_norm(kernel: Tensor, grid: int) -> float:
    """The norm of the circular convolution: the largest singular value over the frequencies of a grid."""
    transformed = np.fft.fft2(kernel.numpy(), (grid, grid)).transpose(2, 3, 0, 1)
    return float(np.linalg.svd(transformed, compute_uv=False).max())


def test_circular_norm_on_the_same_grid_is_no_bound():
    found = 0
    for seed in range(60, 80):
        case = (2, 1, 1, 5, 3, 1, 1, 1, 1, "zeros", False)
        kernel = kernel_of(case, seed)
        truth = float(torch.linalg.matrix_norm(dense(case, kernel), 2))
        assert truth <= circular_norm(kernel, 6)
        found += truth > 1.05 * circular_norm(kernel, 5)
    assert found > 0


def test_strided_bound_is_far_below_the_unstrided_one():
    kernel = randn(4, 4, 3, 3).double()
    truth = largest_singular_value(sparse(kernel, (50, 50), 2, 1, 1, "zeros"))
    bound = float(ns.certify.operator_norm(kernel, (50, 50), stride=2, padding=1).upper)
    assert truth <= bound <= 1.02 * truth
    assert circular_norm(kernel, 52) > 1.2 * bound
