"""Dropout with a stream of its own, whitening, exchanged modules, recalibrated statistics, and the perceptron's options."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.core.errors import InputError
from normscope.lab.models import mlp
from normscope.lab.models.dropout import SeededDropout
from normscope.lab.models.surgery import exchange
from normscope.lab.models.whitening import BatchWhitening, InverseRoot
from normscope.lab.recalibration import recalibrated
from normscope.lab.training import Training, accuracy_numbers
from normscope.lab.workspace import Workspace


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    dropout = SeededDropout(0.3).train()
    y = dropout(torch.ones(400, 500))
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(y.mean()) == pytest.approx(1, abs=0.01)
    assert torch.equal(dropout.eval()(y), y)


def test_dropout_goes_on_where_its_state_was_saved() -> None:
    first, second = SeededDropout(0.5, seed=1).train(), SeededDropout(0.5, seed=2).train()
    x = torch.ones(6, 7)
    first(x)
    second.load_state_dict(first.state_dict())
    copied = copy.deepcopy(first)
    expected = first(x)
    assert torch.equal(second(x), expected) and torch.equal(copied(x), expected)


def test_dropout_leaves_global_random_state_and_weights_alone() -> None:
    before = torch.random.get_rng_state()
    dropping = mlp(8, 4, 6, dropout=0.5).train()
    dropping(torch.ones(3, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(dropping.parameters(), mlp(8, 4, 6).parameters(), strict=True))


def test_a_training_with_dropout_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    training = Training("mlp", "batch", {"width": 8, "depth": 3, "dropout": 0.5}, images=200, epochs=3)
    whole = accuracy_numbers(training, Workspace(tmp_path / "whole", 0))
    accuracy_numbers(replace(training, epochs=2), Workspace(tmp_path / "killed", 0))
    assert accuracy_numbers(training, Workspace(tmp_path / "killed", 0)) == whole


@pytest.mark.parametrize("matrix", [torch.eye(4), torch.diag(torch.tensor([1.0, 1.0, 2.0, 3.0])), random(9, 4).T.cov()])
def test_the_gradient_of_the_inverse_root_is_exact_also_for_equal_eigenvalues(matrix: torch.Tensor) -> None:
    point = ((matrix + matrix.T) / 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda m: InverseRoot.apply((m + m.T) / 2), (point,))
    root = InverseRoot.apply(point)
    assert torch.allclose(root @ root @ point, torch.eye(4, dtype=torch.float64))


def test_whitened_features_are_uncorrelated_in_both_modes() -> None:
    mixed = (random(500, 6).double() @ random(6, 6, seed=1).double()) + 3
    layer = BatchWhitening(6, epsilon=1e-12, momentum=1.0).double().train()
    for mode in (True, False):
        y = layer.train(mode)(mixed)
        assert torch.allclose(y.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-9)
        assert torch.allclose(y.T.cov(correction=0), torch.eye(6, dtype=torch.float64), atol=1e-6)


def test_whitening_of_uncorrelated_features_is_batch_normalization() -> None:
    x = torch.linalg.qr(random(40, 5).double() - random(40, 5).double().mean(0))[0] * torch.tensor([1.0, 2, 3, 4, 5]).double()
    x = x - x.mean(0)
    normalized = nn.BatchNorm1d(5, eps=1e-3).double().train()(x)
    assert torch.allclose(BatchWhitening(5).double().train()(x), normalized, atol=1e-9)


def test_exchange_reaches_every_depth_and_leaves_the_rest() -> None:
    model = mlp(8, 4, 8, normalizer="batch", skip=True)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    exchange(model, lambda module: nn.LayerNorm(8) if isinstance(module, nn.BatchNorm1d) else None)
    assert sum(isinstance(module, nn.LayerNorm) for module in model.modules()) == 3
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    assert [module for module in model.modules() if isinstance(module, nn.Linear)] == linear


def test_recalibrated_statistics_are_those_of_the_data_without_dropout() -> None:
    model = mlp(8, 4, 6, normalizer="batch", dropout=0.5).eval()
    before = copy.deepcopy(model.state_dict())
    inputs = 5 + 3 * random(50, 6)
    corrected = recalibrated(model, inputs)
    first = model[1](inputs)
    assert torch.allclose(corrected[2].running_mean, first.mean(0), rtol=1e-4)
    assert torch.allclose(corrected[2].running_var, first.var(0), rtol=1e-4)
    x = inputs
    for layer in corrected:
        if isinstance(layer, nn.BatchNorm1d):
            assert torch.allclose(layer.running_var, x.var(0), rtol=0.05)
        x = layer(x)
    assert not any(module.training for module in corrected.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_linear_perceptron_is_linear_and_a_skip_adds_its_input() -> None:
    x, y = random(3, 6), random(3, 6, seed=1)
    linear = mlp(8, 5, 6, activation="linear").eval()
    assert torch.allclose(linear(x + y), linear(x) + linear(y) - linear(torch.zeros(3, 6)), atol=1e-5)
    residual = mlp(6, 2, 6, skip=True)
    hidden = residual[1]
    assert torch.allclose(hidden(x), x + torch.relu(hidden[0](x)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mlp(8, 3, 4, activation="gelu"), "'gelu': choose from relu, tanh, linear"),
        (lambda: SeededDropout(1.0), "less than 1, got 1.0"),
        (lambda: SeededDropout(-0.1), "at least 0"),
    ],
)
def test_errors_are_one_line(call: object, words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()  # type: ignore[operator]
    assert words in str(caught.value) and "\n" not in str(caught.value)
