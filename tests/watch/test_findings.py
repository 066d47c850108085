"""Early warnings come when they should, once, with the layer and the numbers; a healthy training gives none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope.findings.finding import Finding
from normscope.findings.over_time import FEWEST, Chronicle, line
from normscope.findings.rows import ROW_RULES, RUNNING_IN, STEP_RULES
from tests.watch.loops import Loop, mlp, sgd

LAYERS: list[dict[str, Any]] = [
    {"name": "weight", "in_product": True}, {"name": "norm", "epsilon": 1e-5}, {"name": "relu"}, {"name": "head", "in_product": True},
]  # fmt: skip


def healthy(step: int, **changed: Any) -> dict[str, Any]:
    none = np.full(4, np.nan)
    row = {
        "step": step, "loss": 1.0, "loss_given": True, "learning_rate": 0.1, "log10_weight_product": 2.0 + 0.001 * step, "log10_gain_tight": 0.5,
        "input_variance": np.array([np.nan, 1.0, 1.0, np.nan]), "effective_lr": np.array([0.1, np.nan, np.nan, np.nan]),
        "gradient_norm": np.array([0.1, 0.2, np.nan, 0.3]), "total_gradient_norm": 0.37, "gradient_seen": np.array([True, True, False, True]),
        "dead_fraction": np.array([np.nan, np.nan, 0.1, np.nan]), "running_divergence": at(1, 0.1), "running_shift": at(1, 0.1), "frobenius_norm": none,
    }  # fmt: skip
    row |= changed
    return row | {"total_gradient_norm": float(np.sqrt(np.square(row["gradient_norm"])[row["gradient_seen"]].sum()))}


def at(index: int, value: float, base: Any = None) -> np.ndarray:
    values = np.full(4, np.nan) if base is None else np.array(base, float)
    values[index] = value
    return values


def warned(rows: list[dict[str, Any]]) -> list[Finding]:
    chronicle = Chronicle(LAYERS, (*STEP_RULES, *ROW_RULES))
    for row in rows:
        chronicle.look(row)
    return chronicle.findings


def test_a_healthy_training_has_no_findings() -> None:
    assert warned([healthy(step) for step in range(300)]) == []


def test_a_gradient_that_was_zero_does_not_explode() -> None:
    still = {"gradient_norm": np.zeros(4)}
    assert warned([*(healthy(step, **still) for step in range(30)), healthy(30)]) == []


def test_gradients_that_have_all_become_zero_are_a_finding() -> None:
    still = {"gradient_norm": np.where(np.isnan(healthy(0)["gradient_norm"]), np.nan, 0.0)}
    found = warned([*(healthy(step) for step in range(9)), *(healthy(step, **still) for step in range(9, 60))])
    assert {finding.where for finding in found} == {"weight", "norm", "head"}
    for finding in found:
        assert finding.name == "vanishing-gradient" and "stands still" in finding.message and finding.first_step == 9 + FEWEST - 1


SYMPTOMS: dict[str, tuple[str, dict[str, Any]]] = {
    "loss-not-finite": ("", {"loss": math.nan}),
    "variance-collapse": ("norm", {"input_variance": at(1, 5e-5)}),
    "effective-learning-rate-drift": ("weight", {"effective_lr": at(0, 0.009)}),
    "exploding-gradient": ("head", {"gradient_norm": at(3, 1e3, [0.1, 0.2, np.nan, 0])}),
    "vanishing-gradient": ("weight", {"gradient_norm": at(0, 1e-9, [0, 0.2, np.nan, 0.3])}),
    "dead-units": ("relu", {"dead_fraction": at(2, 0.9)}),
    "running-statistics": ("norm", {"running_divergence": at(1, 2.0)}),
}


@pytest.mark.parametrize("rule", SYMPTOMS)
def test_a_symptom_is_reported_once_with_its_layer(rule: str) -> None:
    layer, changed = SYMPTOMS[rule]
    rows = [healthy(step) for step in range(RUNNING_IN + 1)]
    rows += [healthy(step, **changed) for step in range(RUNNING_IN + 1, RUNNING_IN + 11)]
    (found,) = warned(rows)
    assert (found.name, found.where) == (rule, layer) and found.evidence and found.message and found.fix
    assert (found.first_step, found.last_step, found.state) == (RUNNING_IN + 1, RUNNING_IN + 10, "now")
    (over,) = warned([*rows, *(healthy(step) for step in range(RUNNING_IN + 11, RUNNING_IN + 21))])
    assert (over.first_step, over.last_step, over.state) == (RUNNING_IN + 1, RUNNING_IN + 10, "was")
    (again,) = warned(
        [*rows, *(healthy(step) for step in range(RUNNING_IN + 11, RUNNING_IN + 21)), healthy(RUNNING_IN + 21, **changed)]
    )
    assert (again.first_step, again.last_step, again.state) == (RUNNING_IN + 1, RUNNING_IN + 21, "now")
    assert again.message == over.message and again.when == f"since step {RUNNING_IN + 1}, 2 times"
    assert over.when == f"from step {RUNNING_IN + 1} until step {RUNNING_IN + 10}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(value: float) -> None:
    (found,) = warned([healthy(0), healthy(1, gradient_norm=at(3, value, [0.1, 0.2, np.nan, 0]))])
    assert found.name == "exploding-gradient" and found.where == "head"


def test_a_gradient_that_is_not_there_is_no_finding() -> None:
    assert warned([healthy(step, gradient_norm=at(3, 0.1), gradient_seen=np.arange(4) == 3) for step in range(9)]) == []


def test_running_statistics_have_time_to_run_in() -> None:
    far = {"running_divergence": at(1, 5.0)}
    assert warned([healthy(step, **(far if step < RUNNING_IN else {})) for step in range(200)]) == []


def test_a_row_without_a_column_ends_no_finding_of_it() -> None:
    dead = healthy(1, dead_fraction=at(2, 0.9))
    (found,) = warned([healthy(0), dead, healthy(2, dead_fraction=np.full(4, np.nan))])
    assert (found.name, found.last_step, found.state) == ("dead-units", 1, "now")


def test_the_schedule_is_not_a_drift() -> None:
    rows = [healthy(s, learning_rate=0.1 * 0.5**s, effective_lr=at(0, 0.1 * 0.5**s)) for s in range(50)]
    assert warned(rows) == []


@pytest.mark.parametrize("every", [1, 2, 10, 20])
@pytest.mark.parametrize(
    ("growth", "noise", "warns"), [(0.02, 0.0, True), (0.02, 0.05, True), (0.0, 0.5, False), (0.004, 0.0, False)]
)
def test_a_product_that_grows_exponentially_at_any_cadence(growth: float, noise: float, warns: bool, every: int) -> None:
    random = np.random.default_rng(0)
    rows = [healthy(s, log10_weight_product=growth * s + noise * random.standard_normal()) for s in range(0, 200, every)]
    assert [finding.name for finding in warned(rows)] == ["growing-product"] * warns


@pytest.mark.parametrize("slope, noise", [(0.01, 0.0), (0.01, 0.02), (0.05, 0.02)])
def test_a_loss_that_rises_steadily_is_named_when_its_median_is_a_tenth_above(slope: float, noise: float) -> None:
    """The rise itself is not taken for noise, which would hide it for longer. Ten losses are the first ones, 50 steps a window."""
    losses = 1 + slope * np.maximum(np.arange(150) - 20, 0) + noise * np.random.default_rng(0).standard_normal(150)
    medians = [float(np.median(losses[max(0, step - 49) : step + 1])) for step in range(150)]
    above = next(step for step in range(58, 150) if medians[step] > 1.1 * np.median(losses[:10]))
    (found,) = [one for one in warned([healthy(s, loss=float(losses[s])) for s in range(150)]) if one.name == "loss-diverged"]
    assert found.first_step is not None and above <= found.first_step <= above + 2


def test_noise_about_the_first_loss_is_no_divergence() -> None:
    for seed in range(20):
        losses = 1 + 0.4 * np.random.default_rng(seed).standard_normal(300)
        assert "loss-diverged" not in [one.name for one in warned([healthy(s, loss=float(losses[s])) for s in range(300)])]


def test_line() -> None:
    assert line([(0, 1.0), (2, 5.0), (4, 9.0)]) == (2.0, 1.0)
    assert all(math.isnan(value) for value in (*line([]), *line([(1, 2.0)]), *line([(3, 1.0), (3, 2.0)])))
    assert line([(0, 1.0), (1, 1.0)]) == (0.0, 1.0)


# from real trainings -------------------------------------------------------------------------------------------------


def rules(path: Path) -> dict[str, Finding]:
    """The first finding of each rule."""
    return {finding.name: finding for finding in reversed(ns.load_run(path).findings)}


def deep(scale: float, depth: int = 30) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(48, 16), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(16, 5))
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Linear):
                module.weight.mul_(scale)
    return model


def test_vanishing_gradients_of_a_deep_plain_network(tmp_path: Path) -> None:
    for _ in Loop(lambda: deep(0.5)).watched(tmp_path, 3):
        pass
    assert rules(tmp_path)["vanishing-gradient"].first_step == 2


def test_gradients_that_the_initialization_alone_holds_back_are_no_finding() -> None:
    held = healthy(1, gradient_norm=at(0, 1e-9, [0, 0.2, np.nan, 0.3]))
    assert warned([held, *(healthy(step) for step in range(2, 20))]) == []


def test_exploding_training(tmp_path: Path) -> None:
    loop = Loop(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)), lambda p: torch.optim.SGD(p, lr=1e6)
    )
    for _ in loop.watched(tmp_path, 30):
        pass
    found = rules(tmp_path)
    assert {"loss-not-finite", "exploding-gradient"} & set(found) and found
    assert len(ns.load_run(tmp_path).table()) == 30  # recorded, not fatal


def test_collapsed_input_and_dead_units(tmp_path: Path) -> None:
    loop = Loop(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)))
    with torch.no_grad():
        loop.model[1].weight.mul_(1e-4)
        loop.model[2].bias.fill_(-100)
    for _ in loop.watched(tmp_path, 1):
        pass
    found = rules(tmp_path)
    assert found["variance-collapse"].where == "2" and found["dead-units"].where == "3"


def test_running_statistics_that_do_not_follow(tmp_path: Path) -> None:
    loop = Loop(mlp, sgd)
    loop.model[5].momentum = 1e-6
    with torch.no_grad():
        loop.model[4].weight.mul_(20)
    for _ in loop.watched(tmp_path, RUNNING_IN + 5):
        pass
    assert rules(tmp_path)["running-statistics"].where == "5"


def test_findings_reach_the_watch_itself(tmp_path: Path) -> None:
    loop = Loop(lambda: deep(0.5))
    with loop.watch(tmp_path) as watch:
        loop.step()
        loop.step()
    assert ("vanishing-gradient", 2) in [(finding.name, finding.first_step) for finding in watch.findings]


@pytest.mark.parametrize(("gradient", "warns"), [(0.2, True), (20.0, False)])
def test_a_large_step_is_the_learning_rate_s_fault_unless_the_gradient_is_out_of_line(gradient: float, warns: bool) -> None:
    usual = {"update_ratio": at(0, 0.001)}
    large = {"update_ratio": at(0, 0.2), "gradient_norm": at(1, gradient, [0.1, 0.2, np.nan, 0.3])}
    found = warned([*(healthy(step, **usual) for step in range(100)), healthy(100, **large)])
    assert [finding.where for finding in found if finding.name == "large-step"] == ["weight"] * warns


def test_weights_that_begin_at_zero_have_time_to_grow() -> None:
    rows = [healthy(step, update_ratio=at(0, 1 / (step + 1))) for step in range(100)]
    assert not [finding for finding in warned(rows) if finding.name == "large-step"]


def test_batch_normalizers_that_see_few_samples_are_named() -> None:
    found = warned([healthy(0, batch_size=at(1, 7.0))])
    assert [(finding.name, finding.where) for finding in found] == [("small-batch", "norm")]
    assert not warned([healthy(0, batch_size=at(1, 8.0))])


def test_a_product_that_grows_for_a_while_and_settles_is_no_exponential() -> None:
    """As in the first steps of a training, which are sampled densely."""
    steps = [*range(1, 50), 56, 62, 68, 75, 83, 92, 101, 112, 124, 137, 151, 167, 184, 200]
    rows = [healthy(step, log10_weight_product=2 + 0.95 / (1 + math.exp(-(step - 23) / 9))) for step in steps]
    assert warned(rows) == []


@pytest.mark.parametrize(("grown", "named"), [(1.0, ["norm"]), (15.0, [])])
def test_an_input_is_not_out_of_line_where_the_scale_free_weight_before_it_grew(grown: float, named: list[str]) -> None:
    layers = [{**LAYERS[0], "scale_free": True, "normalizer": "norm"}, *LAYERS[1:]]
    chronicle = Chronicle(layers, ("NS517",))
    for step in range(40):
        late = step >= 30
        row = {"largest_input": at(1, 15.0 if late else 1.0), "frobenius_norm": at(0, 2.0 * (grown if late else 1.0))}
        chronicle.look(healthy(step, **row))
    assert [finding.where for finding in chronicle.findings] == named


@pytest.mark.parametrize(("last", "jumps"), [(0.376, False), (0.7, True)])
def test_a_hard_batch_is_no_spike(last: float, jumps: bool) -> None:
    """Small losses with a long tail, as of a classifier that is almost done."""
    late = [
        0.043, 0.067, 0.156, 0.04, 0.041, 0.021, 0.149, 0.246, 0.041, 0.272, 0.049, 0.041, 0.043, 0.057, 0.032, 0.039, 0.056, 0.037,
        0.064, 0.065, 0.059, 0.111, 0.033, 0.035, 0.052, 0.093, 0.066, 0.042, 0.053, 0.175, 0.095, 0.05, 0.028, 0.031, 0.069, 0.305,
        0.141, 0.033, 0.039, 0.053, 0.227, 0.057, 0.019, 0.272, 0.017, 0.045, 0.026, 0.023, 0.047, 0.05,
    ]  # fmt: skip
    losses = [*[1.0] * 10, *np.linspace(1.0, 0.1, 50), *late, last]
    assert [finding.name for finding in warned([healthy(step, loss=loss) for step, loss in enumerate(losses)])] == [
        "loss-spike"
    ] * jumps
