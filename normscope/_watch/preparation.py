"""What is settled before the first row: which model, which layers in which order, and the manifest that says so."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normscope._watch.backward import Routes
from normscope._watch.budget import Budget
from normscope._watch.distributed import ShardedSpectra, TrainingProcesses, placement
from normscope._watch.following import FollowedPart
from normscope._watch.layers import FirstForward, Handwritten, WatchedLayer, layer_table
from normscope._watch.life import Life
from normscope._watch.motion import effective_power
from normscope._watch.pairing import listed, pair
from normscope._watch.stepping import has_spectral_norm
from normscope._watch.store import plain
from normscope.core.errors import InputError
from normscope.symmetry.report import SymmetryReport
from normscope.version import __version__

SCHEMA = "normscope.run/1"
FOREIGN = "the optimizer holds none of the model's parameters, as that of another model would: pass the one that trains it"


@dataclass(frozen=True)
class LayerTable:
    """The layers of a run, the normalizers among them that are written by hand, and what a reader must know."""

    layers: tuple[WatchedLayer, ...]
    handwritten: Mapping[str, Handwritten]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As a run has them: a name that no file can hold is escaped."""
        return [plain(layer.to_dict()) for layer in self.layers]

    @property
    def names(self) -> list[str]:
        return [plain(layer.name) for layer in self.layers]

    def as_recorded(self, names: Sequence[str], run: Path) -> LayerTable:
        """The table of a run that goes on: with the layers that it has on record, in their order, and no others."""
        if not names or list(names) == self.names:
            return self
        held = set(names)
        layers = tuple(layer for layer in self.layers if plain(layer.name) in held)
        left = [name for name in self.names if name not in held]
        if [plain(layer.name) for layer in layers] != list(names):
            gone = [name for name in names if name not in set(self.names)]
            why = f"it has {listed(gone)}, this recording has not" if gone else "their order is another"
            raise InputError(f"{run} has different layers than this recording ({why}): choose another run=, or pass overwrite=True")
        note = f"the run started without rows for {listed(left)} and continues without them; a new run= records them"
        return replace(self, layers=layers, notes=(*self.notes, note))


def outline(parameters: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Names and shapes of all parameters: what makes two models the same for a run."""
    return [[plain(name), list(parameter.shape)] for name, parameter in parameters.items()]


@dataclass(frozen=True)
class Earlier:
    """What a directory holds of an earlier recording, as far as it can be read. problem: what cannot, in words."""

    outline: list[list[Any]] | None
    layers: list[str]
    life: Life
    rows: int
    problem: str

    @staticmethod
    def of(part: FollowedPart) -> Earlier:
        problem, life = "", part.life()
        try:
            manifest = part.manifest
        except InputError as error:  # a power failure leaves empty files; the segments name their layers themselves
            manifest, problem = {}, f"{error}; it is written anew"
        layers = [layer["name"] for layer in manifest["layers"]] if manifest else part.named_layers()
        return Earlier(manifest.get("outline"), layers, life, part.count, problem)


def make_table(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    seen: FirstForward,
    routes: Routes | None = None,
    report: SymmetryReport | None = None,
    wanted: str | None = None,
) -> LayerTable:
    """The layers whose name matches `wanted`, as the first batch met them."""
    if not seen.whole:  # without a call of the whole model, calls of several passes cannot be told apart
        seen = replace(seen, calls=[(path, call) for path, call in seen.calls if call == 1])
    pairing = pair(model, seen, routes, report)
    power = effective_power(optimizer)
    chosen = [layer for layer in layer_table(model, seen, pairing) if wanted is None or re.search(wanted, layer.name)]
    layers = tuple(replace(layer, effective_power=power, **_sharding(parameters, layer)) for layer in chosen)
    unknown = f"no formula for the effective learning rate of {type(optimizer).__name__}: effective_lr is not recorded"
    notes = [*pairing.notes, "" if power else unknown, "" if held_by(optimizer, parameters) else FOREIGN]
    return LayerTable(layers, pairing.handwritten, tuple(filter(None, notes)))


def held_by(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer changes, in all of its groups as they are now."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) in held}


def given_to(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The parameters whose gradients an optimizer is given: those that it holds, or all where it holds others, such as copies."""
    own, held = held_by(optimizer, parameters), {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return own if len(own) == len(held) else parameters


def _sharding(parameters: Mapping[str, torch.Tensor], layer: WatchedLayer) -> dict[str, Any]:
    """The fields of a layer that say how its weight is cut."""
    cut = placement(parameters[layer.parameter]) if layer.parameter else None
    return {"sharded": cut is not None, "replicas": 1 if cut is None else cut.replicas}


def sharded_spectra(
    layers: Sequence[WatchedLayer], parameters: Mapping[str, torch.Tensor], processes: TrainingProcesses
) -> tuple[ShardedSpectra | None, str]:
    """What computes the spectral norms of sharded weights, if there are any, and a note on those that it cannot."""
    sharded = {
        index: parameters[layer.parameter]
        for index, layer in enumerate(layers)
        if layer.sharded and layer.parameter and has_spectral_norm(layer)
    }
    by_rows = {index: weight for index, weight in sharded.items() if (cut := placement(weight)) and cut.by_rows}
    note = "" if len(by_rows) == len(sharded) else "spectral norms of weights that are not sharded by rows are not recorded"
    return (ShardedSpectra(by_rows, processes) if by_rows and processes.group is not None else None), note


def manifest(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    budget: Budget,
    processes: TrainingProcesses,
    table: LayerTable,
    probed: bool = False,
) -> dict[str, Any]:
    """What manifest.json says of a run: the model, its optimizer, the cadence, the versions and the layers."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "schema": SCHEMA,
        "created": time.time(),
        "model": type(model).__name__,
        "outline": outline(parameters),
        "optimizer": {"kind": type(optimizer).__name__, "groups": groups},
        "config": {"budget": budget.share, "every": budget.every, "dense": budget.dense, "runs_the_model": probed},
        "process": {"rank": processes.rank, "world_size": processes.size},
        "versions": {"normscope": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "layers": table.rows,
    }
