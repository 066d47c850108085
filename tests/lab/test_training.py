"""Training: the same numbers for a seed, with or without a kill on the way, and with batch statistics left alone by what measures."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope._watch.reading import load_run
from normscope.core.errors import InputError
from normscope.lab.measurements import PRODUCTS, LayerMeter, spectral_norm
from normscope.lab.models import mlp, resnet18
from normscope.lab.training import (
    Training,
    TrainingSettings,
    accuracy_numbers,
    fit,
    prepare,
    train,
    trained_numbers,
    with_and_without,
)
from normscope.lab.workspace import CHECKPOINT, Workspace

SMALL = Training("mlp", "batch", {"width": 16, "depth": 3}, epochs=3, images=300)


class Killed(Exception):
    pass


def killed_at(workspace: Workspace, step: float) -> Workspace:
    """A workspace whose process dies once a training has come so far."""

    def progress(done: float, total: float = 1.0) -> None:
        if done >= step:
            raise Killed

    workspace.progress = progress  # type: ignore[method-assign]
    return workspace


@pytest.mark.quick(1)
@pytest.mark.parametrize("step", [0.4, 1.0, 1.4, 2.9])
def test_a_killed_training_ends_as_one_that_was_not(tmp_path: Path, step: float) -> None:
    whole = trained_numbers(SMALL, Workspace(tmp_path / "whole", 0))
    with pytest.raises(Killed):
        trained_numbers(SMALL, killed_at(Workspace(tmp_path / "killed", 0), step))
    assert trained_numbers(SMALL, Workspace(tmp_path / "killed", 0)) == whole
    steps = load_run(tmp_path / "killed" / "run").table(["step"])["step"].to_pylist()
    assert steps == sorted(set(steps)) and steps[-1] == 9


@pytest.mark.parametrize("optimizer", ["sgdg", "adamg"])
def test_a_killed_training_on_spheres_ends_as_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    training = replace(SMALL, optimizer=optimizer, learning_rate=0.01)
    whole = accuracy_numbers(training, Workspace(tmp_path / "whole", 0))
    with pytest.raises(Killed):
        accuracy_numbers(training, killed_at(Workspace(tmp_path / "killed", 0), 1.4))
    assert accuracy_numbers(training, Workspace(tmp_path / "killed", 0)) == whole


def test_a_kill_while_a_checkpoint_is_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path, 0)
    workspace.save({"epoch": 1})

    def torn(state: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise Killed

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(Killed):
        workspace.save({"epoch": 2})
    assert workspace.load() == {"epoch": 1}


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_a_damaged_checkpoint_starts_the_trial_again(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(content)
    assert Workspace(tmp_path, 0).load() is None


def test_numbers_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = trained_numbers(SMALL, Workspace(tmp_path / "a", 0))
    torch.manual_seed(2)
    assert trained_numbers(SMALL, Workspace(tmp_path / "b", 0)) == first
    assert trained_numbers(SMALL, Workspace(tmp_path / "c", 1)) != first


def test_global_random_state_is_untouched(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    trained_numbers(SMALL, Workspace(tmp_path, 0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_learns(tmp_path: Path) -> None:
    history = train(replace(SMALL, epochs=15, images=None, learning_rate=0.01), Workspace(tmp_path, 0)).history
    assert [record["epoch"] for record in history] == list(range(16))
    assert history[-1]["train_accuracy"] > 0.9 and history[-1]["test_accuracy"] > 0.85
    assert (tmp_path / CHECKPOINT).exists()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.last(flat + self.norm(self.first(flat)))


def test_the_recording_judges_weights_that_no_chain_of_modules_shows(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, 0)
    fit(Residual(), prepare(SMALL, workspace)[1], replace(SMALL, epochs=1), workspace)
    judged = {layer["name"]: layer["scale_free"] for layer in load_run(tmp_path / "run").layers if layer["role"] == "weight"}
    assert judged == {"first": True, "last": False}


def test_a_training_that_diverges_ends_and_says_so(tmp_path: Path) -> None:
    wild = replace(SMALL, normalizer="none", optimizer="plain-sgd", learning_rate=1e30)
    numbers = trained_numbers(wild, Workspace(tmp_path, 0))
    assert numbers["diverged"] and len(numbers["history"]) < 4


def test_inputs_are_in_the_unit_ball(tmp_path: Path) -> None:
    split = train(replace(SMALL, epochs=0), Workspace(tmp_path, 0)).split
    assert float(split.train[0].flatten(1).norm(dim=1).max()) == pytest.approx(1)


def test_the_meter_is_exact_and_changes_nothing() -> None:
    model = mlp(16, 4, 64, normalizer="batch").train()
    before = copy.deepcopy(model.state_dict())
    batch = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    numbers = LayerMeter(model, batch)(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    first = model[1](batch.flatten(1)).detach().double()
    row = numbers["normalizers"]["2"]
    variance = first.var(0, correction=0)
    assert row["input_variance"] == pytest.approx(float(variance.mean()), rel=1e-5)
    assert row["gain_tight"] == pytest.approx(float((variance + 1e-5).rsqrt().max()), rel=1e-5)
    assert row["gain_paper"] == pytest.approx(float((variance + 1e-5).rsqrt().norm()), rel=1e-5)
    assert set(numbers["products"]) == set(PRODUCTS)
    norms = [torch.linalg.matrix_norm(model[i].weight.detach().double(), 2) for i in (1, 4, 7, 10)]
    assert numbers["products"]["weights_matrix"] == pytest.approx(float(torch.stack(norms).log10().sum()), rel=1e-9)


@pytest.mark.full
def test_products_are_those_of_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    import normscope as ns

    monkeypatch.setattr(import_module("normscope.lab.models.resnet18"), "WIDTHS", (8, 8, 16, 16))
    model = resnet18(10, stem="small").train()
    batch = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = LayerMeter(model, batch)(model)["products"]
    audited = ns.audit(model, batch[:2], effort=0.0).products
    for name in ("weights_matrix", "weights_frobenius"):
        assert ours[name] == pytest.approx(audited[name], abs=1e-4)


def test_spectral_norm_of_a_matrix_with_nan_is_nan() -> None:
    assert spectral_norm(torch.full((2, 3), float("nan"), dtype=torch.float64)) != spectral_norm(
        torch.ones(2, 3, dtype=torch.float64)
    )


def test_with_and_without_differ_in_the_normalizer_alone() -> None:
    trials = with_and_without(TrainingSettings(), seed=3)
    plain, normalized = trials.values()
    assert replace(plain, normalizer="batch") == normalized and plain.seed == 3


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(InputError, match="no optimizer 'adamw': choose from adam"):
        train(replace(SMALL, optimizer="adamw"), Workspace(Path("unused"), 0))
