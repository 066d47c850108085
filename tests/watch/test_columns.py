"""Every column against an independent recomputation in float64, from checkpoints taken around the step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from normscope._watch.columns import PRODUCTS
from normscope._watch.weights import dots, norms
from tests.watch.loops import Loop, Transformer, adamw, convolutional, mlp, sgd
from tests.watch.reference import Double, Reference

CLOSE = {"rtol": 2e-4, "atol": 1e-6}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"make": mlp},
    "mlp adamw": {"make": mlp, "optimizer_of": adamw},
    "mlp accumulated": {"make": mlp, "accumulate": 3},
    "mlp clipped": {"make": mlp, "clip": 1e-3},
    "mlp scaled": {"make": mlp, "scaler": True},
    "mlp scaled, clipped, accumulated": {"make": mlp, "scaler": True, "clip": 1e-3, "accumulate": 2},
    "mlp float64": {"make": lambda: Double(mlp())},
    "convolutional": {"make": convolutional},
    "convolutional channels last": {"make": lambda: convolutional().to(memory_format=torch.channels_last)},
    "transformer": {"make": Transformer},
    "transformer checkpointed": {"make": lambda: Transformer(checkpointed=True)},
}
STEP = 6


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_every_column_agrees_with_float64(options: dict[str, Any], tmp_path: Path) -> None:
    loop = Loop(**options)
    with loop.watch(tmp_path / "run") as watch:
        for _ in range(STEP - 1):
            watch.step(loss=loop.step())
        reference = Reference(loop)
        loss = loop.step()
        watch.step(loss=loss, accuracy=0.25)
    reference.run()
    run = ns.load_run(tmp_path / "run")
    assert not run.events("error")
    rate = 1e-2 if loop.optimizer_of is adamw else 0.1 / (1 - 0.9)
    expected = reference.row(run.layers, rate)
    for name, values in expected.items():
        wide = (
            {"rtol": 2e-2, "atol": 1e-6}
            if name == "spectral_norm"
            else {"rtol": 1e-3, "atol": 2e-4}
            if name in ("radial_gradient", "angle")
            else CLOSE
        )
        chosen = [i for i, layer in enumerate(run.layers) if layer["role"] not in ("block", "attention")]
        np.testing.assert_allclose(run.matrix(name)[-1][chosen], values[chosen], **wide, err_msg=name)
    row = run.table().slice(STEP - 1, 1).to_pylist()[0]
    assert row["step"] == STEP and row["loss"] == pytest.approx(loss.item()) and row["accuracy"] == 0.25
    rates = expected["effective_lr"][np.isfinite(expected["effective_lr"])]
    spread = rates.max() / rates.min() if len(rates) > 1 else math.nan
    assert row["effective_lr_spread"] == pytest.approx(spread, rel=1e-4, nan_ok=True)
    for product, metric in PRODUCTS.items():
        chosen = [i for i, layer in enumerate(run.layers) if layer["in_product"] or metric != "spectral_norm"]
        assert row[product] == pytest.approx(np.nansum(np.log10(run.matrix(metric)[-1][chosen])), abs=1e-4)


def test_spectral_norms_follow_moving_weights(tmp_path: Path) -> None:
    """Within 1 % of exact after 20 samples at learning rate 0.1."""
    loop = Loop(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(48, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 200),
            nn.LayerNorm(200),
            nn.ReLU(),
            nn.Linear(200, 5),
        ),
        sgd,
    )
    exact: list[list[float]] = []
    for _ in loop.watched(tmp_path / "run", 40):
        exact.append(
            [float(torch.linalg.matrix_norm(m.weight.detach().double(), 2)) for m in loop.model if isinstance(m, nn.Linear)]
        )
    run = ns.load_run(tmp_path / "run")
    rows = [i for i, layer in enumerate(run.layers) if layer["role"] == "weight"]
    found = run.matrix("spectral_norm")[:, rows]
    assert (found <= np.array(exact) * (1 + 1e-5)).all(), "power iteration is a lower bound"
    np.testing.assert_allclose(found[20:], np.array(exact)[20:], rtol=0.01)


def test_weights_are_paired_with_the_normalizers_of_their_chain_or_of_a_report(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    for name, report, head in (("alone", None, None), ("told", ns.symmetries(loop.model, loop.batch()[0]), False)):
        for _ in loop.watched(tmp_path / name, 1, symmetries=report):
            pass
        run = ns.load_run(tmp_path / name)
        layers = {layer["name"]: layer for layer in run.layers}
        assert [layers[name]["normalizer"] for name in ("0", "4", "7", "13")] == ["1", "5", "8", None]
        assert [layers[name]["scale_free"] for name in ("0", "4", "7", "13")] == [True, True, True, head]
        assert [event["message"].split(".")[0] for event in run.events("note")] == (
            ["weights for which it was not judged whether the loss ignores their scale: 13"] if head is None else []
        )


class Branching(nn.Module):
    """A sum stands between the second weight and its normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.after = nn.Linear(48, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.flatten(1)))
        return self.head(self.after(x + self.second(x)))


def test_scale_free_is_only_what_reaches_its_normalizer_alone(tmp_path: Path) -> None:
    loop = Loop(Branching)
    for _ in loop.watched(tmp_path / "run", 2, symmetries=ns.symmetries(loop.model, loop.batch()[0])):
        pass
    run = ns.load_run(tmp_path / "run")
    assert {layer["name"]: layer["scale_free"] for layer in run.layers if layer["role"] == "weight"} == {
        "first": True, "second": False, "head": False,
    }  # fmt: skip
    assert not run.events("note") and np.isfinite(run.matrix("effective_lr")).sum() == 2


class Handwritten(nn.Module):
    """RMSNorm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def test_a_handwritten_normalizer_is_recorded_with_a_report_of_symmetries_and_named_without(tmp_path: Path) -> None:
    loop = Loop(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), Handwritten(), nn.GELU(), nn.Linear(8, 5)))
    for _ in loop.watched(tmp_path / "without", 3):
        pass
    run = ns.load_run(tmp_path / "without")
    assert run.layers[0]["scale_free"] is None and "2" not in run.layer_names
    divides, unjudged = (event["message"] for event in run.events("note"))
    assert "divide by a root" in divides and "1.weight" in unjudged and "symmetries=ns.symmetries" in unjudged
    report = ns.symmetries(loop.model, loop.batch()[0])
    entered: list[Tensor] = []
    loop.model[2].register_forward_pre_hook(lambda module, args: entered.append(args[0].detach().double()))
    for _ in loop.watched(tmp_path / "run", 3, symmetries=report):
        gamma = loop.model[2].weight.detach().double().clone()
    run = ns.load_run(tmp_path / "run")
    index = run.layer_names.index("2")
    square = entered[-1].square().mean(-1)
    assert run.layers[index]["role"] == "normalizer" and run.layers[index]["epsilon"] == pytest.approx(1e-3)
    assert run.matrix("input_variance")[-1, index] == pytest.approx(float(square.mean()), rel=1e-5)
    expected = float(gamma.abs().max() / (square.min() + 1e-3).sqrt())
    assert run.layers[0]["scale_free"] is True and run.layers[0]["normalizer"] == "2" and not run.events("note")
    assert run.matrix("gain_tight")[-1, index] == pytest.approx(expected, rel=1e-5)


class Squared(nn.Module):
    """An activation of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


def test_an_activation_in_a_module_of_its_own_is_recorded_and_a_function_is_named(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(48, 8), Squared(), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.act(self.first(x.flatten(1)))))

    for _ in Loop(Net).watched(tmp_path / "run", 2):
        pass
    run = ns.load_run(tmp_path / "run")
    assert [layer["role"] for layer in run.layers] == ["weight", "activation", "weight"]
    assert np.isfinite(run.matrix("input_variance")[-1, 1])
    note = run.events("note")[0]["message"]
    assert "called as functions" in note and "tanh" in note and "relu" not in note


def test_a_module_used_twice_has_two_rows_and_one_weight(tmp_path: Path) -> None:
    shared = nn.ReLU()
    loop = Loop(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 5)))
    for _ in loop.watched(tmp_path / "run", 2):
        pass
    run = ns.load_run(tmp_path / "run")
    assert run.layer_names == ["1", "2", "3", "2#2", "5"]
    variance = run.matrix("input_variance")[-1]
    assert np.isfinite(variance[[1, 3]]).all() and variance[1] != variance[3]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_norms_at_extreme_scales(scale: float, tmp_path: Path) -> None:
    loop = Loop(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8, bias=False), nn.Linear(8, 5)), lambda p: torch.optim.SGD(p, lr=0.0)
    )
    with torch.no_grad():
        loop.model[1].weight.mul_(scale)
    for _ in loop.watched(tmp_path / "run", 1):
        weight = loop.model[1].weight.detach().double().clone()
    run = ns.load_run(tmp_path / "run")
    assert run.matrix("frobenius_norm")[0, 0] == pytest.approx(float(weight.norm()), rel=1e-5)
    assert run.matrix("spectral_norm")[0, 0] == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_dot_products_of_many_entries(dtype: torch.dtype) -> None:
    """A sum of so many squares in float32 loses digits."""
    numbers = torch.Generator().manual_seed(0)
    large = torch.randn(4001, 1000, generator=numbers).to(dtype)
    for tensor in (large, large.mT, large[:, ::2], large[:300]):
        small, exact = torch.ones(3), tensor.double()
        np.testing.assert_allclose(norms([small, tensor]).numpy(), [3**0.5, float(exact.norm())], rtol=1e-6)
        other = tensor.abs() + 1
        assert float(dots([tensor.abs()], [other])[0]) == pytest.approx(float((exact.abs() * other.double()).sum()), rel=1e-5)
    assert float(norms([large.float() * 1e-30])[0]) == pytest.approx(1e-30 * float(large.double().norm()), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_step_much_longer_than_its_weight(scale: float, tmp_path: Path) -> None:
    loop = Loop(optimizer_of=lambda parameters: torch.optim.Adam(parameters, lr=1.0))
    weight = loop.model[1].weight
    with torch.no_grad():
        weight.mul_(scale)
    before = weight.detach().double().clone()
    for _ in loop.watched(tmp_path, 1):
        pass
    update = weight.detach().double() - before
    found = ns.load_run(tmp_path).matrix("update_dot_weight")[0, 0]
    assert found == pytest.approx(float((update * before).sum()), rel=1e-4)


def test_frozen_batch_norm_uses_its_running_variance(tmp_path: Path) -> None:
    loop = Loop(mlp)
    loop.model[5].running_var.copy_(torch.linspace(0.5, 2, 24))
    loop.model[5].eval()
    for _ in loop.watched(tmp_path / "run", 1):
        pass
    run = ns.load_run(tmp_path / "run")
    assert run.matrix("gain_tight")[0, run.layer_names.index("5")] == pytest.approx(1 / math.sqrt(0.5 + 1e-5), rel=1e-5)


def test_the_learning_rate_is_the_current_one(tmp_path: Path) -> None:
    """Schedules change the groups, and load_state_dict replaces them."""
    loop = Loop(mlp, lambda p: torch.optim.SGD(p, lr=0.1))
    saved = loop.optimizer.state_dict()
    for number, _ in enumerate(loop.watched(tmp_path / "run", 3)):
        if number == 1:
            loop.optimizer.param_groups[0]["lr"] = 0.2
        if number == 2:
            saved["param_groups"][0]["lr"] = 0.4
            loop.optimizer.load_state_dict(saved)
    run = ns.load_run(tmp_path / "run")
    np.testing.assert_allclose(run.table()["learning_rate"].to_numpy(), [0.1, 0.2, 0.4])
    np.testing.assert_allclose(
        run.matrix("effective_lr")[:, 0] * run.matrix("frobenius_norm")[:, 0] ** 2, [0.1, 0.2, 0.4], rtol=1e-5
    )


def test_loss_is_found_before_and_after_the_step_and_not_needed(tmp_path: Path) -> None:
    for place in ("before", "after", "never"):
        loop = Loop(mlp)
        losses = []
        with loop.watch(tmp_path / place, every=2) as watch:
            for _ in range(6):
                if place == "before":
                    loop.optimizer.zero_grad()
                    x, y = loop.batch()
                    loss = nn.functional.cross_entropy(loop.model(x), y)
                    loss.backward()
                    watch.step(loss=loss)
                    loop.optimizer.step()
                else:
                    loss = loop.step()
                    if place == "after":
                        watch.step(loss=loss)
                losses.append(loss.item())
        table = ns.load_run(tmp_path / place).table(["loss"])
        assert table["step"].to_pylist() == [1, 2, 4, 6]
        expected = [math.nan] * 4 if place == "never" else [losses[step - 1] for step in (1, 2, 4, 6)]
        np.testing.assert_allclose(table["loss"].to_numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["loss", "accuracy"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_is_no_single_number_switches_off_only_itself(place: str, name: str, tmp_path: Path) -> None:
    loop, (wrong, right) = Loop(mlp), (name, "accuracy" if name == "loss" else "loss")
    with pytest.warns(UserWarning, match=f"no longer records {name}"), loop.watch(tmp_path) as watch:
        for _ in range(3):
            given = {wrong: torch.ones(3), right: torch.tensor(0.5)}
            if place == "before":
                watch.step(**given)
            loop.step()
            if place == "after":
                watch.step(**given)
    table = ns.load_run(tmp_path).table()
    assert np.isnan(table[wrong].to_numpy()).all() and table[right].to_pylist() == [0.5] * 3
    assert np.isfinite(table["total_gradient_norm"].to_numpy()).all()


def test_the_optimizer_of_another_model_is_noted(tmp_path: Path) -> None:
    watched, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for name, trained in {"own": watched, "foreign": other}.items():
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        with ns.watch(watched, optimizer, run=tmp_path / name, every=1, quiet=True):
            (watched(torch.ones(4, 3)) + other(torch.ones(4, 3))).sum().backward()
            optimizer.step()
    notes = {name: [event["message"] for event in ns.load_run(tmp_path / name).events("note")] for name in ("own", "foreign")}
    assert ["none of the model's parameters" in "".join(notes[name]) for name in ("own", "foreign")] == [False, True]


def test_a_parameter_of_the_model_itself_is_named_after_itself(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with ns.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=tmp_path, quiet=True) as watch:
        model(torch.ones(2, 3)).sum().backward()
        watch.optimizer.step()
    assert [layer["name"] for layer in ns.load_run(tmp_path).layers] == ["weight"]
