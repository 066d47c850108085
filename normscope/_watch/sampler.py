"""What is looked at in a sampled step: the first forward pass, the gradients, and the weights around the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normscope._watch.backward import Routes, Spans, roots_of_this_pass, routes
from normscope._watch.budget import Budget
from normscope._watch.distributed import ShardedSpectra, TrainingProcesses, placement
from normscope._watch.forward import ForwardView
from normscope._watch.gradients import GradientView
from normscope._watch.guard import Guard
from normscope._watch.layers import parameter_at, weight_names
from normscope._watch.pairing import listed
from normscope._watch.preparation import LayerTable, make_table, sharded_spectra
from normscope._watch.replicas import Replicas
from normscope._watch.rows import assemble
from normscope._watch.scaling import active_scaler, scale_left_to
from normscope._watch.stepping import StepView
from normscope._watch.transfer import Transfer
from normscope._watch.unrecorded import aside
from normscope._watch.weights import local
from normscope.symmetry.report import SymmetryReport

Parameters = dict[str, torch.Tensor]


class Sampler:
    """Begins with `start` before a step; `before` and `row` are called around the optimizer's. Hooks exist only in between.

    active: whether the step that is under way is sampled. table: the layers, once `settle` has said which. note: writes an event.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        processes: TrainingProcesses,
        guard: Guard,
        budget: Budget,
        note: Callable[[str], None],
    ) -> None:
        self.model, self.parameters, self.optimizer, self.processes = model, parameters, optimizer, processes
        self.guard, self.budget, self.note = guard, budget, note
        self.active = self.compiled = False
        self.table: LayerTable | None = None
        self.spectra: ShardedSpectra | None = None
        self.forward = ForwardView(model, self.look)
        self.gradients = GradientView(parameters, lambda f, *a: self.look("gradients", f, *a), self._backward_began)
        self._routes: list[Routes] = []  # one for each backward pass of the first sample
        self._shards: dict[int, Any] | None = None
        self.held: dict[int, torch.Tensor] = {}  # id → copy of a parameter as it was before the step
        self._findable = [name for name in parameters if parameter_at(model, name) is not None]  # FSDP1 renames some

    def look(self, what: str, function: Callable[..., None], *args: Any) -> None:
        self.budget.measure(self.guard.run, what, function, *args)

    def hook(self, function: Callable[..., None]) -> Callable[..., None]:
        """As torch may call it: what it takes is counted whole."""
        return self.guard.hook(partial(self.budget.measure, function))

    def start(self) -> None:
        if any(is_lazy(parameter) for parameter in self.parameters.values()):
            return  # shapes are not known before the first forward pass
        self.active = True
        if not self.compiled:
            self.forward.start(self.hook, spans=self.table is None)
        self.gradients.start(self.hook)

    def stop(self) -> None:
        """Take the hooks away."""
        self.active = False
        self.guard.insist("end of the forward hooks", self.forward.stop)
        self.guard.insist("end of the hooks on blocks", self.forward.blocks.stop)
        self.guard.insist("end of the gradient hooks", self.gradients.stop)

    @property
    def passes(self) -> int:
        """Grows with every training pass before the first step; 0 where passes are not followed."""
        return self.forward.passes if self.active and not self.compiled else 0

    def without_inputs(self, why: str) -> None:
        """From now on no forward hooks: each time they come or go, compiled code is compiled again."""
        self.compiled = True
        self.note(f"{why}: inputs of layers, blocks and attention are not recorded, only weights, gradients and steps")

    # the layers, once ---------------------------------------------------------------------------------------------------

    def _backward_began(self) -> None:
        if self.table is None:
            with self.budget.charged(once=True):
                self.guard.run("pairs of weights and normalizers", self._follow)

    def _follow(self) -> None:
        """Inside of a backward pass of the first sample, while its graph is there to be read."""
        roots, seen = roots_of_this_pass(), self.forward.seen
        if roots is not None:
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            names |= {key: name for key, (name, _) in seen.parameters.items()}
            self._routes.append(routes(roots, names, weight_names(self.model), seen.spans))

    def layers(self, report: SymmetryReport | None, wanted: str | None) -> LayerTable:
        """As the first sample met them. report, wanted: as in `watch`."""
        seen = self.forward.seen
        seen.blocks, seen.attentions = set(self.forward.blocks.measured), set(self.forward.attentions)
        read = Routes.together(self._routes, self.gradients.passes) if self._routes else None
        table = make_table(self.model, self.parameters, self.optimizer, seen, read, report, wanted)
        seen.spans, seen.parameters = Spans(), {}
        return table

    @aside
    def settle(self, table: LayerTable) -> str:
        """From now on these layers are looked at; what of them cannot be is returned in words."""
        self.spectra, note = sharded_spectra(table.layers, self.parameters, self.processes)
        self.view = StepView(self.parameters, self.optimizer, table.layers, self.look)
        self.replicas = Replicas(self.model, self.parameters, self.processes)
        self.forward.handwritten = table.handwritten
        self.forward.attending = any(layer.role == "attention" for layer in table.layers)
        self.forward.blocks.paths = frozenset(layer.module for layer in table.layers if layer.role == "block")
        names = {layer.parameter for layer in table.layers}
        self.gradients.parameters = {name: p for name, p in self.parameters.items() if name in names}
        self.table = table
        return note

    # around the optimizer's step ----------------------------------------------------------------------------------------

    @aside
    def hold(self) -> None:
        """Before a step whose closure makes the first pass: the layers are not known yet, and afterwards the weights have moved."""
        self.held = {id(parameter): local(parameter).clone() for parameter in self.parameters.values()}

    @aside
    def before(self, scaler: torch.amp.GradScaler | None) -> None:
        """The weights as they are now, or as they were when `hold` was called."""
        held, self.held = self.held, {}
        self._transfer = Transfer()
        self._notice_replaced()
        scaler = scaler or active_scaler()
        if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
            self._transfer.add("loss_scale", scaler._scale)
        self.view.before(self._transfer, held)
        if self.replicas.tensors:
            self.look("hashes of replicas", lambda: self._transfer.add("hashes", self.replicas.hashes()))
        spectra = None if held else self.spectra  # shards have no copies
        self._shards = self.guard.run("spectral norms of shards", spectra.shards) if spectra is not None else None

    @aside
    def now(self) -> None:
        """Of a step that was not to be sampled all but the inputs of its layers, which have passed."""
        if not self.active and self.spectra is None:  # shards are measured by all processes together, or not at all
            self._transfer, self._shards = Transfer(), None
            self.forward.forget()
            self.gradients.read_now()
            if (scale := scale_left_to(self.optimizer)) is not None:
                self._transfer.add("loss_scale", torch.as_tensor(scale))
            self.view.before(self._transfer)
            self.active = True

    @aside
    def row(self, given: Mapping[str, Any], gradients: torch.Tensor | None) -> dict[str, Any]:
        """Everything that was seen. given: loss and accuracy. gradients: norms as the optimizer got them, if they were read."""
        assert self.table is not None
        self.stop()
        if not self.compiled and not self.forward.seen.calls:
            self.without_inputs("no layer was called in a sampled step, as if the model ran compiled")
        self.view.after(self._transfer)
        for key, measured in self.forward.measured():
            self._transfer.add(key, measured)
        if self.gradients.values is not None:
            self._transfer.add("gradients", self.gradients.values)
        if gradients is not None:
            self._transfer.add("total_gradient_norm", torch.linalg.vector_norm(gradients))
        for name, value in given.items():
            self.look(name, self._add_number, name, value)
        row = assemble(self.table.layers, self.view, self._transfer.fetch(), self.gradients.names)
        return row | {"shards": self._shards}

    def _add_number(self, name: str, value: Any) -> None:
        self._transfer.add(name, torch.as_tensor(value, dtype=torch.float64).reshape(()))

    def _notice_replaced(self) -> None:
        """Parameters that others were put in place of are recorded no more. Shards are left: FSDP exchanges them by itself."""
        known = ((name, self.parameters[name]) for name in self._findable if name in self.parameters)
        gone = [name for name, p in known if parameter_at(self.model, name) is not p and placement(p) is None]
        if gone:
            assert self.table is not None
            for name in gone:
                del self.parameters[name]
            self.gradients.forget(gone)
            self.view = StepView(self.parameters, self.optimizer, self.table.layers, self.look)
            self.note(f"parameters that were replaced during training and are no longer recorded: {listed(gone)}")
