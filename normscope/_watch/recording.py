"""A recording in progress: how it begins and ends, and what happens around every step of the loop."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from normscope._watch.account import account, in_words
from normscope._watch.beginning import earlier, first_notes, numbered, say_resumed
from normscope._watch.budget import Budget
from normscope._watch.columns import schema
from normscope._watch.completion import Completion
from normscope._watch.distributed import TrainingProcesses
from normscope._watch.every_step import EveryStep
from normscope._watch.forward import is_compiled
from normscope._watch.guard import Guard, warn
from normscope._watch.layers import is_plain
from normscope._watch.life import Life, ending
from normscope._watch.losses import Losses, complete, detached
from normscope._watch.options import Options
from normscope._watch.preparation import LayerTable, manifest
from normscope._watch.probes import Probe
from normscope._watch.reaction import Action, Reaction, checked
from normscope._watch.sampler import Sampler
from normscope._watch.scaling import skips
from normscope._watch.sinks import Sinks
from normscope._watch.stepping import has_closure
from normscope._watch.store import Writer
from normscope._watch.unseen import UnseenSteps
from normscope.core.errors import InputError
from normscope.core.wrapping import stepping, unwrapped
from normscope.findings.finding import Finding
from normscope.symmetry.report import check_report


class Watch:
    """A recording in progress: a context manager; `close` ends it, `findings` holds its early warnings."""

    writer: Writer

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Path, budget: Budget, options: Options) -> None:
        """Raises what is wrong with the arguments; where anything else fails, nothing is recorded."""
        self.model, self.optimizer, self.run, self.budget, self.options = model, optimizer, run, budget, options
        self.steps = self.sampled_steps = self.step_number = 0
        self.closed = False
        self.actions: list[tuple[str, Action]] = []
        self._life: Life | None = None  # how it ended
        self.every: EveryStep | None = None
        self._pending: dict[str, Any] | None = None  # a row that waits for its loss
        self._written = 0  # the last step of which there is a row
        self._late = False  # whether the last step is to have one, once it has its loss
        self._probed: dict[str, float] = {}
        self._handles: list[Any] = []
        self.guard = Guard(self._event, self._stop)
        undo = ExitStack()
        try:
            self._make(undo)
            self._begin()
        except BaseException as error:
            self.closed, self.guard.process = True, None
            with suppress(Exception):
                undo.close()  # hooks, the lock and what else was taken: the next call may be right
            if isinstance(error, InputError) or not isinstance(error, Exception):
                raise
            self._recording_failed(error)

    def _make(self, undo: ExitStack) -> None:
        """All parts. undo: takes them away again."""
        options = self.options
        self.run = numbered(self.model) if options.numbered else self.run
        self.model, self._compiled = unwrapped(self.model), any(is_compiled(module) for module in self.model.modules())
        named = dict(self.model.named_parameters())  # now: FSDP puts others in their place during a pass
        self.parameters = {name: parameter for name, parameter in named.items() if is_plain(parameter)}
        self._foreign = sorted(named.keys() - self.parameters.keys())
        self.optimizer = stepping(self.optimizer)
        if options.symmetries is not None:
            check_report(options.symmetries, self.model)
        self.processes = TrainingProcesses.here(self.model, self.run)
        undo.callback(self.processes.leave)
        self.reaction, self.losses = Reaction(self.guard, self.actions), Losses(options.scaler)
        self.sinks = Sinks(self.guard)
        undo.callback(self.sinks.close)
        self.sinks.open(options.sinks, self.run)
        self.sampler = Sampler(self.model, self.parameters, self.optimizer, self.processes, self.guard, self.budget, self._note)
        self.unseen = UnseenSteps(self.parameters, self._say)
        self.writer = Writer(self.processes.directory, self._recording_failed, lambda: self.step_number)
        undo.callback(self.writer.close, None)
        undo.callback(self._detach)
        undo.callback(atexit.unregister, self._left)

    @property
    def findings(self) -> list[Finding]:
        """The early warnings so far, each with the steps at which it was seen first and last."""
        return self.guard.outermost(self._found_so_far) or []

    def _found_so_far(self) -> list[Finding]:
        if self.every is None:
            return []
        self.guard.run("losses", self.every.catch_up)
        found = [*self._completion.findings, *self.every.chronicle.findings]
        return sorted(found, key=lambda finding: finding.first_step or 0)

    def on(self, kind: str, action: Action) -> None:
        """Call a function of yours with each finding of a kind ("spike", "not-finite", "finding") when it begins, in the loop."""
        self.actions.append(checked(kind, action))

    # life --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        options, register = self.options, self._handles.append
        goes_on = options.resume or bool(options.start_step)
        before = earlier(self.run, self.processes, self.parameters, goes_on, options.overwrite)
        self._recorded_layers = before.layers
        self.step_number = self.processes.agree((before.life.step or 0) if options.start_step is None else options.start_step)
        self.budget.begun = self._written = self.step_number
        self.schedule = self.processes.schedule(self.budget)
        self.budget.elsewhere = lambda: self.writer.cost
        self._event("started", step=self.step_number, process=self.processes.rank)
        if before.rows:
            say_resumed(self.run, before, self.step_number, self._say, self._note)
        for message in first_notes(self.processes, self._foreign, options):
            self._event("note", message=message)
        if self._compiled:
            self.sampler.without_inputs("the model is compiled")
        register(self.optimizer.register_step_pre_hook(self.guard.hook(self._before_step)))
        register(self.optimizer.register_step_post_hook(self.guard.hook(self._after_step)))
        atexit.register(self._left)
        self.sampler.start()
        self.sinks.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(error)

    def _left(self) -> None:
        """At the interpreter's exit; what ended a script is still known there."""
        self.close(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    def close(self, error: BaseException | None = None) -> None:
        """Take all hooks away, write what is left, and say what it cost. error: what ended the training, if anything did."""
        for _ in range(2):
            self.guard.outermost(self._close, error)

    def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        again, self._life = self._life is not None, self._life or self.guard.run("how it ended", ending, error)
        self.guard.over = True
        self.guard.insist("end of hooks", self._detach)
        self.guard.run("last row", self._emit)
        self.guard.run("last steps", self._say_until)
        if self._life is not None and not again:
            told = {"step": self.step_number, "state": self._life.state, "error": self._life.error}
            self.guard.run("summary", lambda: self._event("closed", **told, **account(self)))
        self.guard.insist("end of the run", self.writer.close, self._life, self._end)
        self.guard.run("sinks", self.sinks.close)  # where nothing could be written
        self.closed = True  # only now: whoever interrupts it may close it again
        atexit.unregister(self._left)
        if not self.options.quiet and self.processes.rank == 0:
            self.guard.run("summary", lambda: print(in_words(self), file=sys.stderr))

    def _end(self) -> None:
        """On the writer's thread, when all rows are written: what sinks then fail at is still put on record."""
        if self.every is not None:
            self._completion.end()
        self.guard.run("sinks", self.sinks.close)

    def _say_until(self) -> None:
        """What the last steps showed, and until when findings of single steps held."""
        if self.every is not None:
            self.every.finish()
            self._write_kept(self.step_number + 1) if self.reaction.begun or self._late else None
            for finding in self.every.chronicle.untold():
                self._event("finding", **finding.to_dict())

    def _stop(self) -> None:
        """End the recording before the training's end."""
        self.guard.over = True
        self.guard.insist("end of hooks", self._detach)
        self.guard.run("other processes", self.processes.leave)
        self.guard.run("end of the schedule", self.schedule.end)

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.sampler.stop()

    @property
    def table(self) -> LayerTable | None:
        """The layers, once the first batch has been seen."""
        return self.guard.outermost(lambda: self.sampler.table)

    def summary(self) -> dict[str, Any]:
        """Steps, samples and cost so far."""
        return self.guard.run("summary", account, self) or {}

    # the loop ----------------------------------------------------------------------------------------------------------

    def step(self, loss: Any = None, accuracy: Any = None) -> None:
        """Give the loss (and accuracy) of a step, always before or always after the optimizer's step; tensors are read late."""
        self.guard.outermost(self._give, loss, accuracy)

    def _give(self, loss: Any, accuracy: Any) -> None:
        self.guard.run("unseen steps", self.unseen.called)
        given = detached(loss=loss, accuracy=accuracy)
        if self.losses.given(self.steps, self.step_number, self.sampler.passes, given):
            self._judge(given, self.step_number)
            if self._pending is not None and self._pending["step"] == self.step_number:
                with self.budget.charged():
                    for name, value in given.items():
                        self.guard.run(name, complete, self._pending, name, value)
                    self.guard.run("rows", self._emit)
        elif not (self.losses.after or self.losses.scaled):  # a scaler may skip the step
            self._judge(given, self.step_number + 1)
        if self.reaction.begun:
            self._react()

    def _judge(self, given: dict[str, Any], step: int) -> None:
        if self.every is not None and "loss" in given:
            self.guard.run("losses", self.every.loss, step, given["loss"])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if skips(self.optimizer):  # as a GradScaler skips it for others: then there is no step
            return
        closed = has_closure(args, kwargs)
        self.sampler.held = {}  # of a step whose closure raised
        if self.sampler.active:
            with self.budget.charged():
                self.guard.run("rows", self.sampler.hold if closed and self.sampler.table is None else self._look_before)
        if not closed:  # else the step's passes are still to come
            self._read_step()
            if self.reaction.begun:
                with self.budget.charged(once=True):
                    self.guard.run("samples of what happened", self._sample_now)
                self._react()

    def _read_step(self) -> None:
        """The loss of the step to come, and the gradients that it is made with."""
        if not self.steps:
            self.guard.run("losses", self.losses.settle, self.sampler.passes, self.options.scaler)
        if self.losses.scaled or not self.steps:  # others were judged when they came
            self._judge(self.losses.coming, self.step_number + 1)
        if self.every is not None and (self.sampler.active or self.every.affordable()):
            self.guard.run("gradient norms", self.every.gradients, self.step_number + 1, self.parameters, self.optimizer)

    def _read_closed(self) -> None:
        """After the optimizer has called the closure: its passes have been made, and the weights have moved."""
        if self.sampler.active and self.sampler.table is None:
            with self.budget.charged():
                self.guard.run("rows", self._look_before)
        self._read_step()
        if self.reaction.begun:
            self._emit()
            self._late = not self.sampler.active
            self._react()

    def _sample_now(self) -> None:
        """A step that was not to be sampled."""
        self._emit()
        self.sampler.now()

    def _react(self) -> None:
        """Something began: keep the steps before it, sample the next ones, and call the user's own actions."""
        self._write_kept(self.step_number + 1)
        self.reaction.run()

    def _write_kept(self, before: int) -> None:
        """The last steps that were not sampled, as rows."""
        if self.every is not None and self._pending is None:
            for row in self.every.kept(self._written, before):
                self.writer.row({**row, "samples": self.sampled_steps})
                self._written = row["step"]

    def _found(self, finding: Finding) -> None:
        self._event("finding", **finding.to_dict())
        self.sinks.finding(finding)
        self.reaction.note(finding)

    def _look_before(self) -> None:
        if self.sampler.table is None:  # once, when the first batch has been seen
            with self.budget.charged(once=True):
                self._prepare()
        self.sampler.before(self.options.scaler)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if skips(self.optimizer):
            return
        if has_closure(args, kwargs):
            self._read_closed()
        self.unseen.seen()
        self.steps += 1
        self.step_number += 1
        if self.sampler.active or self._pending is not None:
            with self.budget.charged():
                self.guard.run("rows", self._end_sample)
        self.losses.coming = {}
        probe = self.options.probe
        if probe is not None and self.step_number % probe.every == 0:
            self.guard.run("probe", self._run_probe, probe)
        if self.reaction.begun:  # found by the writer
            self.reaction.run()
        start = self.budget.clock()
        self._begin_step()
        self.budget.charge(self.budget.clock() - start)

    def _end_sample(self) -> None:
        self._emit()  # of an earlier step that was given no loss
        if self._late:
            self._write_kept(self.step_number)
            self._late = False
        if self.sampler.active:
            self._finish_row()
            self.budget.end_setup() if self.sampled_steps == 1 else self.budget.end_sample()
        if self.budget.dense_now and self.step_number - self.budget.begun >= self.budget.dense:
            self.budget.end_dense()

    def _begin_step(self) -> None:
        if self.writer.over() or "rows" in self.guard.off:
            self._stop()
        elif self.guard.run("schedule", self.schedule.sampled, self.step_number + 1) or (
            self.reaction.samples > 0 and self.sampler.spectra is None
        ):
            self.reaction.samples = max(0, self.reaction.samples - 1)
            self.sampler.start()

    def _run_probe(self, probe: Probe) -> None:
        with torch._C._EnableTorchFunction():
            self._probed = probe.measure(self.model, float(self.optimizer.param_groups[0]["lr"]))
        self._event("probe", step=self.step_number, **self._probed)

    def _prepare(self) -> None:
        table = self.sampler.layers(self.options.symmetries, self.options.layers).as_recorded(self._recorded_layers, self.run)
        note = self.sampler.settle(table)
        every = EveryStep(table.layers, table.rows, self.budget, self._found, self.budget.begun)
        tell = partial(self._event, process=self.processes.rank)
        self._completion = Completion(
            table, self.guard, self._found, every.chronicle, tell, self.sampler.spectra, self.sampler.replicas, self.options.on_row
        )
        content = manifest(
            self.model, self.parameters, self.optimizer, self.budget, self.processes, table, self.options.probe is not None
        )
        self.writer.begin(content, schema(table.rows), self._completion, self._show)
        self.every = every
        for message in filter(None, [*table.notes, note]):
            self._event("note", message=message)

    def _show(self, row: Mapping[str, Any]) -> None:
        """On the writer's thread, a row that has been written."""
        self._completion.show(row)
        self.sinks.row(row, self._completion.table.names)

    def _finish_row(self) -> None:
        assert self.every is not None
        self.every.catch_up()
        row = self.sampler.row(self.losses.coming, self.every.norms_of(self.step_number))
        overhead = self.budget.overhead if self.sampled_steps else 0.0  # the first sample is the set-up
        self.sampled_steps += 1
        counts = self.every.counts | {"samples": self.sampled_steps}
        row.update(step=self.step_number, time=time.time(), overhead=overhead, **counts, **self._probed)
        self._pending, self._probed = row, {}
        if row["loss_given"]:
            self._emit()

    def _emit(self) -> None:
        """Hand the pending row to the writer."""
        if self._pending is not None:
            self._written = self._pending["step"]
            self.writer.row(self._pending)
            self._pending = None

    # failures and notes ------------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        """A note that is printed, too."""
        self._note(message)
        if not self.options.quiet and self.processes.rank == 0:
            with suppress(OSError, ValueError):  # a broken stderr is no reason not to train
                print(f"normscope: {message}", file=sys.stderr)

    def _note(self, message: str) -> None:
        self._event("note", step=self.step_number, message=message)

    def _event(self, kind: str, **content: Any) -> None:
        self.writer.event(kind, **content)

    def _recording_failed(self, error: BaseException) -> None:
        warn(f"normscope.watch stopped recording; training continues: {error}")
