"""A pass that raises, and whose error the loop catches, leaves nothing behind: what is recorded is what trained."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normscope as ns
from normscope._watch import gradients

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class OutOfMemory(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


class Net(nn.Module):
    """Refuses a batch in the middle of its forward pass; calls itself once more where it is told to."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.a, self.n, self.r, self.h, self.again = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), again

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        z = self.r(self.n(self.a(x)))
        if x.abs().max() > 1000:
            raise KeyboardInterrupt if self.again else ValueError("bad batch")
        return self(z, 1) if self.again and depth == 0 else self.h(z)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def watched(model: nn.Module, path: Path) -> tuple[torch.optim.Optimizer, ns.Watch]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return optimizer, ns.watch(model, optimizer, run=path, every=1, quiet=True)


@pytest.mark.parametrize("again", [True, False], ids=["begun again", "accumulated"])
def test_gradients_after_a_failed_backward_pass_are_those_of_the_step(again: bool, tmp_path: Path) -> None:
    model, expected = chain(), []
    optimizer, watch = watched(model, tmp_path)
    with watch:
        for _ in range(4):
            optimizer.zero_grad()
            if not again:
                model(X).mean().backward()
            with pytest.raises(RuntimeError, match="out of memory"):
                model[1](OutOfMemory.apply(model[0](X))).mean().backward()
            if again:
                optimizer.zero_grad()
            (100 * model(X).square().mean()).backward()
            expected.append([layer.weight.grad.norm().item() for layer in model])
            optimizer.step()
    np.testing.assert_allclose(ns.load_run(tmp_path).matrix("gradient_norm"), expected, rtol=1e-5)


def test_gradients_are_unknown_where_the_last_backward_pass_of_a_step_failed(tmp_path: Path) -> None:
    """What the optimizer gets is then neither that of the pass before, nor unclipped."""
    model = chain()
    optimizer, watch = watched(model, tmp_path)
    with watch:
        for step in range(3):
            optimizer.zero_grad()
            model(X).mean().backward()
            if step == 1:
                with pytest.raises(RuntimeError, match="out of memory"):
                    model[1](OutOfMemory.apply(model[0](X))).mean().backward()
            optimizer.step()
    norms = ns.load_run(tmp_path).matrix("gradient_norm")
    assert np.isnan(norms).all(1).tolist() == [False, True, False]


def test_passes_inside_of_a_backward_pass_do_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = chain(), []
    norms = gradients.norms
    monkeypatch.setattr(gradients, "norms", lambda tensors: (reads.append(len(tensors)), norms(tensors))[1])
    optimizer, watch = watched(model, tmp_path)
    with watch:
        checkpointed = checkpoint(model[0], X.clone().requires_grad_(), use_reentrant=True)
        model[1](checkpointed).mean().backward()
        optimizer.step()
    assert reads == [4]


@pytest.mark.parametrize("bad", [0, 2])
def test_statistics_after_a_failed_forward_pass_are_those_of_the_batch_that_trained(bad: int, tmp_path: Path) -> None:
    model = Net()
    optimizer, watch = watched(model, tmp_path)
    expected = []
    with watch:
        for step in range(4):
            for batch in [1e5 * X, X] if step == bad else [X]:
                optimizer.zero_grad()
                with suppress(ValueError):
                    model(batch).square().mean().backward()
            with torch.no_grad():
                expected.append(model.a(X).abs().max().item())
            optimizer.step()
    run = ns.load_run(tmp_path)
    assert run.layer_names == ["a", "n", "r", "h"]
    np.testing.assert_allclose(run.matrix("largest_input")[:, 1], expected, rtol=1e-5)


def test_a_model_that_calls_itself_is_one_pass_also_after_an_interrupt(tmp_path: Path) -> None:
    model = Net(again=True)
    optimizer, watch = watched(model, tmp_path)
    with watch:
        with suppress(KeyboardInterrupt):
            model(1e5 * X)
        model(X).square().mean().backward()
        optimizer.step()
    run = ns.load_run(tmp_path)
    assert run.layer_names == ["a", "n", "r", "n#2", "r#2", "h"]
    assert run.matrix("largest_input")[0, 1] < 1000


def test_a_call_without_gradients_after_a_failed_pass_is_no_part_of_it(tmp_path: Path) -> None:
    model = Net()
    optimizer, watch = watched(model, tmp_path)
    with watch:
        for step in range(3):
            if step == 1:
                with pytest.raises(RuntimeError):
                    model(torch.zeros(8, 3))
                with torch.no_grad():
                    model.r(1e6 * torch.ones(8, 4))
            model.h(model.r(model.n(model.a(X)))).square().mean().backward()
            optimizer.step()
    run = ns.load_run(tmp_path)
    assert np.nanmax(run.matrix("largest_input")) < 1000
