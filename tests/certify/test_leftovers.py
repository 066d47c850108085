"""κ behind a node: an error in front of it, carried by the map itself, is never longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope.certify import sweep
from normscope.certify.certifiable import certifiable_graph
from normscope.certify.columns import rule_of
from normscope.certify.forms import affine_forms
from normscope.certify.leftovers import Leftovers
from normscope.certify.passing import Pass
from normscope.certify.precise import PreciseMiddle
from normscope.core.region import Ball
from normscope.rules.remainder import Remainder, Sets


def against_each_other() -> nn.Module:
    """BN that shrinks the channels which the convolution stretches: together they stretch by no more than about 2."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        factors = torch.tensor([1e3, 1.0, 1e-2, 10.0])
        model[1].weight.copy_(torch.linalg.qr(torch.randn(4, 4))[0].mul(factors[:, None]).reshape(4, 4, 1, 1))
        model[2].running_var.copy_(factors.square())
        model[2].running_mean.normal_()
    return model.eval()


@pytest.mark.parametrize("first_sweep", [False, True])
def test_an_error_goes_along_the_link(first_sweep):
    torch.manual_seed(0)
    model, example = against_each_other(), torch.rand(1, 4, 2, 2) + 0.1
    graph = certifiable_graph(model, example, "eval", None)
    facts = Pass(graph, Ball(example[0].double(), 1e-3))
    kappa = Leftovers(facts, 1.0, dict.fromkeys(graph.nodes, 0.0), PreciseMiddle(graph) if first_sweep else None)
    for node in graph.nodes:
        rule = None if node.is_input else rule_of(node)
        kappa.settle(node, rule, [] if rule is None else [float(factor) for factor in facts.gain(node).factors])
        if node.op == "relu" and node.input.is_input:
            kappa.left[node] = 1.0
        elif node.op == "batch_norm":
            behind = kappa.left[node]
    plain = model[1].weight.detach()[:, :, 0, 0].double() / (model[2].running_var.double() + model[2].eps).sqrt()[:, None]
    exact = float(torch.linalg.matrix_norm(plain, 2))
    assert exact <= behind <= exact * (1 + 1e-6) < 3


def test_what_a_member_of_a_link_rounds_goes_through_those_behind_it():
    torch.manual_seed(0)
    model, example = against_each_other(), torch.rand(1, 4, 2, 2) + 0.1
    graph = certifiable_graph(model, example, "eval", None)
    facts = Pass(graph, Ball(example[0].double(), 1e-3))
    kappa = Leftovers(facts, 1.0, dict.fromkeys(graph.nodes, 1.0), None)
    for node in graph.nodes:
        rule = None if node.is_input else rule_of(node)
        kappa.settle(node, rule, [] if rule is None else [float(factor) for factor in facts.gain(node).factors])
    convolution, norm = (next(node for node in graph.nodes if node.op == op) for op in ("conv2d", "batch_norm"))
    (factor,) = facts.gain(norm).factors
    assert kappa.own[convolution] > 0
    assert kappa.left[norm] >= float(factor) * kappa.own[convolution] + kappa.own[norm]


def test_symbols_that_become_an_error_inside_a_link_are_part_of_it(monkeypatch):
    """LN leaves its symbols to the matrix behind it, where too many of them become part of κ: BN, which is folded, has it too."""
    monkeypatch.setattr(sweep, "MANY_SYMBOLS", 4)
    torch.manual_seed(0)
    layers = nn.Linear(3, 16), nn.LayerNorm(16), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
    model, x = nn.Sequential(*layers).double().eval(), torch.randn(1, 3).double()
    forms = affine_forms(certifiable_graph(model, x, "eval", None), Ball(x[0], 0.3), most_symbols=0)
    assert forms.moves.folded == 6
    linear, norm = (next(node for node in forms.graph.nodes[3:] if node.op == op) for op in ("linear", "batch_norm"))
    (factor,) = forms.moves.facts.gain(norm).factors
    assert forms.moves.left[norm] >= 0.999 * float(factor) * forms.moves.left[linear] > 0.1


def test_entries_that_leave_nothing_out_add_nothing_to_their_set():
    """Units whose sign is certain have scale 0: the bound on a token is not twice as large because of them."""
    scale, sizes = torch.tensor([[0.0, 0.5, 0.0, 1.0]]).double(), torch.tensor([[3.0, 1.0, 2.0, 1.0]]).double()
    sets = Sets.along(scale.shape, (-1,))
    made = Remainder(scale, sizes, (sets, torch.tensor([2.0]).double())).twice(1e-12)
    assert bool((made.entries >= sizes).all()) and float((made.entries - sizes).max()) <= 3e-12
    assert made.sets is not None and 2.0 < float(made.sets[1]) < 2.0 + 1e-11
