"""Slow measurements against dense references, and without a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

import normscope as ns
from tests.watch.loops import Loop, convolutional
from tests.watch.test_identity import same, state


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5)).double()


def test_numbers_agree_with_dense_matrices() -> None:
    torch.manual_seed(0)
    model, x, y = small(), torch.randn(6, 3, 4, 4).double(), torch.randint(5, (6,))
    loss = nn.functional.cross_entropy
    found = ns.Probe(x, y, loss, iterations=200).measure(model, 0.1)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def value(point: torch.Tensor) -> torch.Tensor:
        parts = point.split([shape.numel() for shape in shapes.values()])
        own = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        hidden = nn.functional.linear(x.flatten(1), own["1.weight"], own["1.bias"])
        normal = nn.functional.batch_norm(hidden, None, None, own["2.weight"], own["2.bias"], True)
        return loss(nn.functional.linear(normal.tanh(), own["4.weight"], own["4.bias"]), y)

    eigenvalues = torch.linalg.eigvalsh(hessian(value)(flat))
    assert found["sharpness"] == pytest.approx(float(eigenvalues[eigenvalues.abs().argmax()]), rel=1e-3)
    gradient = torch.func.grad(value)
    change = gradient(flat - 0.1 * gradient(flat)) - gradient(flat)
    assert found["gradient_predictiveness"] == pytest.approx(float(change.norm() / gradient(flat).norm()), rel=1e-6)
    model.eval()
    jacobians = [jacrev(lambda one: functional_call(model, {}, (one[None],))[0])(sample).flatten(1) for sample in x]
    assert found["jacobian_norm"] == pytest.approx(max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians), rel=1e-3)


def test_a_probed_training_is_bit_identical(tmp_path: Path) -> None:
    plain = Loop(convolutional)
    for _ in range(12):
        plain.step()
    expected = state(plain)
    probed = Loop(convolutional)
    probe = ns.Probe(*plain.batch(), nn.functional.cross_entropy, every=4, iterations=3)
    for _ in probed.watched(tmp_path / "run", 12, every=2, probe=probe):
        pass
    assert same(state(probed)[:-1], expected[:-1])
    run = ns.load_run(tmp_path / "run")
    assert "a probe runs the model" in run.events("note")[0]["message"] and run.manifest["config"]["runs_the_model"]
    assert [event["step"] for event in run.events("probe")] == [4, 8, 12] and not run.events("error")
    assert np.isfinite(run.table()["sharpness"].to_numpy()).tolist() == [False, False, False, True, False, True, False]
    assert probe.cost > 0 and run.events("closed")[0]["probe_seconds"] == pytest.approx(probe.cost)


def test_a_probe_that_fails_ends_only_itself(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    with pytest.warns(UserWarning, match="no longer records probe"):
        for _ in loop.watched(tmp_path / "run", 4, probe=ns.Probe(torch.zeros(1), torch.zeros(1), nn.functional.mse_loss, every=1)):
            pass
    assert len(ns.load_run(tmp_path / "run").table()) == 4
    with pytest.raises(ns.InputError, match="at least 1"):
        ns.Probe(torch.zeros(1), torch.zeros(1), nn.functional.mse_loss, every=0)
