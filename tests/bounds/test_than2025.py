"""Theorem 20 and its corollaries: by hand on tiny cases, sound in every cell, monotone, in log domain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.bounds import constants
from normscope.bounds.bound import CERTIFIED, ESTIMATE, GAP, MEASURE
from normscope.bounds.constants import TRIES, global_constants, local_constants
from normscope.bounds.generalization import generalization
from normscope.bounds.losses import Loss, loss_of
from normscope.bounds.partition import Partition
from normscope.bounds.setting import Setting
from normscope.bounds.theorems.than2025 import VERSIONS, largest_gradients, largest_ratios
from normscope.bounds.uncertainty import sharper_uncertainty, stated_uncertainty
from normscope.core.region import Ball
from tests.bounds.models import MODELS, batch_norm, data, layer_norm, plain

UNIT = ns.Box(0, 1)
SLOPE = 3.0


def sloped() -> nn.Module:
    """z = (3x, 0): ‖h‖_Lip = 3."""
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[SLOPE], [0.0]]))
        model.bias.zero_()
    return model.double()


TINY = (torch.tensor([[0.1], [0.3], [0.9]], dtype=torch.float64), torch.tensor([0, 0, 1]))


def tiny_setting(loss: str = "l1") -> Setting:
    return Setting(sloped(), loss_of(loss), TINY, delta=0.1, domain=UNIT, partition=Partition("grid", 2), cellwise=True)


def sigmoid(t: float) -> float:
    return 1 / (1 + math.exp(-t))


def test_every_ingredient_by_hand():
    """Two cells of [0, 1], three samples: cell 0 with label 0 has 0.1 and 0.3, cell 1 with label 1 has 0.9."""
    found = generalization(
        sloped(), "l1", TINY, delta=0.1, domain=UNIT, partition=Partition("grid", 2), select=["Than 2025, global constant"]
    )[0]
    losses = [2 * sigmoid(-0.3), 2 * sigmoid(-0.9), 2 * sigmoid(2.7)]
    means = [(losses[0] + losses[1]) / 2, losses[2]]
    distances, constant = [0.25 + 0.1, 0.25 + 0.15], SLOPE / math.sqrt(2)
    rises = [min(d * constant, 2 - f) for d, f in zip(distances, means, strict=True)]
    spread = (2 * rises[0] + rises[1]) / 3
    part = 2 * math.log(2 * 5 / 0.1) / 3
    g = 2 * ((math.sqrt(2) + 1) * math.sqrt(part) + 2 * part)
    parts = found.parts
    assert parts["N"] == 5 and parts["|T|"] == 2 and parts["m"] == 3 and parts["C"] == 2
    assert parts["m_i"].tolist() == [2, 1]
    assert parts["λ_i"].tolist() == pytest.approx(distances)
    assert parts["L_i"].tolist() == pytest.approx([constant] * 2)
    assert parts["λ_i L_i, cut"].tolist() == pytest.approx(rises)
    assert parts["g(D, δ)"] == pytest.approx(g)
    assert float(found.value) == pytest.approx(sum(losses) / 3 + spread + g)
    assert found.certified and found.vacuous and found.quantity == "risk"


def test_local_constants_by_hand():
    """The log-odds at a centre c are ± 3c, and within √2 · 3 · ¼ of it on the cell: 2p(1 − p) at the value nearest to 0."""
    setting = tiny_setting()
    found = local_constants(setting, setting.cells[0]).exp()
    reach = math.sqrt(2) * SLOPE * 0.25
    nearest = [max(0.0, SLOPE * 0.25 - reach), min(0.0, -SLOPE * 0.75 + reach)]
    expected = [math.sqrt(2) * 2 * sigmoid(s) * (1 - sigmoid(s)) * SLOPE for s in nearest]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_ratios_and_gradients_by_hand():
    setting = tiny_setting()
    rows = setting.cells[0]
    slopes = [2 * SLOPE * sigmoid(s) * (1 - sigmoid(s)) for s in (0.3, 0.9, 2.7)]
    assert largest_gradients(setting, rows).exp().tolist() == pytest.approx([max(slopes[:2]), slopes[2]])
    loss = [2 * sigmoid(-SLOPE * x) for x in (0.1, 0.25, 0.3)]
    ratios = [(loss[0] - loss[1]) / 0.15, (loss[1] - loss[2]) / 0.05, 2 * (sigmoid(2.7) - sigmoid(2.25)) / 0.15]
    assert largest_ratios(setting, rows).exp().tolist() == pytest.approx([max(ratios[:2]), ratios[2]])


@pytest.mark.quick(2)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("loss", ["l1", "zero-one", "ramp"])
def test_proved_constants_hold_on_the_whole_ball(make, loss):
    setting = Setting(make(), loss_of(loss), data(300), data(60, seed=1), partition=Partition("voronoi", 12), cellwise=True)
    rows = setting.cells[0]
    proved = local_constants(setting, rows).exp()
    assert bool((proved <= global_constants(setting, rows).exp()).all())
    generator, twin = torch.Generator().manual_seed(0), setting.model.double()
    flat = 0
    for cell, members in rows.by_cell():
        ball = Ball(rows.cells.centers[cell], float(rows.cells.radii[cell]))
        x = ball.project(ball.middle[0] + torch.randn(200, 2, generator=generator).double())
        y = x.flip(0) * 0.999 + x * 0.001
        for label, bound in zip(rows.label[members].tolist(), proved[members].tolist(), strict=True):
            labels = torch.full((200,), label)
            with torch.no_grad():
                change = (setting.loss(twin(x), labels) - setting.loss(twin(y), labels)).abs()
            assert bool((change <= bound * (x - y).norm(dim=1) + 1e-9).logical_or(torch.tensor(math.isinf(bound))).all())
            flat += bound == 0
    assert flat or loss == "l1" or make is layer_norm, "in some cells a loss with a flat part is proved constant"


def test_every_sample_is_counted_once():
    setting = Setting(batch_norm(), loss_of("l1"), data(500), data(150, seed=1), cellwise=True)
    assert [rows.cells.count for rows in setting.cells] == [5, 50]
    for rows in setting.cells:
        assert int(rows.counts.sum()) == 500
        assert float(rows.weights @ rows.losses) == pytest.approx(setting.train.risk)
        assert rows.pairs == rows.cells.count * 2 + 1


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_order_and_status(make):
    """Local is no worse than global, a sharper g no worse than the stated one; what is measured is never called certified."""
    found = generalization(make(), "l1", data(120), held_out=data(60, seed=1), select=[*VERSIONS, "Than 2025, Corollary 22"])
    value = {bound.name.removeprefix("Than 2025, "): bound.value for bound in found}
    assert value["Theorem 20, local constants, sharper g"] <= value["Theorem 20, local constants"]
    assert value["Theorem 20, local constants"] <= value["Theorem 20, global constant"]
    for bound in found:
        measured = "gradient" in bound.name or "ratio" in bound.name
        assert bound.status == (
            ESTIMATE if measured else MEASURE if "Corollary 22" in bound.name and not bound.certified else CERTIFIED
        )
        assert ("on samples" in str(bound)) == measured


def test_corollary_22_is_certified_only_where_its_product_bounds_the_network():
    def forms(model: nn.Module) -> dict[str, str]:
        found = generalization(model, "l1", data(200), held_out=data(50, seed=1), select=["Than 2025, Corollary 22"])
        assert all(bound.quantity == GAP for bound in found)
        return {bound.name.removeprefix("Than 2025, Corollary 22 "): bound.status for bound in found}

    assert forms(plain()) == {"(14), without normalizers": CERTIFIED}
    with_unit_scale = batch_norm()
    with torch.no_grad():
        with_unit_scale[1].weight.fill_(1.0)
    assert forms(with_unit_scale)["(BN)"] == CERTIFIED  # the paper leaves γ out
    with torch.no_grad():
        with_unit_scale[1].weight.fill_(1e3)
    assert forms(with_unit_scale)["(BN)"] == MEASURE
    assert forms(layer_norm())["(LN)"] == MEASURE  # σ is the least on the sample, not on all inputs


@pytest.mark.parametrize(("depth", "digits"), [(60, 1), pytest.param(80, 5, marks=pytest.mark.full)])
def test_capacity_of_any_size_neither_overflows_nor_prints_as_infinite(depth, digits):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.tensor([[0.0, 10.0**digits], [0.0, 0.0]]))  # 0 when it is applied twice
            layer.bias.zero_()
    (found,) = generalization(model, "ramp", data(50), held_out=data(20, seed=1), select=["Than 2025, Corollary 22"])
    assert found.quantity == GAP
    assert depth * digits - 1 < found.value.log10 < depth * digits + 2
    assert f"e+{depth * digits // 10}" in str(found) and "inf" not in str(found)


def test_constants_beyond_floats_are_shown_by_their_logarithms():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(20)), nn.Linear(2, 2))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(1e20 * torch.eye(2))
    (found,) = generalization(model, "l1", data(50), held_out=data(20, seed=1), select=["Than 2025, global constant"])
    assert float(found.parts["log10 L_i"].min()) > 308 and "inf" not in str(found)


def test_monotone_in_size_confidence_and_cells():
    for g in (
        lambda seen, cells, size, delta: stated_uncertainty(seen, cells, size, 1.0, delta),
        lambda seen, cells, size, delta: sharper_uncertainty(torch.full((seen,), size / seen).double(), cells, 1.0, delta),
    ):
        assert g(10, 50, 1000, 0.05) < g(10, 50, 100, 0.05)
        assert g(10, 50, 1000, 0.05) < g(10, 50, 1000, 0.01)
        assert g(10, 50, 1000, 0.05) < g(10, 80, 1000, 0.05)
        assert g(10, 50, 1000, 0.05) <= g(20, 50, 1000, 0.05)


def test_more_of_the_same_data_and_less_confidence_give_less():
    x, y = data(100)

    def value(copies: int, delta: float) -> float:
        train = (x.repeat(copies, 1), y.repeat(copies))
        return float(
            generalization(
                batch_norm(), "l1", train, held_out=data(40, seed=1), delta=delta, select=["Than 2025, local constants"]
            )[0].value
        )

    assert value(1, 0.05) > value(4, 0.05) > value(16, 0.05)
    assert value(4, 0.01) > value(4, 0.05) > value(4, 0.5)


def test_delta_is_split_between_partitions():
    one = [Partition("voronoi", 4)]
    single, double = (
        generalization(
            batch_norm(), "l1", data(100), held_out=data(40, seed=1), partition=one * tried, select=["Than 2025, global constant"]
        )[0]
        for tried in (1, 2)
    )
    assert "one of 2 tried" in str(double)
    pairs, seen = single.parts["N"], single.parts["|T|"]
    assert single.parts["g(D, δ)"] == pytest.approx(stated_uncertainty(seen, pairs, 100, 2.0, 0.05))
    assert double.parts["g(D, δ)"] == pytest.approx(stated_uncertainty(double.parts["|T|"], pairs, 100, 2.0, 0.025))


def test_far_samples_are_in_the_remainder_and_cost_all_of_the_loss():
    x, y = data(100)
    x[:30] += 50
    (found,) = generalization(
        plain(),
        "ramp",
        (x, y),
        held_out=data(40, seed=1),
        partition=Partition("voronoi", 4, coverage=1.0),
        select=["Than 2025, global constant"],
    )
    assert found.parts["samples in the remainder"] >= 30


def test_hopeless_cells_are_given_up(monkeypatch):
    """Here in every cell the loss may do what it likes, so after some tries the others are left with the global constant."""
    setting = Setting(
        plain(), loss_of("zero-one"), data(300), data(200, seed=1), partition=Partition("voronoi", 90, radius=5.0), cellwise=True
    )
    tried = []
    monkeypatch.setattr(
        constants,
        "_on_ball",
        lambda setting, rows, cell, labels: tried.append(cell) or torch.full((len(labels),), math.inf).double(),
    )
    proved = local_constants(setting, setting.cells[0])
    assert len(tried) == TRIES and bool(proved.isinf().all())


def test_what_changes_with_a_rescaling_of_units_says_so():
    """W_1 → D W_1, b_1 → D b_1, W_2 → W_2 D^-1 leaves a ReLU network as it is: so it does with all that is measured on the function."""
    model = plain().double()
    twin = plain().double()
    scales = torch.tensor([0.01, 0.1, 1, 3, 10, 100], dtype=torch.float64)
    with torch.no_grad():
        twin[0].weight.mul_(scales[:, None])
        twin[0].bias.mul_(scales)
        twin[2].weight.div_(scales)
    first, second = (generalization(one, "l1", data(200), held_out=data(60, seed=1), select=VERSIONS) for one in (model, twin))
    for bound in first:
        other = second[bound.name]
        assert bound.value.log == pytest.approx(other.value.log, rel=1e-9) or any(
            "not invariant" in text for text in bound.assumptions
        )
    assert all("not invariant" not in str(bound) for bound in first if bound.status == ESTIMATE)


def test_two_inputs_and_a_shared_layer():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.shared(first)) + torch.relu(self.shared(second)))

    (x, y), (z, _) = data(120, classes=3), data(120, classes=3, seed=4)
    train, held_out = (x[:80], z[:80], y[:80]), (x[80:], z[80:], y[80:])
    found = generalization(Pair(), "l1", train, held_out=held_out, partition=Partition("voronoi", 5), select=VERSIONS)
    assert len(found) == 5 and found["Than 2025, Theorem 20, local constants"].parts["N"] == 16


def test_a_loss_without_a_slope_gives_estimates_only():
    def capped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none").clamp(max=4)

    own = generalization(plain(), capped, data(100), held_out=data(40, seed=1), loss_bound=4.0)
    assert {bound.status for bound in own if bound.name.startswith("Than")} == {ESTIMATE}
    assert "slope=" in own.not_given["Than 2025, local constants"]
    stated = generalization(plain(), Loss("capped", 4.0, capped, math.sqrt(2)), data(100), held_out=data(40, seed=1))
    assert stated["Than 2025, Theorem 20, local constants"].certified


def test_gradients_of_a_jump_are_refused():
    found = generalization(plain(), "zero-one", data(100), held_out=data(40, seed=1))
    assert "jumps" in found.not_given["Than 2025, largest gradient"]
    assert found["Than 2025, Corollary 21, local constants"].certified
