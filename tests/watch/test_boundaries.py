"""What is done between steps of a recording, odd surroundings, forks and closed streams change nothing."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import normscope as ns
from tests.watch.loops import Loop, mlp
from tests.watch.test_faults import STEPS, small
from tests.watch.test_identity import same, state


def inference(loop: Loop, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return loop.model.eval()(x).tolist(), loop.model.train()


def jit_trace(loop: Loop, x: torch.Tensor) -> Any:
    traced_model = torch.jit.trace(loop.model.eval(), x, check_trace=False)
    loop.model.train()
    return str(traced_model.inlined_graph).count("aten::")


def exported(loop: Loop, x: torch.Tensor) -> Any:
    program = torch.export.export(loop.model.eval(), (x,))
    loop.model.train()
    return len(program.graph.nodes)


def transformed(loop: Loop, x: torch.Tensor) -> Any:
    parameters = {name: p.detach() for name, p in loop.model.named_parameters()}
    loop.model.eval()
    gradients = torch.func.grad(lambda p: torch.func.functional_call(loop.model, p, (x,)).sum())(parameters)
    loop.model.train()
    return [float(gradient.sum()) for gradient in gradients.values()]


def counted_operations(loop: Loop, x: torch.Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        loop.model(x).sum()
    return counter.get_total_flops()


def copies(loop: Loop, x: torch.Tensor) -> Any:
    saved = io.BytesIO()
    torch.save(loop.model, saved)
    copied = copy.deepcopy(loop.model)
    copied(x).sum().backward()
    pickle.loads(pickle.dumps(loop.model))(x).sum().backward()
    return float(copied[1].weight.grad.sum())


def another_thread(loop: Loop, x: torch.Tensor) -> Any:
    found: list[float] = []

    def evaluate() -> None:
        twin = copy.deepcopy(loop.model).eval()
        with torch.no_grad():
            found.append(float(twin(x).sum()))
            loop.model[0](x)

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    return found


def meta(loop: Loop, x: torch.Tensor) -> Any:
    return copy.deepcopy(loop.model).to("meta")(x.to("meta")).shape, loop.model[0](x.to("meta")).shape


SURROUNDINGS: dict[str, Callable[[Loop, torch.Tensor], Any]] = {
    "inference mode": inference,
    "torch.jit.trace": jit_trace,
    "torch.export": exported,
    "torch.func": transformed,
    "a mode that counts": counted_operations,
    "copies and pickles": copies,
    "another thread": another_thread,
    "meta tensors": meta,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_is_done_between_steps_gives_the_same_with_and_without(name: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    found = []
    for watched in (False, True):
        loop = Loop(small)
        made = loop.watch(tmp_path) if watched else None
        seen = []
        for _ in range(STEPS):
            seen.append(SURROUNDINGS[name](loop, x))
            loop.step()
        if made is not None:
            made.close()
        found.append((state(loop), [value if not isinstance(value, tuple) else value[0] for value in seen]))
    (expected, without), (tensors, with_it) = found
    assert with_it == without and same(tensors, expected)
    run = ns.load_run(tmp_path)
    assert not run.events("error") and len(run.table()) == STEPS


@pytest.mark.parametrize("stream", ["closed", "broken", "none"])
def test_a_stream_that_takes_nothing_does_not_keep_close_from_returning(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    loop = Loop(small)
    made = loop.watch(tmp_path, quiet=False)
    loop.step()
    taken: Any = {"closed": io.StringIO(), "broken": Broken(), "none": None}[stream]
    if stream == "closed":
        taken.close()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", taken)
        made.close()
        made.close()
    assert len(ns.load_run(tmp_path).table()) == 1 and ns.load_run(tmp_path).events("closed")


def test_a_forked_process_neither_writes_nor_closes_the_run(tmp_path: Path) -> None:
    loop = Loop(small)
    made = loop.watch(tmp_path)
    loop.step()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            loop.step()
            made.step(loss=1.0)
            made.close()
        finally:
            os._exit(0 if not made.closed and made.steps == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loop.step()
    made.close()
    run = ns.load_run(tmp_path)
    assert run.table()["step"].to_pylist() == [1, 2] and len(run.events("closed")) == 1


def test_layers_of_mlp_are_recorded_after_a_pass_of_another_thread(tmp_path: Path) -> None:
    """A pass without gradients in another thread, in the middle of the sampled one, is not taken for its end."""
    loop = Loop(mlp)

    def evaluate(*args: Any) -> None:
        def run() -> None:
            with torch.no_grad():
                copied(torch.zeros(2, 3, 4, 4))

        copied = loop.model.eval()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        loop.model.train()

    handle = loop.model[1].register_forward_hook(lambda *args: handle.remove() or evaluate())
    for _ in loop.watched(tmp_path, 2):
        pass
    run = ns.load_run(tmp_path)
    rows = [i for i, layer in enumerate(run.layers) if layer["role"] != "weight"]
    assert not run.events("error") and torch.tensor(run.matrix("input_variance")[0, rows]).isfinite().all()
