"""`ns.watch`: one line in a training loop, and what normalization does is on record."""

from __future__ import annotations

import atexit
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normscope.core.data import Example
from normscope.core.errors import InputError
from normscope.core.wrapping import unwrapped
from normscope.recorder.backward import Spans, Verdicts, judge, roots_of_this_pass
from normscope.recorder.budget import Budget
from normscope.recorder.columns import schema
from normscope.recorder.completion import Completion, OnRow
from normscope.recorder.distributed import Processes, placement
from normscope.recorder.findings import EarlyWarning
from normscope.recorder.following import FollowedPart
from normscope.recorder.forward import ForwardView, is_compiled
from normscope.recorder.gradients import GradientView, active_scaler
from normscope.recorder.guard import Guard, warn
from normscope.recorder.layers import is_plain, weight_names
from normscope.recorder.life import Life, ending
from normscope.recorder.pairing import listed
from normscope.recorder.preparation import Earlier, Table, make_table, manifest, outline, sharded_spectra
from normscope.recorder.probes import Probe
from normscope.recorder.rows import assemble
from normscope.recorder.stepping import StepView
from normscope.recorder.store import Writer
from normscope.recorder.transfer import Transfer
from normscope.symmetry.report import SymmetryReport

PROBED = "a probe runs the model's own forward between steps: what counts calls or draws from its own generators goes on"


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: str | Path,
    budget: float = 0.01,
    *,
    every: int | None = None,
    layers: str | None = None,
    symmetries: SymmetryReport | None = None,
    scaler: torch.amp.GradScaler | None = None,
    probe: Probe | None = None,
    on_row: OnRow | None = None,
    start_step: int | None = None,
    quiet: bool = False,
    example: Example | None = None,
    graph: bool | None = None,
) -> Watch:
    """Record how weights, activations, gradients and normalizers develop while `optimizer` trains `model`.

        with ns.watch(model, optimizer, run="runs/name") as w:
            for x, y in batches:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                w.step(loss=loss)  # optional: the optimizer's hooks drive it

    Training is bit-identical with and without it, and your code is never run a second time. It never raises into the loop: a
    part of it that fails is switched off and noted in events.jsonl. budget: the share of wall time it may take; every: a fixed
    cadence instead. layers: a regular expression for the names to record. symmetries: a report of `ns.symmetries`, made before
    training, for what the live passes do not show: which weights are scale-free, and normalizers that are written by hand.
    scaler: found by itself where it calls the optimizer. probe: a batch for slow measurements, which do run the model. on_row:
    called with every row and the layers' names, on a thread of its own. start_step: steps done before, by default the last one
    on record in `run`. example, graph: no longer used; the model is not traced.
    """
    if example is not None or graph is not None:
        warnings.warn(
            "ns.watch no longer traces the model, so example= and graph= do nothing and will go; pass symmetries=… instead",
            DeprecationWarning,
            stacklevel=2,
        )
    options = Options(layers, symmetries, scaler, probe, on_row, start_step, quiet)
    return Watch(model, optimizer, Path(run), Budget(budget, every), options)


@dataclass(frozen=True)
class Options:
    """What `watch` was asked for, beside the cadence."""

    layers: str | None = None
    symmetries: SymmetryReport | None = None
    scaler: torch.amp.GradScaler | None = None
    probe: Probe | None = None
    on_row: OnRow | None = None
    start_step: int | None = None
    quiet: bool = False


class Watch:
    """A recording in progress: a context manager; `close` ends it, `findings` holds its early warnings."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Path, budget: Budget, options: Options) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"a model is a torch.nn.Module, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"an optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.model, self.compiled = unwrapped(model), any(is_compiled(module) for module in model.modules())
        named = dict(self.model.named_parameters())  # now: FSDP puts others in their place during a pass
        self.parameters = {name: parameter for name, parameter in named.items() if is_plain(parameter)}
        self._foreign = sorted(named.keys() - self.parameters.keys())
        self.optimizer, self.run, self.budget, self.options = optimizer, run, budget, options
        _check_symmetries(options.symmetries, named)
        self.steps = self.sampled_steps = self.step_number = 0
        self.closed = False
        self._life: Life | None = None  # how it ended
        self.table: Table | None = None
        self.processes = Processes.here(self.model, run)
        self.guard = Guard(self._event, self._stop)
        self.forward = ForwardView(self.model, lambda f, *a: self._look("input statistics", f, *a))
        self.gradients = GradientView(self.parameters, lambda f, *a: self._look("gradients", f, *a), self._backward_began)
        self._sampling = False
        self._verdicts: list[Verdicts] = []  # one for each backward pass of the first sample
        self._pending: dict[str, Any] | None = None  # a row that waits for its loss
        self._given: dict[str, Any] = {}  # loss and accuracy of the step to come
        self._given_after: bool | None = None  # whether the loop gives them after the optimizer's step
        self._probed: dict[str, float] = {}
        self._handles: list[Any] = []
        self.writer: Writer | None = None
        try:
            self.writer = Writer(self.processes.directory, self._recording_failed, lambda: self.step_number)
            self._begin(self.writer)
        except BaseException as error:
            self.guard.run("end of hooks", self._detach)
            self.guard.run("other processes", self.processes.leave)
            if self.writer is not None:
                self.writer.close(None)  # and with it the lock: the next call may be right
            if isinstance(error, InputError) or not isinstance(error, Exception):
                raise
            self._recording_failed(error)

    @property
    def findings(self) -> list[EarlyWarning]:
        """The early warnings so far."""
        return self._completion.findings if self.table is not None else []

    # life --------------------------------------------------------------------------------------------------------------

    def _begin(self, writer: Writer) -> None:
        before = Earlier.of(FollowedPart.at(writer.directory, anew=True))
        lazy = any(is_lazy(parameter) for parameter in self.parameters.values())
        if before.outline is not None and not lazy and before.outline != outline(self.parameters):
            raise InputError(f"{self.run} is a run of another model: choose another run=, or delete it")
        self._recorded_layers = before.layers
        last = before.life.step or 0
        self.step_number = self.processes.agree(last if self.options.start_step is None else self.options.start_step)
        self.schedule = self.processes.schedule(self.budget)
        self.budget.elsewhere = lambda: writer.cost
        self._event("started", step=self.step_number, process=self.processes.rank)
        if before.rows:
            self._say_resumed(before)
        if self.processes.problem:
            self._event("note", message=self.processes.problem)
        if self._foreign:
            self._event("note", message=f"of a type that runs code of its own, so they are not recorded: {listed(self._foreign)}")
        if self.compiled:
            self._without_inputs("the model is compiled")
        self._handles = [
            self.optimizer.register_step_pre_hook(self.guard.hook(self._before_step)),
            self.optimizer.register_step_post_hook(self.guard.hook(self._after_step)),
        ]
        atexit.register(self._left)
        if self.options.probe is not None:
            self._event("note", message=PROBED)
        self._start_sample()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def _left(self) -> None:
        """At the interpreter's exit; what ended a script is still known there."""
        self.close(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks away, write what is left, and say what it cost. error: what ended the training, if anything did."""
        self.guard.outermost(self._close, error)

    def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        again, self._life = self._life is not None, self._life or ending(error)
        self.guard.over = True
        self.guard.run("end of hooks", self._detach)
        self.guard.run("last row", self._emit)
        if not again:
            self.guard.run("summary", self._say_closed, self._life)
        if self.writer is not None:
            self.guard.run("end of the run", self.writer.close, self._life)
        self.closed = True  # only now: whoever interrupts it may close it again
        atexit.unregister(self._left)
        if self.writer is not None and not self.options.quiet and self.processes.rank == 0:
            self.guard.run("summary", lambda: print(self._report(), file=sys.stderr))

    def _say_closed(self, life: Life) -> None:
        self._event("closed", step=self.step_number, state=life.state, error=life.error, **self._summary())

    def _stop(self) -> None:
        """End the recording before the training's end."""
        self.guard.over = True
        self.guard.run("end of hooks", self._detach)
        self.guard.run("other processes", self._leave)

    def _detach(self) -> None:
        self._sampling = False
        while self._handles:
            self._handles.pop().remove()
        self.guard.run("end of the forward hooks", self.forward.stop)
        self.guard.run("end of the gradient hooks", self.gradients.stop)

    def summary(self) -> dict[str, Any]:
        """Steps, samples and cost so far."""
        return self.guard.outermost(self._summary) or {}

    def _summary(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "sampled_steps": self.sampled_steps,
            "overhead": self.budget.overhead,
            "setup_seconds": self.budget.setup,
            "probe_seconds": self.options.probe.cost if self.options.probe is not None else 0.0,
        }

    def _report(self) -> str:
        found = self.summary()
        allowed = f"every {self.budget.every} steps" if self.budget.every else f"budget {100 * self.budget.share:g} %"
        return (
            f"normscope: {found['sampled_steps']} of {found['steps']} steps sampled; overhead {100 * found['overhead']:.2f} % "
            f"({allowed}), set-up {found['setup_seconds']:.1f} s; findings: {len(self.findings)}; {self.run}"
            + (f"; not all of it is recorded: {self.writer.failure}" if self.writer is not None and self.writer.failed else "")
        )

    def _say_resumed(self, before: Earlier) -> None:
        earlier = f"{before.rows:,} rows of an earlier recording ({before.life})"
        said = f"{self.run} holds {earlier}: this one goes on after step {self.step_number:,}"
        for message in filter(None, [said, before.problem]):
            self._event("note", message=message)
        if not self.options.quiet and self.processes.rank == 0:
            with suppress(OSError, ValueError):  # a broken stderr is no reason not to train
                print(f"normscope: {said}; choose another run= to begin a new one", file=sys.stderr)

    # the loop ----------------------------------------------------------------------------------------------------------

    def step(self, loss: Any = None, accuracy: Any = None) -> None:
        """Give the loss (and accuracy) of a step, always before or always after the optimizer's step; tensors are read late."""
        self.guard.outermost(self._give, loss, accuracy)

    def _give(self, loss: Any, accuracy: Any) -> None:
        if self._given_after is None:
            self._given_after = self.steps > 0
        if self._given_after and self._pending is None:
            return
        given = {name: value for name, value in (("loss", loss), ("accuracy", accuracy)) if value is not None}
        given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        if not self._given_after:
            self._given = given
        elif self._pending is not None and self._pending["step"] == self.step_number:
            with self.budget.charged():
                self.guard.run("loss", self._complete, given)
                self.guard.run("rows", self._emit)

    def _complete(self, given: Mapping[str, Any]) -> None:
        assert self._pending is not None
        self._pending |= {**{name: float(value) for name, value in given.items()}, "loss_given": "loss" in given}

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._sampling:
            with self.budget.charged():
                self._transfer = Transfer()
                self.guard.run("rows", self._look_before)

    def _look_before(self) -> None:
        self._ensure_table()
        self._notice_replaced()
        scaler = self.options.scaler or active_scaler()
        if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
            self._transfer.add("loss_scale", scaler._scale)
        self._view.before(self._transfer)
        self._shards = self.guard.run("spectral norms of shards", self._spectra.shards) if self._spectra is not None else None

    def _notice_replaced(self) -> None:
        """Parameters that others were put in place of are recorded no more. Shards are left: FSDP exchanges them by itself."""
        now = dict(self.model.named_parameters())
        gone = [name for name, p in self.parameters.items() if now.get(name) is not p and placement(p) is None]
        if gone:
            assert self.table is not None
            for name in gone:
                del self.parameters[name]
            self.gradients.forget(gone)
            self._view = StepView(self.parameters, self.optimizer, self.table.layers, self._look)
            message = f"others were put in their place, so they are no longer recorded: {listed(gone)}"
            self._event("note", step=self.step_number, message=message)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.step_number += 1
        if self._sampling or self._pending is not None:
            with self.budget.charged():
                self.guard.run("rows", self._end_sample)
        self._given = {}
        probe = self.options.probe
        if probe is not None and self.step_number % probe.every == 0:
            self.guard.run("probe", self._run_probe, probe)
        start = self.budget.clock()
        self._begin_step()
        self.budget.charge(self.budget.clock() - start)

    def _end_sample(self) -> None:
        self._emit()  # of an earlier step that was given no loss
        if self._sampling:
            self._sampling = False
            self.forward.stop()
            self.gradients.stop()
            self._finish_row()
            self.budget.end_setup() if self.sampled_steps == 1 else self.budget.end_sample()

    def _begin_step(self) -> None:
        gone = self.writer is not None and not self.writer.failed and not self.writer._thread.is_alive()
        if gone:
            self._recording_failed(RuntimeError("the thread that writes has ended"))
        if gone or self.writer is None or self.writer.failed or "rows" in self.guard.off:
            self._stop()
        elif self.guard.run("schedule", self.schedule.sampled, self.step_number + 1):
            self._start_sample()

    def _leave(self) -> None:
        """Tell the other processes that no sample will come from here."""
        self.processes.leave()
        self.schedule.end()

    def _run_probe(self, probe: Probe) -> None:
        with torch._C._EnableTorchFunction():
            self._probed = probe.measure(self.model, float(self.optimizer.param_groups[0]["lr"]))
        self._event("probe", step=self.step_number, **self._probed)

    def _start_sample(self) -> None:
        if any(is_lazy(parameter) for parameter in self.parameters.values()):
            return  # shapes are not known before the first forward pass
        self._sampling = True
        if not self.compiled:
            self.forward.start(self.guard.hook, spans=self.table is None)
        self.gradients.start(self.guard.hook)

    def _backward_began(self) -> None:
        if self.table is None:
            with self.budget.charged(once=True):
                self.guard.run("pairs of weights and normalizers", self._judge)

    def _judge(self) -> None:
        """Inside of a backward pass of the first sample, while its graph is there to be read."""
        roots, seen = roots_of_this_pass(), self.forward.seen
        if roots is not None:
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            names |= {key: name for key, (name, _) in seen.parameters.items()}
            self._verdicts.append(judge(roots, names, weight_names(self.model), seen.spans))

    def _ensure_table(self) -> None:
        """Once, when the first batch has been seen."""
        if self.table is None and self.writer is not None:
            with self.budget.charged(once=True):
                self._prepare(self.writer)

    def _prepare(self, writer: Writer) -> None:
        seen, report = self.forward.seen, self.options.symmetries
        verdicts = Verdicts.together(self._verdicts, self.gradients.passes) if self._verdicts else None
        table = make_table(self.model, self.parameters, self.optimizer, seen, verdicts, report, self.options.layers)
        seen.spans, seen.parameters = Spans(), {}
        if self._recorded_layers and self._recorded_layers != table.names:
            raise InputError(f"{self.run} has other layers than this model: choose another run=")
        self._spectra, note = sharded_spectra(table.layers, self.parameters, self.processes)
        self._view = StepView(self.parameters, self.optimizer, table.layers, self._look)
        self._completion = Completion(table, self.guard, self._event, self._spectra, self.options.on_row)
        self.forward.handwritten = table.handwritten
        names = {layer.parameter for layer in table.layers}
        self.gradients.parameters = {name: p for name, p in self.parameters.items() if name in names}
        content = manifest(
            self.model, self.parameters, self.optimizer, self.budget, self.processes, table, self.options.probe is not None
        )
        writer.begin(content, schema(table.rows), self._completion, self._completion.show)
        self.table = table
        for message in filter(None, [*table.notes, note]):
            self._event("note", message=message)

    def _without_inputs(self, why: str) -> None:
        """From now on no forward hooks: each time they come or go, compiled code is compiled again."""
        self.compiled = True
        self._event("note", step=self.step_number, message=f"{why}: inputs of layers are not recorded, only weights and gradients")

    def _finish_row(self) -> None:
        assert self.table is not None
        if not self.compiled and not self.forward.seen.calls:
            self._without_inputs("no layer was called in a sampled step, as if the model ran compiled")
        self._view.after(self._transfer)
        for key, statistics in self.forward.inputs.items():
            self._transfer.add(key, statistics)
        if self.gradients.values is not None:
            self._transfer.add("gradients", self.gradients.values)
        for name, value in self._given.items():
            self._transfer.add(name, torch.as_tensor(value, dtype=torch.float64).reshape(()))
        row = assemble(self.table.layers, self._view, self._transfer.fetch(), self.gradients.names)
        overhead = self.budget.overhead if self.sampled_steps else 0.0  # the first sample is the set-up
        self.sampled_steps += 1
        row.update(step=self.step_number, time=time.time(), overhead=overhead, shards=self._shards, **self._probed)
        self._pending, self._probed = row, {}
        if row["loss_given"]:
            self._emit()

    def _emit(self) -> None:
        """Hand the pending row to the writer."""
        if self._pending is not None and self.writer is not None:
            self.writer.row(self._pending)
            self._pending = None

    # failures and notes ------------------------------------------------------------------------------------------------

    def _look(self, what: str, function: Callable[..., None], *args: Any) -> None:
        with self.budget.charged():
            self.guard.run(what, function, *args)

    def _event(self, kind: str, **content: Any) -> None:
        if self.writer is not None:
            self.writer.event(kind, **content)

    def _recording_failed(self, error: BaseException) -> None:
        warn(f"normscope.watch records no more, training goes on: {error}")


def _check_symmetries(report: SymmetryReport | None, parameters: Mapping[str, torch.Tensor]) -> None:
    if report is not None and not isinstance(report, SymmetryReport):
        raise InputError(f"symmetries is what ns.symmetries(model, example) returns, not {type(report).__name__}")
    if report is not None and set(report.sizes) != set(parameters):
        raise InputError(f"symmetries is a report of another model ({report.model}): make it of the model that is trained")
