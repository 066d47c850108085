"""Readings: what an operation is, in one form, whatever its signature."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from normscope.graph.graph import Constant
from normscope.graph.trace import trace
from normscope.rules.affine import ConstantProduct, Linear
from normscope.rules.normalizers import with_epsilon
from normscope.rules.readings import (
    Activation,
    Attention,
    Joining,
    LinearMap,
    Normalizer,
    Permuting,
    Random,
    Reshaping,
    Scaling,
    Softmax,
    Sum,
)
from normscope.rules.registry import registry
from tests.cases import RULE_CASES, VARIANTS, Function, randn

MAPS = {
    "linear": (nn.Linear(4, 6), (1, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (1, 4, 5)),
    "conv2d, reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (1, 4, 5, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, groups=2), (1, 4, 5)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False), (1, 4, 3, 3)),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_scaled_map_is_the_map_with_its_channels_scaled(name):
    module, shape = MAPS[name]
    module, x = copy.deepcopy(module).double(), randn(*shape).double()
    read = registry.reading(trace(module, x).output, LinearMap)
    scale, shift = randn(6).double(), randn(6, seed=1).double()
    by_channel = (1, 6, *[1] * (x.dim() - 2))
    expected = module(x) * scale.reshape(by_channel) + shift.reshape(by_channel)
    scaled = read.scaled(scale, shift)
    module.weight, module.bias = nn.Parameter(scaled.weight.value), nn.Parameter(scaled.bias.value)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(scaled.matrix(), scale[:, None] * read.matrix())
    assert read.output_axis == 1 - x.dim() and read.channels == 6 and scaled.key != read.key


def test_a_batch_normalizer_is_the_affine_map_of_its_reading():
    module, x = nn.BatchNorm1d(3).double().eval(), randn(4, 3).double()
    module.running_mean.copy_(randn(3))
    module.running_var.copy_(randn(3).abs())
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    scale, shift = registry.reading(trace(module, x).output, Normalizer).affine
    torch.testing.assert_close(module(x), scale * x + shift)


NORMALIZERS = {
    "batch": (nn.BatchNorm2d(4, eps=0.1), "batch"),
    "layer": (nn.LayerNorm([3, 3], eps=0.1), "eval"),
    "group": (nn.GroupNorm(2, 4, eps=0.1), "eval"),
    "instance": (nn.InstanceNorm2d(4, eps=0.1, affine=True), "eval"),
    "rms": (nn.RMSNorm(3, eps=0.1), "eval"),
    "layer, by hand": (Function(lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True, correction=0) + 0.1).sqrt()), "eval"),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_has_its_operands_and_takes_another_epsilon(name):
    module, mode = NORMALIZERS[name]
    x = randn(2, 4, 3, 3)
    node = trace(module, x, mode).output
    read = registry.reading(node, Normalizer)
    assert (read.kind, read.epsilon, read.by_hand) == (name.split(",")[0], pytest.approx(0.1), name.endswith("hand"))
    for operand, own in ((read.gamma, getattr(module, "weight", None)), (read.beta, getattr(module, "bias", None))):
        assert (operand is None) == (own is None)
        assert operand is None or torch.equal(operand.value, own)
    assert registry.reading(with_epsilon(node, 7.0), Normalizer).epsilon == 7.0


NAMED = {
    "relu": (functional.relu, Activation(kinked=True, relu_like=True, usual=True)),
    "abs": (torch.abs, Activation(kinked=True, relu_like=False, usual=False)),
    "gelu": (functional.gelu, Activation(kinked=False, relu_like=False, usual=True)),
    "exp": (torch.exp, Activation(kinked=False, relu_like=False, usual=False)),
    "reshape": (lambda x: x.reshape(1, 2, 2), Reshaping()),
    "transpose": (lambda x: x.reshape(1, 2, 2).mT, Permuting()),
    "cat": (lambda x: torch.cat([x, 2 * x], -1), Joining(1)),
    "stack": (lambda x: torch.stack([x, 2 * x], -1), None),
    "slice": (lambda x: x[:, :2], None),
}


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_has_its_input_and_axis(function):
    node = trace(Function(lambda x: function(2 * x, 1)), randn(1, 4)).output
    assert registry.reading(node, Softmax) == Softmax(node.input, 1)


def prelu(x):
    return functional.prelu(x, torch.tensor([0.25], dtype=x.dtype))


@pytest.mark.parametrize(
    "function", [functional.relu, functional.relu6, functional.leaky_relu, prelu, functional.gelu, torch.tanh, torch.erf]
)
def test_an_activation_says_whether_it_is_bounded_and_off_below_zero(function):
    x = torch.tensor([[-1e30, -1e6, -1.0, -1e-3, 1e30]], dtype=torch.float64)
    read, values = registry.reading(trace(Function(function), x).output, Activation), function(x)
    assert (read.bounded, read.off_below) == (bool(values.abs().max() < 10), bool((values[:, :4] == 0).all()))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_says_how_much_it_drops(rate):
    graph = trace(nn.Sequential(nn.Dropout(rate), nn.ReLU()).train(), randn(1, 4), "train")
    assert [read.rate for node in graph if (read := registry.reading(node, Random))] == [rate]


@pytest.mark.parametrize("name", NAMED)
def test_other_readings(name):
    function, expected = NAMED[name]
    assert registry.reading(trace(Function(function), randn(1, 4)).output) == expected


def test_operands_of_sums_products_and_attention():
    constant = randn(4)
    shifted = trace(Function(lambda x: constant + x), randn(1, 4)).output
    assert registry.reading(shifted, Sum).terms == shifted.inputs and isinstance(registry.reading(shifted, Sum).constant, Constant)
    scaled = trace(Function(lambda x: constant * x), randn(1, 4)).output
    assert registry.reading(scaled, Scaling).input is scaled.input and torch.equal(scaled.constants[0].value, constant)
    assert registry.reading(trace(Function(lambda x: x * x), randn(1, 4)).output) is None
    attention = trace(Function(lambda x: functional.scaled_dot_product_attention(2 * x, x, x, scale=3.0)), randn(1, 5, 4)).output
    read = registry.reading(attention, Attention)
    assert (read.query, read.key, read.value, read.scale) == (*attention.inputs, 3.0)


@pytest.mark.parametrize("module", [nn.Dropout(), nn.AlphaDropout(), nn.Dropout2d(), nn.RReLU()], ids=str)
def test_what_draws_random_numbers_is_random_in_training_alone(module):
    x = randn(1, 4, 3, 3)
    assert any(registry.reading(node, Random) is not None for node in trace(nn.Sequential(module, nn.ReLU()).train(), x, "train"))
    assert not any(registry.reading(node, Random) is not None for node in trace(nn.Sequential(module, nn.ReLU()), x))


PRODUCTS = {
    name: case
    for name, case in {**RULE_CASES, **VARIANTS}.items()
    if isinstance(registry[name.split(":")[0]], (Linear, ConstantProduct))
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_plain_map_is_its_matrix(name):
    """Along its axes W x + b is what the node computes."""
    case = PRODUCTS[name]
    for node in trace(case.module, case.example, case.mode):
        read = registry.reading(node, LinearMap)
        if read is not None and read.plain and read.fixed:
            x = randn(*node.input.shape).double()
            expected = x.movedim(read.input_axis, -1) @ read.matrix().T + (0 if read.bias is None else read.bias.double())
            torch.testing.assert_close(node.apply(x), expected.movedim(-1, read.output_axis))
