"""What an audit says about the first sample, how far it stays tight, and where the gap comes from."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.auditing import Audit
from normscope.certify import nearby
from normscope.certify.sweep import Sweep
from tests.networks import randn


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).double().eval()


X = randn(3, 5).double()
RADIUS = 1e-3 * float(X[0].norm())


@pytest.fixture(scope="module")
def audited() -> Audit:
    return ns.audit(network(), X, effort=0.1)


def sides(bracket: ns.Bracket) -> tuple[float, float]:
    return bracket.lower.log, bracket.proved.log


def test_the_local_bracket_is_that_of_the_ball(audited):
    assert audited.local_radius == pytest.approx(RADIUS)
    alone = ns.lipschitz(network(), X, region=ns.Ball(X[0], audited.local_radius), effort=0.1)
    assert sides(audited.local) == sides(alone) and audited.local.gap == alone.gap
    assert audited.local.proved <= audited.bracket.proved and audited.local.ratio <= audited.bracket.ratio


def test_generators_draw_for_the_local_bracket_what_they_would_draw_for_it_alone():
    found = ns.audit(network(), X, effort=0.1, generator=torch.Generator().manual_seed(7), local=0.05)
    ball = ns.Ball(X[0], 0.05)
    alone = ns.lipschitz(network(), X, region=ball, effort=0.1, generator=torch.Generator().manual_seed(7))
    assert found.local_radius == 0.05 and sides(found.local) == sides(alone)


def test_both_numbers_stand_side_by_side(audited):
    near = f"around the first input, within {audited.local_radius:.3g}: {audited.local}; over all inputs at most {audited.bracket.upper}"
    assert near in str(audited) and "worst input imaginable" in str(audited)
    assert near in audited._repr_html_().replace("&lt;", "<")
    assert "worst input imaginable" in str(ns.lipschitz(network(), X, effort=0).render())


@pytest.mark.parametrize("arguments", [{"local": False}, {"region": ns.Ball(X[0], 0.01)}])
def test_nothing_is_added_where_it_is_not_wanted(arguments):
    found = ns.audit(network(), X, effort=0, **arguments)
    assert found.local is None and found.local_radius is None and "around the first input" not in str(found)


def test_beyond_the_budget_a_note_says_so(monkeypatch):
    monkeypatch.setattr(nearby, "BUDGET", 10.0)
    found = ns.audit(network(), X, effort=0)
    assert found.local is None and any("no bracket around the first sample: it would take about" in note for note in found.notes)
    assert ns.audit(network(), X, effort=0, local=0.01).local is not None


def test_in_a_deep_network_the_budget_counts_calls():
    """Entries alone would allow it: columns go through every node behind each of 120 ReLUs."""
    layers = [layer for _ in range(120) for layer in (nn.Linear(2, 2), nn.ReLU())]
    found = ns.audit(nn.Sequential(*layers), randn(1, 2), effort=0)
    assert found.local is None and any("times the budget" in note for note in found.notes)


def test_what_goes_wrong_nearby_leaves_the_audit(monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(nearby, "estimate", fails)
    found = ns.audit(network(), X, effort=0)
    assert found.bracket.upper is not None and any("no such luck" in note for note in found.notes)


def test_a_sample_of_zeros_has_a_ball():
    assert ns.audit(network(), torch.zeros(1, 5).double(), effort=0).local_radius == pytest.approx(1e-3)


@pytest.mark.parametrize("local", [0.0, -1, float("nan"), float("inf"), "auto", None])
def test_local_is_a_radius(local):
    with pytest.raises(ns.InputError, match=r"^local must be True, False or a radius"):
        ns.audit(network(), X, local=local)


@pytest.mark.quick(1)
@pytest.mark.parametrize("region", [ns.Ball(X[0], 0.05), ns.Box(X[0] - 0.02, X[0] + 0.03)], ids=["ball", "box"])
def test_a_radius_found_is_within_the_factor_when_asked_directly(region):
    found = ns.lipschitz(network(), X, region=region, effort=0.1).radius_within(1.5, tolerance=0.3)
    asked = ns.lipschitz(network(), X, region=found.region, effort=0.1)
    assert found.radius > 0 and asked.ratio <= 1.5
    assert found.beyond is None or found.beyond <= 1.3 * found.radius


def test_a_model_that_has_changed_is_not_asked():
    model = network()
    for wrt in ("input", "weights"):
        found = ns.lipschitz(model, X, region=ns.Ball(X[0], 0.05), effort=0, wrt=wrt)
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(ns.InputError, match="the model has changed since"):
            found.radius_within(2)


@pytest.mark.parametrize("size", [1.0, 1e-200])
@pytest.mark.parametrize("wrt", ["input", "weights"])
def test_entries_that_are_exchanged_are_a_change(size, wrt):
    """Sums and sums of squares are the same, and squares of small weights are all 0."""
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(size)
    found = ns.lipschitz(model, X, region=ns.Ball(X[0], 0.05), effort=0, wrt=wrt)
    model[0].weight.data.copy_(model[0].weight.data.flip(1))
    with pytest.raises(ns.InputError, match="the model has changed since"):
        found.radius_within(2)


@pytest.mark.parametrize(
    "held",
    [
        torch.ones(1).expand(1, 1), torch.ones(1).double().as_strided((1,), (0,)), torch.ones(2).expand(3, 2), torch.ones(3)[::2], torch.zeros(0, 3),
        torch.tensor(2.0), torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True]),
    ],
)  # fmt: skip
def test_a_model_may_hold_tensors_of_any_kind(held):
    class Holding(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + (self.held.sum() if self.held.layout == torch.strided and not self.held.is_complex() else 0)

    model = Holding(nn.Linear(3, 3), nn.Tanh())
    model.register_buffer("held", held)
    assert ns.lipschitz(model.eval(), X[:, :3].float(), region=ns.Ball(X[0, :3].float(), 0.05), effort=0).radius_within(2)


@pytest.mark.parametrize("radius", [1e-6, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_shares_of_the_gap_are_at_most_all_of_it(radius, seed):
    found = ns.lipschitz(network(seed), X, region=ns.Ball(X[0], radius), effort=0.1)
    shares = [share.share for share in found.gap]
    assert all(share >= 0 for share in shares) and sum(shares) <= 1 + 1e-9 and shares == sorted(shares, reverse=True)
    assert {share.where for share in found.gap} <= {"", "1", "3", "4"}
    if radius == 0.1:
        assert found.gap and str(found.gap[0]) in str(found.render())


def test_the_curve_is_part_of_the_audit(tmp_path):
    found = ns.audit(network(), X, effort=0, within=1.5)
    assert found.curve is not None and found.curve.lines()[0] in str(found)
    made = found.figure("gap")
    for trace, side in zip(made.data, ("lower", "upper"), strict=True):
        assert list(trace.y) == [getattr(point, side).log10 for point in found.curve.points]
        assert list(trace.x) == [math.log10(point.radius) for point in found.curve.points]
    again = Audit.from_dict(json.loads(found.to_json()))
    for field in ("bracket", "local", "curve"):
        assert again.to_dict()[field] == found.to_dict()[field]
    assert str(again) == str(found)
    found.to_html(tmp_path / "audit.html")
    assert "Certificate gap" in (tmp_path / "audit.html").read_text(encoding="utf-8")
    with pytest.raises(ns.InputError, match="no curve"):
        ns.audit(network(), X, effort=0, local=False).figure("gap")
    with pytest.raises(ns.InputError, match=r"^within must be a finite number above 1"):
        ns.audit(network(), X, within=1)


def test_an_interrupt_inside_the_forms_ends_the_search(monkeypatch):
    """The forms themselves keep the bound without them; a search for radii stops there, and leaves that bound out of its curve."""
    found = ns.lipschitz(network(), X, region=ns.Ball(X[0], 0.05), effort=0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "settle", interrupted)
    curve = found.radius_within(2)
    assert curve.interrupted and [point.radius for point in curve.points] == [0.05]
    with pytest.raises(KeyboardInterrupt):
        ns.certify.certify_radius(network(), X, (X, network()(X).argmax(1)))
