"""A wrong form is refuted: what a rule claims about an operation is held against the numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.rules.registry import registry
from normscope.symmetry import shifts
from tests.networks import Function, randn
from tests.symmetry.layers import Attention


def linear(before: int, after: int) -> nn.Linear:
    return nn.Linear(before, after)


def entrywise(node, forms):
    return forms.entrywise(forms.of(node.inputs[0]))


def negated(node, forms):
    return forms.entrywise(forms.of(node.inputs[0]), odd_linear=True)


def centered(node, forms):
    return forms.normalized(forms.of(node.args[0]), (-1,), centered=True)


def per_channel(node, forms):
    return forms.normalized(forms.of(node.args[0]), (0, *range(2, len(node.shape))), centered=True)


def of_degree_one(node, forms):
    return forms.entrywise(forms.of(node.inputs[0]), 1.0)


def unpadded(node, forms):
    product = registry.rules["convolution"].form(node, forms)
    (product.operands[0] if not hasattr(product, "constants") else product).constants = True
    return product


def divided_once(node, forms):
    return forms.product(*map(forms.of, node.args[:2]))


MUTANTS = {  # an operation, what a mutant says it is, and a model on which that is seen
    "tanh is homogeneous": ("tanh", entrywise, nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2)), (6, 3)),
    "gelu is homogeneous": ("gelu", entrywise, nn.Sequential(linear(3, 4), nn.GELU(), linear(4, 2)), (6, 3)),
    "relu is linear": ("relu", negated, nn.Sequential(linear(3, 4), nn.ReLU(), linear(4, 2)), (6, 3)),
    "squares have degree 1": ("square", of_degree_one, nn.Sequential(linear(3, 4), Function(torch.square), linear(4, 2)), (6, 3)),
    "RMSNorm subtracts its mean": ("rms_norm", centered, nn.Sequential(linear(3, 4), nn.RMSNorm(4), nn.Tanh()), (6, 3)),
    "LN is BN": ("layer_norm", per_channel, nn.Sequential(linear(3, 4), nn.LayerNorm(4), nn.Tanh()), (6, 3)),
    "GN is BN": ("group_norm", per_channel, nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh()), (6, 2, 5)),
    "padding keeps constants": ("conv1d", unpadded, nn.Sequential(nn.BatchNorm1d(2), nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Tanh()), (6, 2, 5)),
    "a quotient is a product": ("div", divided_once, nn.Sequential(linear(3, 4), Function(lambda x: x / x.abs().sum(1, keepdim=True).reciprocal()), nn.Tanh()), (6, 3)),
}  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_refuted(name, monkeypatch):
    op, form, model, shape = MUTANTS[name]
    example = randn(*shape)
    assert ns.symmetries(model, example).check() == []
    mutant = copy.copy(registry.rules[op])
    mutant.form = form
    monkeypatch.setitem(registry.rules, op, mutant)
    refuted = ns.symmetries(model, example).check()
    assert refuted and "a bug of normscope" in str(refuted[0])


def test_a_search_that_forgets_what_is_forbidden_is_refuted(monkeypatch):
    monkeypatch.setattr(shifts, "extends", lambda labels, axis, size: False)
    assert ns.symmetries(nn.Sequential(nn.Tanh(), Attention(), nn.Tanh()), randn(4, 5, 4)).check()
