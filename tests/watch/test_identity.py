"""The observer changes nothing: training with and without it is bit-identical, and it leaves no trace on what it watched."""

from __future__ import annotations

import copy
import html
import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normscope as ns
from normscope._watch.columns import matrix
from normscope.report.run_page import COLUMNS, run_report
from normscope.report.snapshot import Snapshot
from tests.watch.loops import Loop, Transformer, adamw, convolutional, mlp

STEPS = 50
LOOPS: dict[str, dict[str, Any]] = {
    "mlp sgd": {"make": mlp},
    "mlp adamw accumulated": {"make": mlp, "optimizer_of": adamw, "accumulate": 3},
    "convolutional sgd, clipped": {"make": convolutional, "clip": 0.1},
    "convolutional adamw bf16": {"make": convolutional, "optimizer_of": adamw, "autocast": True},
    "convolutional scaled": {"make": convolutional, "scaler": True, "clip": 0.1},
    "transformer sgd": {"make": Transformer},
    "transformer adamw bf16 accumulated": {"make": Transformer, "optimizer_of": adamw, "autocast": True, "accumulate": 2},
    "transformer checkpointed": {"make": lambda: Transformer(checkpointed=False), "optimizer_of": adamw},
    "transformer checkpointed, reentrant": {"make": lambda: Transformer(checkpointed=True), "optimizer_of": adamw},
    "mlp compiled": {"make": mlp, "compile": True},
    "transformer compiled": {"make": Transformer, "compile": True},
    "transformer scaled, clipped, accumulated": {"make": Transformer, "scaler": True, "clip": 0.1, "accumulate": 2},
}


def state(loop: Loop) -> list[Any]:
    """Everything that a step of training reads or writes."""
    optimizer = [value for entry in loop.optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*loop.model.state_dict().values(), *(p.grad for p in loop.model.parameters() if p.grad is not None)]
    return [*tensors, *(v for v in optimizer if isinstance(v, torch.Tensor)), torch.get_rng_state(), loop.data.get_state()]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS.keys())
def test_training_is_bit_identical(options: dict[str, Any], tmp_path: Path) -> None:
    plain = Loop(**options)
    for _ in range(STEPS):
        plain.step()
    expected, other = state(plain), (random.getstate(), np.random.get_state()[1].tolist())
    watched = Loop(**options)
    for _ in watched.watched(tmp_path / "run", STEPS, every=3):
        pass
    assert same(state(watched), expected)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == other
    run = ns.load_run(tmp_path / "run")
    assert len(run.table()) == 1 + STEPS // 3 and not run.events("error")
    if options["make"] is Transformer and not watched.compile:  # with all that is measured of blocks and attention
        for name in ("stream_rms", "write_ratio", "backward_gain", "attention_logit", "gamma_moved", "update_rms"):
            assert np.isfinite(run.matrix(name)[-1]).any(), name


def test_budgeted_training_is_bit_identical(tmp_path: Path) -> None:
    plain = Loop(convolutional)
    for _ in range(STEPS):
        plain.step()
    generator = torch.get_rng_state()
    watched = Loop(convolutional)
    for _ in watched.watched(tmp_path / "run", STEPS, every=None, budget=0.2):
        pass
    assert same(state(watched)[:-2], state(plain)[:-2]) and torch.equal(torch.get_rng_state(), generator)


def test_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    loop = Loop(convolutional)
    before = [dict(vars(module)) for module in loop.model.modules()]
    hooks = torch.nn.modules.module
    earlier = {*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks}  # of a watch that another test has left open
    watch = loop.watch(tmp_path / "run")
    assert [dict(vars(module)).keys() for module in loop.model.modules()] == [b.keys() for b in before]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loop.model.modules())
    loop.step()
    watch.close()
    assert {*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks} <= earlier
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in loop.model.parameters())
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks


def test_copies_and_pickles_of_a_watched_model_know_nothing_of_it(tmp_path: Path) -> None:
    plain, loop = Loop(convolutional), Loop(convolutional)
    pickled = pickle.dumps(loop.model)
    with loop.watch(tmp_path / "run"):
        assert pickle.dumps(loop.model) == pickled
        saved = io.BytesIO()
        torch.save(loop.model.state_dict(), saved)
        copied, optimizer = copy.deepcopy((loop.model, loop.optimizer))
        assert not optimizer._optimizer_step_pre_hooks
        copied(loop.batch()[0]).sum().backward()
        assert list(loop.model.state_dict()) == list(plain.model.state_dict())
        loop.step()
    assert ns.load_run(tmp_path / "run").table(["gradient_norm"])["gradient_norm"].null_count == 0


def test_compiled_code_is_compiled_at_most_once_more(tmp_path: Path) -> None:
    compiled = 0

    def backend(module: Any, example: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return module.forward

    torch._dynamo.reset()
    for watched_first in (True, False):
        loop = Loop(mlp)
        watch = loop.watch(tmp_path / f"{watched_first}", every=2) if watched_first else None
        loop.forward = torch.compile(loop.model, backend=backend)
        watch = watch or ns.watch(loop.forward, loop.optimizer, run=tmp_path / f"{watched_first}", every=2, quiet=True)
        compiled = 0
        for _ in range(12):
            loop.step()
        watch.close()
        assert compiled <= (2 if watched_first else 1)
        run = ns.load_run(tmp_path / f"{watched_first}")
        assert np.isfinite(run.matrix("gradient_norm")[:, 0]).all() and np.isfinite(run.matrix("spectral_norm")[:, 0]).all()
        said = "inputs of layers, blocks and attention are not recorded, only weights, gradients and steps"
        assert said in html.unescape(run_report([Snapshot.of(run, COLUMNS)]))
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [mlp, Transformer])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_is_not_recorded(mode: Any, make: Any, tmp_path: Path) -> None:
    alone, plain, disturbed = (Loop(make) for _ in range(3))
    for loop, evaluates in ((plain, False), (disturbed, True)):
        torch.manual_seed(0)
        for _ in loop.watched(tmp_path / str(evaluates), 5):
            if evaluates:
                loop.model.eval()
                with mode():
                    loop.model(100 * torch.ones(2, 3, 4, 4))
                loop.model.train()
    torch.manual_seed(0)
    for _ in range(5):
        alone.step()
    assert same(state(disturbed), state(alone)) and same(state(plain), state(alone))
    left, right = (ns.load_run(tmp_path / str(e)).table() for e in (False, True))
    for name in ("input_variance", "gain_tight", "dead_fraction", "stream_rms", "attention_logit", "backward_gain"):
        assert np.array_equal(matrix(left[name]), matrix(right[name]), equal_nan=True)


def test_two_models_watched_at_once_do_not_meet(tmp_path: Path) -> None:
    alone, one, two = Loop(mlp), Loop(mlp), Loop(convolutional)
    for _ in alone.watched(tmp_path / "alone", 4):
        pass
    with one.watch(tmp_path / "one") as first, two.watch(tmp_path / "two") as second:
        for _ in range(4):
            first.step(loss=one.step())
            second.step(loss=two.step())
    left, right = (ns.load_run(tmp_path / name) for name in ("alone", "one"))
    for name in ("gradient_norm", "input_variance", "angle"):
        assert np.array_equal(left.matrix(name), right.matrix(name), equal_nan=True)


def test_submodules_called_alone_are_seen(tmp_path: Path) -> None:
    """A loop that never calls the whole model, as Lightning's training_step may."""
    loop = Loop(mlp)
    loop.forward = lambda x: loop.model[7](loop.model[:7](x))  # type: ignore[assignment]
    for _ in loop.watched(tmp_path / "run", 4):
        pass
    run = ns.load_run(tmp_path / "run")
    rows = [i for i, layer in enumerate(run.layers) if layer["role"] != "weight"]
    assert np.isfinite(run.matrix("input_variance")[:, rows]).all()
    weights = [(layer["normalizer"], layer["scale_free"]) for layer in run.layers if layer["role"] == "weight"]
    assert weights == [(None, None)] * 3, "what the whole model returns was not seen"
