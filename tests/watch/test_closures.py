"""A step with a closure makes its passes inside of the optimizer: what is recorded is the same as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normscope as ns
from tests.watch.loops import Loop, Transformer, sgd


def trained(path: Path, closed: str, steps: int = 4, jump: int = -1, **options: Any) -> ns.Run:
    """closed: how the closure is passed, if there is one. jump: a step whose loss is a million times too large."""
    loop = Loop(lambda: Transformer().eval())  # no dropout
    with loop.watch(path, **options) as watch:
        for step in range(1, steps + 1):
            x, y = loop.batch()

            def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
                loop.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(loop.model(x), y) * (1e6 if step == jump else 1)
                loss.backward()
                return loss

            if closed:
                loss = loop.optimizer.step(closure) if closed == "argument" else loop.optimizer.step(closure=closure)
            else:
                loss = closure()
                loop.optimizer.step()
            assert loss is not None
            watch.step(loss=loss)
    return ns.load_run(path)


@pytest.mark.parametrize("closed", ["argument", "name"])
def test_a_closure_changes_no_row_and_no_layer(closed: str, tmp_path: Path) -> None:
    plain, closure = trained(tmp_path / "plain", ""), trained(tmp_path / "closure", closed)
    assert closure.layers == plain.layers and {"block", "attention"} <= {layer["role"] for layer in closure.layers}
    assert not closure.events("error")
    for name in plain.table().column_names:
        if name not in ("time", "overhead"):
            found, expected = (run.arrays(name)[name] for run in (closure, plain))
            np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("every", [1, 1000])
def test_a_jump_is_found_at_its_step(every: int, tmp_path: Path) -> None:
    run = trained(tmp_path, "argument", 40, 30, every=every)
    found = {finding.name: finding.first_step for finding in reversed(run.findings)}
    assert found["exploding-gradient"] == found["loss-spike"] == 30
    columns = run.arrays("loss", "total_gradient_norm")
    (row,) = np.flatnonzero(columns["step"] == 30)
    assert columns["loss"][row] > 1e4 and columns["total_gradient_norm"][row] > 1e4 and {29, 31} <= set(columns["step"])


def test_of_several_evaluations_the_last_gradient_counts_and_the_first_weights(tmp_path: Path) -> None:
    """As LBFGS makes them."""
    loop = Loop(optimizer_of=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))
    first = dict(loop.model.named_parameters())["1.weight"].detach().clone()
    with loop.watch(tmp_path) as watch:
        last, given = [], []
        for step in range(3):
            x, y = loop.batch()

            def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
                loop.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(loop.model(x), y)
                loss.backward()
                watch.step(loss=loss)
                given.append(step)
                return loss

            loop.optimizer.step(closure)  # type: ignore[arg-type]
            last.append(float(torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]).norm()))
    run = ns.load_run(tmp_path)
    judged = 1 + sum(step > 0 for step in given)  # before there are layers, the last one alone
    np.testing.assert_allclose(run.arrays("total_gradient_norm")["total_gradient_norm"], last, rtol=1e-5)
    assert run.matrix("frobenius_norm")[0, run.layer_names.index("1")] == pytest.approx(float(first.norm()))
    assert np.isfinite(run.arrays("loss")["loss"]).all() and run.table()["losses_read"].to_pylist()[-1] == judged


def test_a_closure_that_raises_leaves_the_next_step_as_it_is(tmp_path: Path) -> None:
    loop, weights = Loop(optimizer_of=sgd), []
    with loop.watch(tmp_path):
        for step in range(3):
            x, y = loop.batch()

            def closure(x: Tensor = x, y: Tensor = y, step: int = step) -> Tensor:
                if step == 0:
                    raise ValueError("mine")
                loop.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(loop.model(x), y)
                loss.backward()
                return loss

            weights.append(float(dict(loop.model.named_parameters())["1.weight"].detach().norm()))
            if step == 0:
                with pytest.raises(ValueError, match="mine"):
                    loop.optimizer.step(closure)  # type: ignore[arg-type]
            else:
                loop.optimizer.step(closure)  # type: ignore[arg-type]
    run = ns.load_run(tmp_path)
    assert run.table()["step"].to_pylist() == [1, 2] and not run.events("error")
    np.testing.assert_allclose(run.matrix("frobenius_norm")[:, run.layer_names.index("1")], weights[1:], rtol=1e-6)
