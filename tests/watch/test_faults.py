"""Nothing leaves the recorder but an interrupt: faults at any of its calls, from its construction to its end."""

from __future__ import annotations

import inspect
import shutil
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

import normscope as ns
from normscope._watch import budget, forward, guard, reaction, recording, sampler
from tests.watch.loops import Loop, Transformer
from tests.watch.test_identity import same, state

RECORDER = str(Path(forward.__file__).parent)
STEPS = 3
BOUNDARY = {  # what calls the rest, inside of a try, and what only looks at arguments
    guard.Guard.__init__.__code__, guard.Guard.outermost.__code__, guard.Guard._unless_over.__code__, guard.Guard.run.__code__,
    recording.Watch.__init__.__code__, recording.Watch.step.__code__, recording.Watch.close.__code__, recording.Watch.summary.__code__, recording.Watch.findings.fget.__code__, recording.Watch.table.fget.__code__, recording.Watch.on.__code__,
    recording.Watch.__enter__.__code__, recording.Watch.__exit__.__code__,
    inspect.unwrap(ns.watch).__code__, budget.Budget.__init__.__code__, reaction.checked.__code__,
}  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))


def plain(make: Callable[[], nn.Module] = small, steps: int = STEPS) -> list[Any]:
    loop = Loop(make)
    for _ in range(steps):
        loop.step()
    return state(loop)


@contextmanager
def traced(tracer: Callable[[FrameType, str, Any], None], install: Callable[[Any], None]) -> Iterator[None]:
    install(tracer)
    try:
        yield
    finally:
        install(None)


class Faults:
    """Raises at one call of the recorder: the n-th of a function, or of them all; counts all that there are."""

    def __init__(self, code: CodeType | None = None, number: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.code, self.number, self.error = code, number, error
        self.calls: Counter[CodeType] = Counter()
        self.total = 0
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in BOUNDARY or not code.co_filename.startswith(RECORDER):
            return
        self.calls[code] += 1
        self.total += 1
        if (
            not self.raised
            and self.number == (self.total if self.code is None else self.calls[self.code])
            and self.code in (None, code)
        ):
            self.raised = True
            raise self.error("injected")


def left_behind() -> Counter[str]:
    """What a recording must take away with it."""
    writers = sum(thread.name == "normscope-writer" for thread in threading.enumerate())
    return Counter(writers=writers, hooks=len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks))


class Listed:
    """A sink."""

    def __init__(self) -> None:
        self.rows, self.findings, self.closed = 0, 0, False

    def row(self, row: Any, layers: Any) -> None:
        self.rows += 1

    def finding(self, finding: Any) -> None:
        self.findings += 1

    def close(self) -> None:
        self.closed = True


@dataclass
class Scene:
    """A training, what its recorder is asked for, and when the loss jumps. before: a run to go on with."""

    make: Callable[[], nn.Module] = small
    steps: int = STEPS
    jump: int | None = None
    options: Callable[[], dict[str, Any]] = dict
    before: bool = False

    def step(self, loop: Loop, number: int) -> torch.Tensor:
        loop.optimizer.zero_grad()
        x, y = loop.batch()
        loss = nn.functional.cross_entropy(loop.model(x), y) * (1e6 if number == self.jump else 1)
        loss.backward()
        loop.optimizer.step()
        return loss

    def plain(self) -> list[Any]:
        loop = Loop(self.make)
        for number in range(self.steps + 1):
            self.step(loop, number)
        return state(loop)

    def trained(self, run: Path, faults: Faults, on_the_thread: bool = False) -> list[Any]:
        """The state after a training whose recorder has these faults: in the loop, or on its own threads."""
        loop, before, options = Loop(self.make), left_behind(), self.options()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with traced(faults, threading.settrace if on_the_thread else sys.settrace), loop.watch(run, **options) as made:
                made.on("spike", lambda finding: None)
                for number in range(self.steps):
                    made.step(loss=self.step(loop, number))
                made.summary()
                assert isinstance(made.findings, list) and getattr(made.table, "layers", True)
            steps = made.steps
            self.step(loop, self.steps)
        assert made.closed and made.steps == steps and left_behind() == before
        return state(loop)

    def prepared(self, run: Path) -> Path:
        """A directory to record into."""
        if self.before:
            kept = run.parent / "before"
            if not kept.exists():
                for _ in Loop(self.make).watched(kept, 2):
                    pass
            shutil.copytree(kept, run)
        return run


def asked() -> dict[str, Any]:
    x, y = torch.ones(4, 3, 4, 4), torch.arange(4)
    return {"sinks": [Listed()], "on_row": lambda row, names: None, "probe": ns.Probe(x, y, nn.functional.cross_entropy, every=6)}


def attentive() -> nn.Module:
    return Transformer().eval()  # no dropout


SCENES = {
    "plain": Scene(),
    "resumed, with sinks, a probe, actions and a spike": Scene(small, 14, 12, asked, before=True),
    "attention": Scene(attentive),
}
QUICK = ("plain", "resumed, with sinks, a probe, actions and a spike")


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in (1, 2))])
@pytest.mark.parametrize("on_the_thread", [False, True], ids=["loop", "threads"])
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SCENES if name not in QUICK)])
def test_a_fault_in_any_function_of_the_recorder_stays_there(name: str, on_the_thread: bool, part: int, tmp_path: Path) -> None:
    """Of every third function, beginning with the given one."""
    scene = SCENES[name]
    expected, counting = scene.plain(), Faults()
    assert same(scene.trained(scene.prepared(tmp_path / "count"), counting, on_the_thread), expected)
    assert len(counting.calls) > (8 if on_the_thread else 100)
    for index, (code, calls) in list(enumerate(counting.calls.items()))[part::3]:
        run, number = scene.prepared(tmp_path / str(index)), calls if index % 2 else 1
        assert same(scene.trained(run, Faults(code, number), on_the_thread), expected), (code.co_qualname, number)
        with suppress(ns.InputError):  # of a run that was never begun
            ns.load_run(run).table()
        shutil.rmtree(run, ignore_errors=True)


@pytest.mark.full
def test_a_fault_at_any_call_of_the_recorder_stays_there(tmp_path: Path) -> None:
    scene, counting = SCENES["plain"], Faults()
    expected = scene.plain()
    scene.trained(tmp_path / "count", counting)
    for number in range(1, counting.total + 1):
        assert same(scene.trained(tmp_path / str(number), Faults(None, number)), expected), number


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_keeps_a_recording_from_beginning_leaves_nothing_behind(error: type[BaseException], tmp_path: Path) -> None:
    """Only an interrupt is raised; else there is a recording that records nothing."""
    counting, before, failed = Faults(), left_behind(), 0
    with traced(counting, sys.settrace):
        made = Loop(small).watch(tmp_path / "count")
    made.close()
    for index, code in enumerate(counting.calls):
        loop, run, sink = Loop(small), tmp_path / str(index), Listed()
        with warnings.catch_warnings(record=True) as caught, suppress(KeyboardInterrupt):
            warnings.simplefilter("always")
            with traced(Faults(code, 1, error), sys.settrace):
                made = loop.watch(run, sinks=[sink])
            assert error is RuntimeError, code.co_qualname
            failed += made.closed
            assert made.closed == any("training continues" in str(warning.message) for warning in caught), code.co_qualname
            with made:
                made.on("finding", print)
                made.step(loss=loop.step())
                assert made.findings == [] and made.summary()["steps"] == (0 if made.table is None else 1)
            with pytest.raises(ns.InputError, match="no kind"):
                made.on("unknown", print)
        assert sink.closed == (made.table is not None and error is RuntimeError)
        assert (
            left_behind() == before
            and not loop.optimizer._optimizer_step_pre_hooks
            and not loop.optimizer._optimizer_step_post_hooks
        )
        again = loop.watch(run)  # the lock is free
        again.close()
        assert ns.load_run(run).events("closed"), code.co_qualname
    assert failed > 20 or error is KeyboardInterrupt


def test_an_interrupt_reaches_the_loop_and_the_run_can_be_read(tmp_path: Path) -> None:
    for index, code in enumerate((forward.ForwardView._entering, sampler.Sampler.before, recording.Watch._after_step)):
        with pytest.raises(KeyboardInterrupt):
            SCENES["plain"].trained(tmp_path / str(index), Faults(code.__code__, 2, KeyboardInterrupt))
        run = ns.load_run(tmp_path / str(index))
        assert run.events("closed") and not run.events("error")


def test_the_death_of_the_writing_thread_is_noticed(tmp_path: Path) -> None:
    loop = Loop(small)
    with pytest.warns(UserWarning, match="stopped recording"), loop.watch(tmp_path) as made:
        assert made.writer is not None
        made.writer._waiting.put(lambda: (_ for _ in ()).throw(SystemExit))
        while not made.writer.failed:
            time.sleep(0.001)
        for _ in range(STEPS):
            loop.step()
        assert not loop.optimizer._optimizer_step_pre_hooks
    assert same(state(loop), plain())
