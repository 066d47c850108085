"""Networks whose constant is known, and the check for rules of one's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope.graph.trace import trace
from normscope.rules.registry import registry
from normscope.testing import check_rule, extremal_chain, extremal_constant, extremal_weight_constant
from tests.networks import Function, randn

CHAINS = [
    ([2.0], [3, 3]),
    ([1.7, 0.3], [4, 6, 2]),
    ([0.1, 30.0, 1.3, 2.0], [5, 2, 7, 3, 4]),
    ([1.1] * 12, [3] * 13),
    ([1e-3, 1e4, 1e-2], [1, 5, 1, 2]),
]


@pytest.mark.parametrize("constants, widths", CHAINS)
def test_the_bracket_of_an_extremal_chain_is_its_constant(constants, widths):
    bracket = ns.lipschitz(extremal_chain(constants, widths), randn(4, widths[0]))
    exact = math.prod(constants)
    assert bracket.lower.log <= math.log(exact) + 1e-6 and bracket.upper.log >= math.log(exact) - 1e-6
    assert math.isclose(float(bracket.lower), exact, rel_tol=1e-6) and math.isclose(float(bracket.upper), exact, rel_tol=1e-6)
    assert math.isclose(float(extremal_constant(constants)), exact, rel_tol=1e-12)


@pytest.mark.parametrize("constants, widths", [([2.0, 0.5], [3, 5, 2]), ([4.0, 0.25, 1.5], [3, 2, 4, 3])])
def test_dyadic_chains_are_contained_exactly(constants, widths):
    """Weights that float32 holds without rounding, so that the constant must lie inside, not only near."""
    assert math.prod(constants) in ns.lipschitz(extremal_chain(constants, widths), randn(4, widths[0]))


def test_other_activations_with_slope_one_are_as_long():
    found = ns.lipschitz(extremal_chain([2.0, 3.0], [3, 4, 3], nn.LeakyReLU), randn(4, 3))
    assert math.isclose(float(found.lower), 6, rel_tol=1e-6) and math.isclose(float(found.upper), 6, rel_tol=1e-6)


def test_a_zero_layer_makes_a_constant_network():
    found = ns.lipschitz(extremal_chain([2.0, 0.0, 3.0], [3, 4, 3, 2]), randn(4, 3))
    assert found.lower == 0 and found.upper == 0 and extremal_constant([2.0, 0.0, 3.0]) == 0


def test_widths_must_fit():
    with pytest.raises(ValueError, match="2 layers need 3 widths, got 2"):
        extremal_chain([1.0, 2.0], [3, 3])


@pytest.mark.parametrize("constants, widths", [([2.0, 0.5, 3.0], [5, 4, 3, 2]), ([1.5, 2.0, 0.25, 4.0], [4, 6, 3, 5, 2])])
def test_theorem_13_corrected_is_the_norm_of_the_jacobian(constants, widths):
    """∂h/∂W_i by autograd, as a matrix (outputs, entries of W_i), at a point with positive coordinates."""
    model = extremal_chain(constants, widths).double()
    x = randn(widths[0]).double().abs() + 0.1
    stated = []
    for layer in range(len(constants)):
        name = f"{2 * layer}.weight"

        def output(weight: Tensor, name: str = name) -> Tensor:
            return torch.func.functional_call(model, {name: weight}, (x,))

        jacobian = torch.autograd.functional.jacobian(output, model.get_parameter(name)).reshape(widths[-1], -1)
        exact = float(torch.linalg.matrix_norm(jacobian, 2))
        assert math.isclose(float(extremal_weight_constant(model, constants, layer, x)), exact, rel_tol=1e-12)
        before = model[: 2 * layer](x)
        stated.append(math.prod(constants[layer + 1 :]) * float(before[: min(widths[layer + 1 :])].detach().norm()) / exact)
    assert min(stated) < 0.99  # as printed, with h_{i−1} cut to the later widths, the constant is too small


@torch.library.custom_op("normscope_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return 3 * x


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda context, gradient: 3 * gradient, setup_context=lambda ctx, inputs, output: None)
triple.register_vmap(lambda info, dims, x: (triple(x), dims[0]))


@torch.library.custom_op("normscope_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)  # neither a derivative nor a batching rule


class Tripled(nn.Module):
    """3 · diag(weights) x, by an operation that only its rule can bound."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.linear = nn.Linear(len(weights), len(weights))
        with torch.no_grad():
            self.linear.weight.copy_(torch.diag(torch.tensor(weights)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.normscope_tests.triple(self.linear(x))


@pytest.fixture
def rules(monkeypatch):
    """A table of rules that is put back afterwards."""
    monkeypatch.setattr(registry, "rules", dict(registry.rules))
    return ns.rules


def test_an_operation_without_a_rule_is_refused():
    with pytest.raises(ns.Refusal, match=r"normscope_tests\.triple"):
        check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3))


def test_a_sound_rule_passes(rules):
    rules.register(torch.ops.normscope_tests.triple, 3.0)
    found = check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3), tight=1.001)
    assert found.upper <= found.lower * 1.001 and found.lower > 0


@pytest.mark.parametrize("stated", [0.0, 2.0, 2.99, lambda node: 2.9])
def test_an_unsound_rule_is_caught(rules, stated):
    rules.register(torch.ops.normscope_tests.triple, stated)
    with pytest.raises(AssertionError, match="unsound for Tripled"):
        check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3))


def test_an_unsound_rule_is_caught_where_one_direction_is_steepest(rules):
    rules.register(torch.ops.normscope_tests.triple, 2.9)
    with pytest.raises(AssertionError, match="unsound"):
        check_rule(Tripled(1.0, *[0.1] * 15), randn(2, 16))


def test_an_operation_without_a_derivative_is_checked_by_differences(rules):
    module = nn.Sequential(nn.Identity(), Function(torch.ops.normscope_tests.doubled))
    rules.register(torch.ops.normscope_tests.doubled, 2.0)
    assert check_rule(module, randn(2, 3)).lower > 0
    rules.register(torch.ops.normscope_tests.doubled, 1.9, overwrite=True)
    with pytest.raises(AssertionError, match="unsound"):
        check_rule(module, randn(2, 3))


def test_an_operation_that_functorch_cannot_differentiate_is_still_mapped_over_a_batch():
    batched = trace(Tripled(1.0, 1.0, 1.0), randn(2, 3)).batched()
    with pytest.raises(RuntimeError):
        torch.func.vjp(batched, randn(2, 3))
    assert not batched.one_by_one


def test_a_loose_rule_is_sound_but_not_tight(rules):
    rules.register("normscope_tests.triple", 30.0)
    found = check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3))
    assert found.upper >= found.lower * 9
    with pytest.raises(AssertionError, match="not tight"):
        check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3), tight=2.0)


def test_registering_twice_needs_overwrite(rules):
    rules.register(torch.ops.normscope_tests.triple, 2.0)
    with pytest.raises(ns.InputError, match="overwrite"):
        rules.register(torch.ops.normscope_tests.triple, 3.0)
    rules.register(torch.ops.normscope_tests.triple, 3.0, overwrite=True)
    check_rule(Tripled(1.0, 1.0, 1.0), randn(2, 3), tries=1)


def test_gains_below_zero_are_rejected(rules):
    for gain in (-1.0, math.nan):
        with pytest.raises(ns.InputError):
            rules.register("normscope_tests.other", gain)
