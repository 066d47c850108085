"""Every rule is sound and tight on a case of its own, so a mutant with a tenth taken off its gain is caught."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.certify import chains, relaxation
from normscope.certify.upper import composed, forward_pass
from normscope.graph.graph import Constant
from normscope.graph.trace import trace
from normscope.operators import conv, dense, frequencies
from normscope.rules.readings import LinearMap
from normscope.rules.registry import registry
from normscope.testing import extremal_chain
from tests.cases import CONSTANT, INFINITE, RULE_CASES, UNREACHABLE, VARIANTS, Case, randn

CASES = {**RULE_CASES, **VARIANTS}


def weakened(function, by: float = 0.9):
    """The same function with a tenth taken off what it returns."""

    def mutant(*args, **kwargs):
        result = function(*args, **kwargs)
        if isinstance(result, ns.rules.Gain):
            return dataclasses.replace(result, factors=tuple(factor * by for factor in result.factors))
        if isinstance(result, LinearMap):
            return dataclasses.replace(result, weight=Constant(result.weight.value * by))
        if isinstance(result, tuple):
            return (result[0] * by, *result[1:])
        return None if result is None else result * by

    return mutant


def test_every_rule_has_a_case():
    assert set(registry.rules) == set(RULE_CASES) | set(CONSTANT) | set(INFINITE) | set(UNREACHABLE)


@pytest.mark.parametrize("op", CONSTANT)
def test_what_reads_only_a_shape_adds_nothing(op):
    case = CONSTANT[op]
    assert op in {node.op for node in trace(case.module, case.example)}
    bracket = ns.lipschitz(case.module, case.example)
    assert bracket.lower <= bracket.upper <= bracket.lower * 1.001


@pytest.mark.quick(24)
@pytest.mark.parametrize("name", CASES)
def test_rule_is_tight_and_its_mutant_dies(name, monkeypatch):
    case, op = CASES[name], name.split(":")[0]
    graph = trace(case.module, case.example, case.mode)
    assert op in {node.op for node in graph}, "the case does not use its rule"
    bracket = ns.lipschitz(case.module, case.example, mode=case.mode, effort=case.effort)
    assert bracket.lower <= bracket.upper <= bracket.lower * case.slack
    mutant = copy.copy(registry[op])
    mutant.gain = weakened(mutant.gain, 0.99 / case.slack)
    monkeypatch.setitem(registry.rules, op, mutant)
    assert composed(forward_pass(graph)).bound < bracket.witness.replay()


@pytest.mark.quick(8)
@pytest.mark.parametrize("op", INFINITE)
def test_jumps_have_no_finite_constant(op):
    """Infinite where the jump is exhibited, refused where it is not: never finite, and the reason is named."""
    bracket = ns.audit(INFINITE[op].module, INFINITE[op].example, effort=0.1).bracket
    said = " ".join([bracket.reason, *bracket.certificate.causes])
    assert bracket.upper in (None, math.inf) and op in said and "jump" in said


# What bounds several operations together has mutants of its own -------------------------------------------------------

CHAIN = {
    method: Case(extremal_chain([0.7, 1.5, 1.1], [width, width, width, 2]), randn(1, width))
    for method, width in {"patterns": 6, "LipLT": 14, "ECLipsE-Fast": 14, "LipSDP-Neuron": 13}.items()
}


def dies(case: Case, monkeypatch, *targets) -> bool:
    """Whether weakening these functions is noticed: the bound falls below the lower one, or a check of its own fails."""
    lower = ns.lipschitz(case.module, case.example, mode=case.mode).lower
    for owner, name in targets:
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, weakened(owner[name]))
        else:
            monkeypatch.setattr(owner, name, weakened(getattr(owner, name)))
    try:
        return composed(forward_pass(trace(case.module, case.example, case.mode))).bound < lower
    except AssertionError:
        return True


def test_every_chain_method_has_a_case():
    assert set(chains.METHODS) == set(CHAIN)


@pytest.mark.parametrize("method", CHAIN)
def test_chain_mutant_dies(method, monkeypatch):
    if method == "LipSDP-Neuron":
        pytest.importorskip("cvxpy")
    assert dies(CHAIN[method], monkeypatch, (chains.METHODS, method))


CONVOLUTIONS = {
    "exact": Case(nn.Conv2d(2, 3, 3, padding=1), randn(1, 2, 5, 5)),
    "frequencies": Case(nn.Conv1d(2, 2, 3, padding=1), randn(1, 2, 2500)),
    "circular": Case(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), randn(1, 2, 2500)),
    "padding": Case(nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect"), randn(1, 2, 2500)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_mutant_dies(name, monkeypatch):
    case = CONVOLUTIONS[name]
    truth = ns.certify.operator_norm(case.module, tuple(case.example.shape[1:])).lower
    monkeypatch.setattr(conv.Convolution, "norm", weakened(conv.Convolution.norm, 0.6 if name == "padding" else 0.9))
    assert composed(forward_pass(trace(case.module, case.example))).bound < truth


def test_interpolation_mutant_dies(monkeypatch):
    """Of the Gram matrices at all frequencies that come from those at a few."""
    module, example = nn.Conv1d(8, 8, 3, padding=1), randn(1, 8, 2500)
    truth = ns.certify.operator_norm(module, (8, 2500)).lower
    plain = frequencies.largest_eigenvalue
    monkeypatch.setattr(frequencies, "largest_eigenvalue", lambda *given: 0.8 * plain(*given))
    assert composed(forward_pass(trace(module, example))).bound < truth


def folded(layer: nn.Module, normalizer: nn.Module) -> nn.Sequential:
    normalizer.running_var.copy_(torch.linspace(0.2, 3, len(normalizer.running_var)))
    return nn.Sequential(layer, normalizer)


SPECTRAL = {  # a case for every module that proves spectral norms
    "normscope.rules.affine": RULE_CASES["bmm"],
    "normscope.rules.readings": Case(folded(nn.Linear(4, 4), nn.BatchNorm1d(4)), randn(1, 4)),
    "normscope.rules.averages": RULE_CASES["upsample_linear1d"],
    "normscope.rules.sampling": RULE_CASES["grid_sampler"],
    "normscope.rules.products": RULE_CASES["prod"],
    "normscope.rules.normalizers": Case(affine_with_one_large := nn.LayerNorm(3, eps=0.1), randn(1, 3)),
    "normscope.operators.conv": CONVOLUTIONS["exact"],
    "normscope.operators.frequencies": Case(nn.Conv1d(1, 1, 3, padding=1), randn(1, 1, 2500)),
    "normscope.certify.chains": CHAIN["LipLT"],
}
nn.init.constant_(affine_with_one_large.weight, 0.1)
affine_with_one_large.weight.data[0] = 2.0


@pytest.mark.quick(4)
@pytest.mark.parametrize("module", SPECTRAL)
def test_spectral_norm_mutant_dies(module, monkeypatch):
    assert dies(SPECTRAL[module], monkeypatch, (sys.modules[module], "spectral_norm"))


def test_every_user_of_spectral_norms_has_a_case():
    users = {name for name, module in sys.modules.items() if vars(module).get("spectral_norm") is dense.spectral_norm}
    reporting = {"normscope.ledger", "normscope.certify.operator_norm", "normscope.findings.subject", "normscope.findings.state"}
    reporting.add("normscope.operators.dense")  # where it is defined; tests/operators/test_dense.py
    reporting.add("normscope.certify.relaxation")  # used on regions only, see below
    reporting |= {"normscope.certify.totals", "normscope.certify.perturbed"}  # mutants in tests/certify/test_forms.py
    reporting.add("normscope.floors")  # compared with exact products in tests/test_floors.py
    reporting.add("normscope.optim.capacity")  # caps are compared with exact norms in tests/optim/test_capacity.py
    assert {name for name in users if name.startswith("normscope")} - reporting == set(SPECTRAL)


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.ConvTranspose1d(4, 4, 3, groups=2)], ids=str)
def test_folding_mutant_dies(layer, monkeypatch):
    shape = (1, 4) if isinstance(layer, nn.Linear) else (1, 4, 5)
    case = Case(folded(layer, nn.BatchNorm1d(4)), randn(*shape))
    assert dies(case, monkeypatch, (LinearMap, "scaled"))


def test_relaxation_mutant_dies(monkeypatch):
    """On a ball within which no ReLU changes sides the relaxation is the Jacobian."""
    model, center = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), randn(3)
    region = ns.Ball(center, 1e-4)
    bracket = ns.lipschitz(model, center[None], region=region)
    assert bracket.upper <= bracket.lower * 1.01
    monkeypatch.setattr(relaxation, "spectral_norm", weakened(relaxation.spectral_norm))
    assert composed(forward_pass(trace(model, center[None]), region=region)).bound < bracket.lower
