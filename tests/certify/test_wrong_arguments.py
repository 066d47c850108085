"""A wrong argument is told in one line that says what is wrong; nothing is reported as a limitation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normscope as ns

LINEAR, X = nn.Linear(4, 3), torch.ones(2, 4)
LABELS = torch.tensor([0, 1])
EMPTY = nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 0), nn.ReLU(), nn.utils.skip_init(nn.Linear, 0, 3))

WRONG = {
    "a function": lambda: ns.lipschitz(lambda x: x, X),
    "no model": lambda: ns.lipschitz(None, X),
    "a class": lambda: ns.lipschitz(nn.Linear, X),
    "a lazy layer": lambda: ns.lipschitz(nn.LazyLinear(3), X),
    "no region": lambda: ns.lipschitz(LINEAR, X, region="a"),
    "a ball of words": lambda: ns.Ball("a", 1.0),
    "a ball of radius None": lambda: ns.Ball(X[0], None),
    "a box of None": lambda: ns.Box(None, X[0]),
    "effort NaN": lambda: ns.lipschitz(LINEAR, X, effort=math.nan),
    "effort in words": lambda: ns.lipschitz(LINEAR, X, effort="much"),
    "effort infinite": lambda: ns.certify.local_brackets(LINEAR, X, X, radius=1.0, effort=math.inf),
    "a seed": lambda: ns.lipschitz(LINEAR, X, generator=5),
    "a seed for weights": lambda: ns.lipschitz(LINEAR, X, generator=5, wrt="weights"),
    "truths as labels": lambda: ns.certify.certify_radius(LINEAR, X, (X, LABELS.bool())),
    "no data": lambda: ns.certify.certify_radius(LINEAR, X, None),
    "no radii": lambda: ns.certify.certify_radius(LINEAR, X, (X, LABELS), radii=None),
    "radii in words": lambda: ns.certify.certify_radius(LINEAR, X, (X, LABELS), radii="ab"),
    "progress of a number": lambda: ns.certify.local_brackets(LINEAR, X, X, radius=1.0, progress=5),
    "progress of radii in words": lambda: ns.certify.certify_radius(LINEAR, X, (X, LABELS), progress="bar"),
    "progress of curvature": lambda: ns.hessian(LINEAR, nn.functional.cross_entropy, (X, LABELS), progress=5).top(1),
    "progress of bounds": lambda: ns.generalization(LINEAR, nn.functional.cross_entropy, (X, LABELS), progress=5),
    "a number to report to": lambda: ns.audit(LINEAR, X, report=5),
    "a sparse example": lambda: ns.lipschitz(LINEAR, X.to_sparse()),
    "sparse data": lambda: ns.lipschitz(LINEAR, X, data=X.to_sparse()),
    "bytes as data": lambda: ns.lipschitz(LINEAR, X, data=X.to(torch.uint8)),
    "bytes around which": lambda: ns.certify.local_brackets(LINEAR, X, X.to(torch.uint8), radius=1.0),
    "the norm of a word": lambda: ns.certify.operator_norm("a"),
    "a negative size": lambda: ns.certify.operator_norm(LINEAR, (-1, 4)),
    "sizes in words": lambda: ns.certify.operator_norm(LINEAR, "ab"),
    "a complex matrix": lambda: ns.certify.operator_norm(torch.eye(2) + 0j),
    "a sparse matrix": lambda: ns.certify.operator_norm(torch.eye(2).to_sparse()),
    "no groups": lambda: ns.certify.operator_norm(torch.ones(2, 2, 3), 5, groups=0),
    "a constant": lambda: ns.lipschitz(EMPTY, X),
    "a constant on a ball": lambda: ns.lipschitz(EMPTY, X, region=ns.Ball(X[0], 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_input_error_of_one_line(name):
    with pytest.raises(ns.InputError) as caught:
        WRONG[name]()
    assert "\n" not in str(caught.value) and "please report" not in str(caught.value)


def test_layers_of_no_size_are_constants():
    assert float(ns.lipschitz(nn.utils.skip_init(nn.Linear, 0, 3), torch.zeros(2, 0)).upper) == 0


@pytest.mark.parametrize(("size", "dtype"), [(1e38, torch.float32), (1e308, torch.float64)])
def test_examples_at_the_end_of_the_range_are_covered(size, dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    assert 1.0 in ns.lipschitz(model, torch.full((1, 4), size, dtype=dtype))
