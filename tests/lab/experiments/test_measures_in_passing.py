"""What the experiments measure is what they say: exact on cases that are known, and nothing is changed by looking."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from normscope._watch.layers import NORMALIZING
from normscope.bounds.bound import Bound, Part
from normscope.core.magnitude import Magnitude
from normscope.lab.experiment import Results, TrialResult, less
from normscope.lab.experiments.adversarial import attack
from normscope.lab.experiments.batch_leakage import GROUPS, blank_accuracy, blanked, one_group
from normscope.lab.experiments.bound_prediction import rise, tau
from normscope.lab.experiments.capacity_count import keep_normalizers
from normscope.lab.experiments.dead_relus import dead_share
from normscope.lab.experiments.deep_linear import flat_directions
from normscope.lab.experiments.dropout_batchnorm import variance_ratios
from normscope.lab.experiments.floors import of_layer_norm
from normscope.lab.experiments.gradient_explosion import growth
from normscope.lab.experiments.radial_momentum import Growth, radial_share
from normscope.lab.experiments.scale_cues import RANGE, lit
from normscope.lab.experiments.whitening import feature_conditions
from normscope.lab.models import mlp, vit


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("depth", "width"), [(2, 4), (3, 4), (3, 2)])
def test_a_linear_network_has_as_many_free_directions_as_its_symmetry(depth: int, width: int) -> None:
    """Affine maps of rank at most r from n to k have r(n + k − r) + k dimensions; every other direction is flat."""
    inputs, classes = 6, 3
    found = flat_directions(mlp(width, depth, inputs, classes, activation="linear"), random(30, inputs))
    rank = min(width, inputs, classes)
    assert found["rank"] == rank * (inputs + classes - rank) + classes
    assert found["flat"] == found["parameters"] - found["rank"]


def test_batch_normalization_makes_no_linear_network_less_flat() -> None:
    plain, normalized = (
        flat_directions(mlp(5, 3, 6, 3, normalizer=name, activation="linear"), random(30, 6)) for name in ("none", "batch")
    )
    assert plain["rank"] == normalized["rank"] and normalized["flat"] > plain["flat"]


def test_dead_units_are_counted_over_all_inputs() -> None:
    model = mlp(4, 2, 3)
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([1.0, -1.0, 0.0, 2.0]))
    model.train()
    assert dead_share(model, random(10, 3)) == 0.5 and model.training
    assert not model[2]._forward_hooks


def test_growth_is_the_factor_of_a_geometric_sequence() -> None:
    assert growth(list(np.log10(1.3) * -np.arange(30))) == pytest.approx(1.3)


def test_radial_share() -> None:
    w = random(5, 7)
    assert radial_share([w], [3 * w]) == pytest.approx(1)
    tangent = w.flip(1) - (w.flip(1) * w).sum(1, keepdim=True) / w.square().sum(1, keepdim=True) * w
    assert radial_share([w], [tangent]) < 1e-6
    assert radial_share([w], [torch.zeros(5, 7)]) == 0


def test_steady_momentum_grows_norms_by_its_factor() -> None:
    growth = Growth(momentum=0.9, rate=0.1)
    for _ in range(5000):
        growth.add(2.0)
    assert growth.steps == pytest.approx(5000 * 0.01 * 2)
    assert growth.predicted / growth.steps == pytest.approx(19, rel=0.01)


def test_brightness_runs_over_its_range_by_class() -> None:
    images, classes = torch.ones(10, 1, 2, 2), torch.arange(10)
    factors = lit((images, classes), 10)[0][:, 0, 0, 0]
    assert float(factors[-1]) == 1 and float(factors[-1] / factors[0]) == pytest.approx(RANGE)
    assert torch.allclose(factors[1:] / factors[:-1], (factors[1] / factors[0]).expand(9))


def test_batches_of_one_group_hold_every_sample_once() -> None:
    classes = torch.arange(10).repeat(7)
    _, labels = blanked((random(70, 4), classes), 10, torch.Generator().manual_seed(0))
    assert labels.bincount().tolist() == [7] * 10 + [35] * GROUPS
    batches = list(one_group(labels, 8, torch.Generator().manual_seed(1)))
    assert sorted(torch.cat(batches).tolist()) == list(range(140))
    for batch in batches:
        clear, blank = labels[batch[batch < 70]], labels[batch[batch >= 70]]
        assert len(clear) == len(blank) and len(blank.unique()) == 1
        assert ((clear >= 5).long() + 10 == blank[0]).all()


def test_blank_samples_of_a_constant_network_are_right_half_of_the_time() -> None:
    model = mlp(4, 3, 4, classes=12, normalizer="batch")
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.copy_(torch.arange(12.0))
    before = copy.deepcopy(model.state_dict())
    data = blanked((random(40, 4), torch.arange(10).repeat(4)), 10, torch.Generator().manual_seed(0))
    assert blank_accuracy(model, data, 8) == 0.5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_attacks_stay_in_the_ball_and_raise_the_loss() -> None:
    model = mlp(16, 3, 8, classes=4).eval()
    inputs, classes = random(20, 8), torch.arange(20) % 4
    moved = attack(model, (inputs, classes), 0.3)
    assert float((moved - inputs).norm(dim=1).max()) <= 0.3 * (1 + 1e-6)
    losses = [nn.functional.cross_entropy(model(x), classes, reduction="none") for x in (inputs, moved)]
    assert (losses[1] >= losses[0] - 1e-6).all() and float((losses[1] - losses[0]).detach().mean()) > 0.01


def test_an_attack_on_a_linear_network_of_two_classes_is_the_worst_one() -> None:
    model = mlp(1, 1, 5, classes=2).eval()
    inputs, classes = random(6, 5), torch.tensor([0, 1] * 3)
    difference = (model[1].weight[1] - model[1].weight[0]).detach()
    worst = inputs + 0.5 * torch.where(classes == 0, 1.0, -1.0)[:, None] * difference / difference.norm()
    assert torch.allclose(attack(model, (inputs, classes), 0.5), worst, atol=1e-4)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 2), (1.0, 5)])
def test_normalizers_are_left_out_in_attention_networks(share: float, count: int) -> None:
    model = vit(size=8, width=8, depth=2, heads=2)
    assert keep_normalizers(model, share) == count
    assert sum(isinstance(module, NORMALIZING) for module in model.modules()) == count
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_variance_ratios_compare_layer_by_layer() -> None:
    model = mlp(4, 4, 3, normalizer="batch")
    other = copy.deepcopy(model)
    for layer in other.modules():
        if isinstance(layer, nn.BatchNorm1d) and layer.running_var is not None:
            layer.running_var.mul_(0.5)
    assert variance_ratios(model, other) == pytest.approx([2.0, 2.0, 2.0])


def test_conditions_of_features_are_those_of_their_covariance() -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    scales = torch.tensor([1.0, 2.0, 10.0])
    inputs = torch.linalg.qr(random(50, 4) - random(50, 4).mean(0))[0][:, :3] * scales
    inputs = inputs - inputs.mean(0)
    values = torch.linalg.eigvalsh(inputs.double().T.cov())
    assert feature_conditions(model, inputs) == pytest.approx([math.log10(values[-1] / values[0])])
    assert feature_conditions(model, torch.cat([inputs, inputs], 1))[0] > 12


def test_the_rise_is_not_cut() -> None:
    parts: dict[str, Part] = {"m_i": torch.tensor([3, 1]), "λ_i": torch.tensor([2.0, 1.0]), "m": 4}
    parts["L_i"] = torch.tensor([1e200, 5.0], dtype=torch.float64)
    bound = Bound("b", Magnitude(2.0), "risk", "l1", 2.0, parts=parts)
    assert rise(bound) == pytest.approx(math.log10(1.5e200))


def test_rank_correlation_of_predictions_that_order_nothing_is_zero() -> None:
    assert tau([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0 and math.isnan(tau([1.0], [1.0]))
    assert tau([1.0, 2.0, 3.0], [0.1, 0.2, 0.9]) == pytest.approx(1)


def test_the_least_of_a_parameter_ignores_what_is_no_number() -> None:
    rates = {0.1: "nan", 0.2: 0.5, 0.3: 0.4}
    results = Results([TrialResult("", 0, {"rate": rate}, {"loss": loss}) for rate, loss in rates.items()])
    assert results.least("rate", "loss").values_of("rate") == [0.3]
    assert less(1.0, 2.0) is True and less(2.0, 1.0) is False and less(math.nan, 1.0) is None


def test_the_floor_of_layer_norm_is_reached_and_not_crossed():
    """One layer with W = I − 11ᵀ/n reaches it at a centred x; deeper chains with random weights stay above."""
    generator = torch.Generator().manual_seed(0)

    def chain(*weights):
        layers = []
        for weight in weights:
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight = torch.nn.Parameter(weight)
            layers += [linear, torch.nn.LayerNorm(len(weight)), torch.nn.ReLU()]
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)

    centring, x = torch.eye(4) - 0.25, torch.randn(5, 4, generator=generator)
    assert abs(of_layer_norm(chain(centring), x @ centring)["least_log10"]) < 1e-6
    weights = [torch.randn(6, 4, generator=generator), torch.randn(3, 6, generator=generator)]
    assert of_layer_norm(chain(*weights), x)["least_log10"] > 0
