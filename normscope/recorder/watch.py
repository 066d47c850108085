"""`ns.watch`: one line in a training loop, and what normalization does is on record."""

from __future__ import annotations

import atexit
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from normscope.core.data import Call, Example
from normscope.core.errors import InputError
from normscope.recorder.budget import Budget
from normscope.recorder.columns import schema
from normscope.recorder.distributed import Processes, ShardedSpectra, placement
from normscope.recorder.findings import EarlyWarning, Watchman
from normscope.recorder.forward import ForwardView, is_compiled
from normscope.recorder.gradients import GradientView, active_scaler
from normscope.recorder.guard import Guard
from normscope.recorder.layers import Layer, layer_table, pair
from normscope.recorder.motion import effective_power
from normscope.recorder.probes import Probe
from normscope.recorder.reading import Part
from normscope.recorder.rows import assemble, products
from normscope.recorder.stepping import StepView, has_spectral_norm
from normscope.recorder.store import Writer
from normscope.recorder.transfer import Transfer
from normscope.version import __version__

SCHEMA = "normscope.run/1"

OnRow = Callable[[Mapping[str, Any], list[str]], None]


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: str | Path,
    budget: float = 0.01,
    *,
    every: int | None = None,
    layers: str | None = None,
    example: Example | None = None,
    graph: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    probe: Probe | None = None,
    on_row: OnRow | None = None,
    start_step: int | None = None,
    quiet: bool = False,
) -> Watch:
    """Record how weights, activations, gradients and normalizers develop while `optimizer` trains `model`.

        with ns.watch(model, optimizer, run="runs/name") as w:
            for x, y in batches:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                w.step(loss=loss)  # optional: the optimizer's hooks drive it

    Training is bit-identical with and without it. It never raises into the loop: a part of it that fails is switched off
    and noted in events.jsonl. budget: the share of wall time it may take; every: a fixed cadence instead. layers: a regular
    expression for the names to record. example: a batch to trace, the first one that the model sees by default;
    graph=False pairs weights with normalizers by the order of calls instead. scaler: found by itself where it calls the
    optimizer. probe: a batch for slow measurements. on_row: called with every row and the layers' names, on a thread of its
    own. start_step: steps done before, by default the last one on record in `run`.
    """
    return Watch(
        model, optimizer, Path(run), Budget(budget, every), layers, example, graph, scaler, probe, on_row, start_step, quiet
    )


class Watch:
    """A recording in progress: a context manager; `close` ends it, `findings` holds its early warnings."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: Path,
        budget: Budget,
        layers: str | None,
        example: Example | None,
        graph: bool,
        scaler: torch.amp.GradScaler | None,
        probe: Probe | None,
        on_row: OnRow | None,
        start_step: int | None,
        quiet: bool,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"a model is a torch.nn.Module, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"an optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.model, self.compiled = unwrapped(model)
        self.parameters = dict(self.model.named_parameters())  # now: FSDP puts others in their place during a pass
        self.optimizer, self.run, self.budget = optimizer, run, budget
        self.wanted, self.use_graph, self.scaler, self.probe, self.on_row = layers, graph, scaler, probe, on_row
        self.example = None if example is None else Call.of(example)
        self.quiet = quiet
        self.findings: list[EarlyWarning] = []
        self.layers: list[Layer] = []
        self.sampled_steps = self.steps = 0
        self.closed = False
        self._sampling = False
        self._view: StepView | None = None
        self._spectra: ShardedSpectra | None = None
        self._shards: dict[int, torch.Tensor] | None = None
        self._pending: dict[str, Any] | None = None
        self._given: dict[str, Any] = {}
        self._probed: dict[str, float] = {}
        self._given_after: bool | None = None
        self.processes = Processes.here(self.model, run)
        self.guard = Guard(self._event)
        self.writer: Writer | None = None
        self.writer = self._open_writer()
        self._handles: list[Any] = []
        self.forward = ForwardView(self.model, lambda f, *a: self._look("input statistics", f, *a), self._forward_ended)
        self.gradients = GradientView(self.parameters, lambda f, *a: self._look("gradients", f, *a))
        if self.writer is not None:
            self._begin(start_step)

    # life --------------------------------------------------------------------------------------------------------------

    def _open_writer(self) -> Writer | None:
        try:
            return Writer(self.processes.directory, self._recording_failed, self._on_row)
        except OSError as error:
            self._recording_failed(error)
            return None

    def _begin(self, start_step: int | None) -> None:
        assert self.writer is not None
        before = Part(self.writer.directory)
        known = before.manifest.get("outline")
        if known is not None and known != outline(self.model):
            self.writer.close()
            raise InputError(f"{self.run} is a run of another model: choose another run=, or delete it")
        recorded = before.table(["step"])
        last = int(recorded["step"][-1].as_py()) if recorded is not None and len(recorded) else 0
        self.step_number = self.first_step = self.processes.agree(last if start_step is None else start_step)
        self.schedule = self.processes.schedule(self.budget)
        self._event("started", step=self.step_number, process=self.processes.rank)
        if self.compiled:
            self._without_inputs("the model is compiled")
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        atexit.register(self.close)
        self._start_sample()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks away, write what is left, and say what it cost."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        self._detach()
        if self.writer is None:
            return
        self.guard.run("last row", self._emit)
        summary = self.summary()
        self._event("closed", step=self.steps and self.step_number, **summary)
        self.writer.close()
        if not self.quiet and self.processes.rank == 0:
            print(self._report(), file=sys.stderr)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forward.stop()
        self.gradients.stop()
        self._sampling = False

    def summary(self) -> dict[str, Any]:
        """Steps, samples and cost so far."""
        writing = self.writer.cost if self.writer is not None else 0.0
        spent = self.budget.spent + writing
        return {
            "steps": self.steps,
            "sampled_steps": self.sampled_steps,
            "overhead": spent / self.budget.elapsed if self.steps > 1 else 0.0,
            "setup_seconds": self.budget.setup,
            "probe_seconds": self.probe.cost if self.probe is not None else 0.0,
        }

    def _report(self) -> str:
        found = self.summary()
        allowed = f"every {self.budget.every} steps" if self.budget.every else f"budget {100 * self.budget.share:g} %"
        return (
            f"normscope: {found['sampled_steps']} of {found['steps']} steps sampled; overhead {100 * found['overhead']:.2f} % "
            f"({allowed}), set-up {found['setup_seconds']:.1f} s; {len(self.findings)} findings; {self.run}"
        )

    # the loop ----------------------------------------------------------------------------------------------------------

    def step(self, loss: Any = None, accuracy: Any = None) -> None:
        """Give the loss (and accuracy) of a step, always before or always after the optimizer's step; tensors are read late."""
        if self._given_after is None:
            self._given_after = self.steps > 0
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
                with self.budget.charged(once=True):
                    self.guard.run("layer table", self._ensure_table)
                self._transfer = Transfer()
                scaler = self.scaler or self.guard.run("loss scale", active_scaler)
                if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
                    self._transfer.add("loss_scale", scaler._scale)
                if self._view is not None:
                    self._view.before(self._transfer)
                if self._spectra is not None:
                    self._shards = self.guard.run("spectral norms of shards", self._spectra.shards)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self.budget.charged():
            self.guard.run("steps", self._end_step)
        if self.probe is not None and self.step_number % self.probe.every == 0:
            self.guard.run("probe", self._run_probe, self.probe)
        with self.budget.charged():
            self.guard.run("steps", self._begin_step)

    def _end_step(self) -> None:
        self.steps += 1
        self.step_number += 1
        self.guard.run("rows", self._emit)
        if self._sampling:
            first = self.sampled_steps == 0
            self._sampling = False
            self.forward.stop()
            self.gradients.stop()
            self.guard.run("rows", self._finish_sample)
            self.budget.end_setup() if first else self.budget.end_sample()
        self._given = {}

    def _begin_step(self) -> None:
        if self.writer is None or self.writer.failed or "rows" in self.guard.off:
            self._detach()
        elif self.schedule.sampled(self.step_number + 1):
            self._start_sample()

    def _run_probe(self, probe: Probe) -> None:
        self._probed = probe.measure(self.model, float(self.optimizer.param_groups[0]["lr"]))
        self._event("probe", step=self.step_number, **self._probed)

    def _start_sample(self) -> None:
        self._sampling = True
        if not self.compiled:
            self.forward.start()
        self.gradients.start()

    def _forward_ended(self) -> None:
        with self.budget.charged(once=True):
            self.guard.run("layer table", self._ensure_table)

    def _ensure_table(self) -> None:
        """Once, when the first batch has been seen: which layers there are, in which order, and what follows what."""
        if self._view is not None or self.writer is None:
            return
        seen = self.forward.seen
        if self.example is not None:
            seen.example = self.example
        if seen.example is None:  # without a call of the whole model, calls of several passes cannot be told apart
            seen.calls = [(path, call) for path, call in seen.calls if call == 1]
        pairing = pair(self.model, seen, self.use_graph)
        power = effective_power(self.optimizer)
        table = [
            replace(layer, effective_power=power, **sharding(self.parameters, layer))
            for layer in layer_table(self.model, seen, pairing)
            if self.wanted is None or re.search(self.wanted, layer.name)
        ]
        self.layers, self.forward.handwritten = table, pairing.handwritten
        rows = [layer.to_dict() for layer in table]
        self._check_same_layers(rows)
        self.watchman = Watchman(rows)
        self._view = StepView(self.parameters, self.optimizer, table, self._look)
        self._spectra = self._sharded_spectra(table)
        recorded = {layer.parameter for layer in table}
        self.gradients.parameters = {name: p for name, p in self.parameters.items() if name in recorded}
        self.writer.begin(self._manifest(rows), schema(rows))
        for message in filter(None, [pairing.note, _unknown(self.optimizer) if power is None else ""]):
            self._event("note", message=message)

    def _sharded_spectra(self, table: list[Layer]) -> ShardedSpectra | None:
        sharded = {i: self.parameters[layer.parameter] for i, layer in enumerate(table) if layer.sharded and layer.parameter}
        chosen = {i: p for i, p in sharded.items() if has_spectral_norm(table[i]) and (cut := placement(p)) and cut.by_rows}
        if any(has_spectral_norm(table[i]) and i not in chosen for i in sharded):
            self._event("note", message="weights cut otherwise than by rows: their spectral norms are not recorded")
        return ShardedSpectra(chosen, self.processes) if chosen else None

    def _check_same_layers(self, rows: list[dict[str, Any]]) -> None:
        assert self.writer is not None
        recorded = [layer["name"] for layer in Part(self.writer.directory).manifest["layers"]]
        if recorded and recorded != [row["name"] for row in rows]:
            self._recording_failed(InputError(f"{self.run} has other layers than this model: choose another run="))
            self.writer.failed = True

    def _manifest(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "created": time.time(),
            "model": type(self.model).__name__,
            "outline": outline(self.model),
            "optimizer": {
                "kind": type(self.optimizer).__name__,
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            },
            "config": {"budget": self.budget.share, "every": self.budget.every, "layers": self.wanted, "graph": self.use_graph},
            "process": {"rank": self.processes.rank, "world_size": self.processes.size},
            "versions": {"normscope": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "layers": layers,
        }

    def _without_inputs(self, why: str) -> None:
        """From now on no forward hooks: each time they come or go, compiled code is compiled again."""
        self.compiled = True
        self._event("note", step=self.step_number, message=f"{why}: inputs of layers are not recorded, only weights and gradients")

    def _finish_sample(self) -> None:
        if self._view is None:
            raise InputError("the layer table could not be made")
        if not self.compiled and not self.forward.seen.calls:
            self._without_inputs("no layer was called in a sampled step, as if the model ran compiled")
        self._view.after(self._transfer)
        for key, statistics in self.forward.inputs.items():
            self._transfer.add(key, statistics)
        if self.gradients.values is not None:
            self._transfer.add("gradients", self.gradients.values)
        for name, value in self._given.items():
            self._transfer.add(name, torch.as_tensor(value, dtype=torch.float64).reshape(()))
        row = assemble(self.layers, self._view, self._transfer.fetch(), self.gradients.names)
        self.sampled_steps += 1
        row.update(step=self.step_number, time=time.time(), overhead=self.summary()["overhead"], **self._probed)
        self._pending, self._probed = row, {}
        if self._spectra is not None:
            row["shards"] = self._shards
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

    def _recording_failed(self, error: Exception) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"normscope.watch records no more, training goes on: {error}", stacklevel=2)

    def _on_row(self, row: dict[str, Any]) -> None:
        """On the writer's thread: what needs other processes, trends, findings and the user's own function."""
        if self._spectra is not None and (shards := row.pop("shards", None)) is not None:
            for index, found in (self.guard.run("spectral norms of shards", self._spectra.norms, shards, row["step"]) or {}).items():
                row["spectral_norm"][index], row["spectral_residual"][index] = found
            row.update(products(row, self.layers))
        row.update(self.guard.run("trends", self.watchman.trends, row) or {})
        for warning in self.guard.run("findings", self.watchman.look, row) or []:
            self.findings.append(warning)
            self._event("finding", **warning.to_dict())
        if self.on_row is not None:
            self.guard.run("on_row", self.on_row, row, [layer.name for layer in self.layers])


def unwrapped(model: nn.Module) -> tuple[nn.Module, bool]:
    """The model inside DDP, DataParallel or torch.compile, and whether any of it is compiled."""
    compiled = any(is_compiled(module) for module in model.modules())
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model, compiled


def outline(model: nn.Module) -> list[list[Any]]:
    """Names and shapes of all parameters: what makes two models the same for a run."""
    return [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]


def sharding(parameters: Mapping[str, torch.Tensor], layer: Layer) -> dict[str, Any]:
    """The fields of a layer that say how its weight is cut."""
    cut = placement(parameters[layer.parameter]) if layer.parameter else None
    return {"sharded": cut is not None, "replicas": cut.replicas if cut is not None else 1}


def _unknown(optimizer: torch.optim.Optimizer) -> str:
    return f"no formula for the effective learning rate of {type(optimizer).__name__}: effective_lr is not recorded"
