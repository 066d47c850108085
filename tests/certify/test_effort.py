"""What affine forms may cost, what is said where that is too little, and regions and models at the edge of what they cover."""

import itertools

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import normscope as ns
from normscope.certify import forms
from normscope.certify.forms import affine_forms
from normscope.certify.sweep import Sweep
from normscope.certify.upper import upper
from normscope.core.region import Ball, Box
from normscope.graph.trace import trace
from tests.networks import Function, Joined


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(1, 4)


def near(radius=0.05, **options):
    model, x = network()
    return ns.lipschitz(model, x, region=Ball(x[0], radius), **{"effort": 0.1, **options})


def methods(bracket):
    return {step.method for step in bracket.certificate.steps}


def test_too_little_effort_is_noted_and_more_is_used(monkeypatch):
    whole = near()
    assert "affine forms" in methods(whole) and not whole.notes
    monkeypatch.setattr(forms, "MOST_WORK", 1e4)
    little = near()
    assert len(little.notes) == 1 and "without affine forms" in little.notes[0] and "effort=" in little.notes[0]
    assert "affine forms" not in methods(little) and little.upper >= whole.upper
    model, x = network()
    more = upper(trace(model, x, "eval", None), region=Ball(x[0], 0.05), effort=100.0)
    assert more.bound == whole.upper and not more.notes


def test_an_interrupt_leaves_the_bound_without_forms(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    whole = near()
    for owner, part in ((Sweep, "carry_inputs"), (Sweep, "_carry_symbols"), (forms, "total")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, part, interrupted)
            found = near()
        assert whole.upper <= found.upper and found.upper.finite and "interrupted" in found.notes[0]


def test_symbols_beyond_the_budget_are_noted():
    model, x = network()
    graph = trace(model, x, "eval", None)
    assert not affine_forms(graph, Ball(x[0], 0.05)).notes
    assert "symbols beyond 2 per node" in affine_forms(graph, Ball(x[0], 0.05), most_symbols=2).notes[0]


@pytest.mark.parametrize("effort", [-1.0, float("nan"), "much"])
def test_effort_is_a_number(effort):
    with pytest.raises(ns.InputError, match="effort must be a finite number"):
        near(effort=effort)


def test_the_bound_on_a_region_is_never_above_that_of_a_larger_one():
    radii = (0.0, 1e-320, 1e-300, 1e-16, 1e-3, 0.1, 1.0, 1e10, 1e160, 1e300)
    model, x = network()
    uppers = [*(near(radius, effort=0.0).upper for radius in radii), ns.lipschitz(model, x, effort=0.0).upper]
    assert all(small <= large.widened(1e-6) for small, large in itertools.pairwise(uppers))


def attention(mask):
    def apply(x):
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    return Function(apply)


def logits(mask):
    return Function(lambda x: torch.softmax(x @ x.mT + mask, -1) @ x)


CAUSAL = torch.tril(torch.ones(3, 3)).bool()
HIDDEN = torch.zeros(3, 3).masked_fill(~CAUSAL, -torch.inf)
ODD = {
    "a kink in the middle": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), (0.0 * torch.ones(1, 4),)),
    "a constant output": (lambda: Function(lambda x: torch.ones_like(x) + 0 * x), (torch.ones(1, 4),)),
    "empty parts": (lambda: Function(lambda x: torch.cat([x[:, :0].relu(), x.relu()], 1)), (torch.ones(1, 4),)),
    "an infinite slope": (lambda: Function(lambda x: x.abs().sqrt()), (torch.zeros(1, 4),)),
    "a pole": (lambda: Function(lambda x: 1 / x), (0.01 * torch.ones(1, 4),)),
    "jumps": (lambda: Function(torch.round), (0.5 * torch.ones(1, 4),)),
    "constant tokens": (lambda: nn.LayerNorm(4), (torch.ones(1, 4),)),
    "numbers that underflow": (lambda: Function(lambda x: torch.relu(x * 1e-40) * 1e38), (torch.ones(1, 4),)),
    "numbers that overflow": (lambda: Function(lambda x: torch.exp(1e3 * x)), (torch.ones(1, 4),)),
    "BN in eval": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), (torch.ones(1, 4),)),
    "two inputs": (lambda: Function(lambda x, y: torch.relu(x) * torch.tanh(y).sum(-1, keepdim=True)), (torch.ones(1, 4), torch.ones(1, 3))),
    "an integer beside": (lambda: Function(lambda x, i: torch.relu(x * (i + 1)[:, None])), (torch.ones(1, 4), torch.tensor([2]))),
    "a mask": (lambda: attention(CAUSAL), (torch.ones(1, 3, 4),)),
    "a row without keys": (lambda: attention(CAUSAL & torch.tensor([[False], [True], [True]])), (torch.ones(1, 3, 4),)),
    "a mask of infinities": (lambda: attention(HIDDEN), (torch.ones(1, 3, 4),)),
    "logits of −∞": (lambda: logits(HIDDEN), (torch.ones(1, 3, 4),)),
    "logits far below": (lambda: logits(HIDDEN.clamp(min=-3e38)), (torch.ones(1, 3, 4),)),
    "values of −∞": (lambda: Function(lambda x: x.masked_fill(torch.arange(4) == 0, -torch.inf)), (torch.ones(1, 4),)),
    "residuals that cancel": (lambda: Joined(lambda x, y: x - y, nn.ReLU(), nn.ReLU()), (torch.zeros(1, 4),)),
}  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ODD)
def test_forms_never_loosen_or_contradict(name, monkeypatch):
    """Beside `check_bound` and the search, which every bracket passes: what is found without forms is not below."""
    make, example = ODD[name]
    model, points = make().eval(), [part[0] for part in example if part.is_floating_point()]
    some = [torch.arange(point.numel()).reshape(point.shape) % 2 * 0.1 for point in points]
    flat = Box([point - width for point, width in zip(points, some, strict=True)], [point + width for point, width in zip(points, some, strict=True)])  # fmt: skip
    for region in (Ball(points, 0.0), Ball(points, 1e-3), Ball(points, 2.0), flat):
        found = ns.audit(model, example, region=region, effort=0.1).bracket
        with monkeypatch.context() as patch:
            patch.setattr(forms.AffineForms, "__call__", lambda *arguments: None)
            without = ns.audit(model, example, region=region, effort=0.1).bracket
        assert without.upper is None or found.lower <= found.upper <= without.upper.widened(1e-9)


def test_progress_is_told_of_affine_forms():
    (model, x), told = network(), []
    ns.lipschitz(model, x, region=ns.Ball(x[0], 0.5), progress=lambda *report: told.append(report))
    made = [(done, expected) for what, done, expected in told if what == "affine forms"]
    assert len(made) > 1 and all(0 < done <= expected for done, expected in made)
    assert [done for done, _ in made] == sorted(done for done, _ in made)
    assert {what for what, *_ in told} == {"affine forms", "bounding"}
