"""What the experiments measure is exact where theory says what it must be, and wrong data are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from normscope.core.errors import InputError
from normscope.lab.datasets import load_data
from normscope.lab.experiments import conditioning, invariant_valleys, norm_over_time, saddle_escape, toy_flow
from normscope.lab.experiments.smoothness import SlopeMeter
from normscope.lab.models import mlp
from normscope.lab.runner import run_experiment
from normscope.lab.training import Training, prepare
from normscope.lab.workspace import Workspace
from normscope.symmetry.detect import symmetries

START = toy_flow.Start("batch", radius=0.5, degrees=90.0, data="halfplanes", learning_rate=0.1, steps=40, epsilon=1e-12)
VALLEY = invariant_valleys.Valley("batch", "halfplanes", extent=3.0, points=5, degrees=(90.0,), learning_rate=0.1, steps=5)
WALK = norm_over_time.Walk("batch", 0.0, 0.0, "digits", duration=0.5, samples=50, width=4, depth=3)
ESCAPE = saddle_escape.Escape("batch", beside=False, batch_size=32, data="sigmoids", learning_rate=0.2, rest=30, steps=30)


def test_without_epsilon_the_flow_turns_on_a_circle(tmp_path: Path) -> None:
    numbers = toy_flow.measure(START, Workspace(tmp_path, 0))
    assert numbers["flow"]["norm_change"] < 1e-7
    assert numbers["descent"]["norm_change"] > 1e-4 and numbers["descent"]["end_norm"] > 1


def test_the_separator_separates() -> None:
    inputs, classes = load_data("halfplanes").train
    assert float(((inputs @ toy_flow.separator((inputs, classes)) > 0) == (classes == 1)).double().mean()) > 0.95


@pytest.mark.parametrize("normalizer", ["none", "batch"])
def test_rays_are_flat_with_batch_statistics_alone(normalizer: str, tmp_path: Path) -> None:
    numbers = invariant_valleys.measure(replace(VALLEY, normalizer=normalizer), Workspace(tmp_path, 0))
    assert (numbers["ray_spread"] < 1e-3) == (abs(numbers["curvature_along"]) < 1e-4) == (normalizer == "batch")


def test_decay_shrinks_squares_at_twice_its_rate(tmp_path: Path) -> None:
    numbers = norm_over_time.measure(replace(WALK, weight_decay=0.5), Workspace(tmp_path, 0))
    assert numbers["exponent"] == pytest.approx(2, abs=1e-3)


def test_the_spectrum_is_that_of_the_dense_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    model = nn.utils.skip_init(nn.Linear, 3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    found = conditioning.spectrum(
        conditioning.hessian(model, conditioning.regression, (design, design.sum(1)), batch_size=len(design))
    )
    exact = torch.linalg.eigvalsh(2 / 30 * design.T @ design)
    assert found["largest"] == pytest.approx(float(exact[-1]))
    assert found["condition 0.001"] == pytest.approx(float(exact[-1] / exact[0]))


@pytest.mark.parametrize("normalizer", ["none", "batch"])
def test_equal_neurons_stay_equal_whatever_the_batches(normalizer: str, tmp_path: Path) -> None:
    numbers = saddle_escape.measure(replace(ESCAPE, normalizer=normalizer), Workspace(tmp_path, 0))
    assert numbers["difference"] == 0
    beside = saddle_escape.measure(replace(ESCAPE, normalizer=normalizer, beside=True), Workspace(tmp_path, 0))
    assert 0 < beside["difference"] < 1e-3


def test_gradient_norms_are_those_of_the_steps() -> None:
    model = mlp(6, 3, 64, normalizer="batch")
    inputs, classes = load_data("digits").train[0][:32], load_data("digits").train[1][:32]
    meter = SlopeMeter(model, (inputs, classes), 0.1)
    exact = []
    for _ in range(3):
        model.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        exact.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
    assert meter(model)["gradient_norms"] == pytest.approx(exact)
    assert meter(model)["gradient_norms"] == []


@pytest.mark.parametrize("normalizer", ["none", "batch", "weight"])
def test_initial_weights_are_scaled_under_every_parametrization(normalizer: str, tmp_path: Path) -> None:
    small = Training("mlp", normalizer, {"width": 4, "depth": 2})
    models = [prepare(replace(small, initial_scale=scale), Workspace(tmp_path, 0))[0] for scale in (1.0, 100.0)]
    first, scaled = ([layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)] for model in models)
    for before, after in zip(first, scaled, strict=True):
        torch.testing.assert_close(after, 100 * before)


@pytest.mark.parametrize("normalizer", ["none", "batch"])
def test_planar_classifiers_have_the_symmetry_of_their_normalizer(normalizer: str) -> None:
    inputs = load_data("halfplanes").train[0]
    groups = symmetries(toy_flow.classifier(normalizer, torch.ones(2)).train(), inputs).groups
    assert bool(groups) == (normalizer == "batch")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("toy-flow", "digits", "digits is not two classes in the plane: choose other data, such as halfplanes or rings"),
        ("invariant-valleys", "waves", "waves is not two classes in the plane"),
        ("margins", "waves", "real targets and no classes"),
    ],
)
def test_data_that_do_not_fit_are_one_line(name: str, data: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        run_experiment(name, settings={"data": data}, out=tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_plain_networks_must_be_given_more_time(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="patience must be at least 2"):
        run_experiment("max-learning-rate", settings={"patience": "1"}, out=tmp_path)


TINY = {"networks": '{"mlp":{"width":8,"depth":3}}', "images": "200", "epochs": "1", "seeds": "[0]"}


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("conditioning", {"learning_rates": "[1e200]", "steps": "12", "seeds": "[0]", "width": "3"}),
        ("smoothness", {**TINY, "learning_rates": "[1e30]"}),
        ("max-learning-rate", {**TINY, "learning_rates": "[1e30]"}),
        ("toy-flow", {"data": "rings", "radii": "[1.0]", "degrees": "[90.0]", "steps": "5"}),
        ("saddle-escape", {"data": "digits", "rest": "3", "steps": "3", "seeds": "[0]"}),
        ("bad-init", {**TINY, "normalizers": '["weight","layer"]', "scales": "[1e30]"}),
    ],
)
def test_wild_settings_have_a_result(name: str, settings: dict[str, str], tmp_path: Path) -> None:
    outcome = run_experiment(name, settings=settings, out=tmp_path)
    assert not outcome.failures and outcome.comparisons and outcome.content["figures"]
