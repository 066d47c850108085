"""`ns.watch`: one line in a training loop, and what normalization does is on record."""

from __future__ import annotations

import numbers
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from normscope._watch.beginning import AUTO
from normscope._watch.budget import Budget
from normscope._watch.completion import OnRow
from normscope._watch.options import Options
from normscope._watch.probes import Probe
from normscope._watch.recording import Watch
from normscope._watch.sinks import Sink
from normscope.core.data import Example
from normscope.core.deprecation import earlier
from normscope.core.errors import InputError, first_line
from normscope.symmetry.report import SymmetryReport

DENSE = 50
MOST = 2**62  # steps


@earlier(positional=2)
def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: str | Path,
    budget: float = 0.01,
    every: int | None = None,
    layers: str | None = None,
    symmetries: SymmetryReport | None = None,
    scaler: torch.amp.GradScaler | None = None,
    probe: Probe | None = None,
    on_row: OnRow | None = None,
    start_step: int | None = None,
    quiet: bool = False,
    dense: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    sinks: Sequence[str | Sink] = (),
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
    part that fails is switched off and noted in events.jsonl.

    model: the module that is trained, as the loop calls it.
    optimizer: what trains it; its hooks say when a step is made.
    run: a directory. One that already holds a run is refused, unless resume or overwrite is true. "auto" takes the first free one
    of runs/name, runs/name-2, …, named after the model's class.

    budget: the share of wall time that samples may take.
    every: a sample every so many steps, instead of a budget.
    layers: a regular expression for the names of the layers to record; all of them if not given.
    symmetries: a report of `ns.symmetries`, made before training. It says which weights are scale-free and which of your modules
    normalize; without it, most weights are not judged.

    scaler: the GradScaler; found without your help where it calls the optimizer.
    probe: a batch for slow measurements, which do run the model.
    on_row: called with every row and the layers' names, on a thread of its own.
    start_step: how many steps were made before; by default, the last step on record.
    quiet: true to print no summary at the end.
    dense: how many steps at the beginning are all sampled, outside the budget; 50 by default, or none with `every`.
    resume: continue the run in this directory after its last step.
    overwrite: replace the run in this directory.
    sinks: other tools that show the run while it is recorded ("wandb", "trackio", "mlflow", "tensorboard"), and web addresses
    that findings are posted to.

    example, graph: no longer used; the model is not traced.
    """
    if example is not None or graph is not None:
        warnings.warn(
            "ns.watch no longer traces the model, so example= and graph= do nothing and will go; pass symmetries=… instead",
            DeprecationWarning,
            stacklevel=3,
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not isinstance(run, str | os.PathLike):
        raise InputError(f"run must be the path of a directory, got {type(run).__name__}")
    if resume and overwrite:
        raise InputError("resume=True continues a run and overwrite=True replaces it: pass only one of them")
    if layers is not None:
        try:
            re.search(layers, "")
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"layers must be a regular expression for names of layers, got {layers!r}: {first_line(error)}"
            ) from error
    if not isinstance(budget, numbers.Real):
        raise InputError(f"budget must be a number, got {budget!r}")
    for name, number in (("every", every), ("dense", dense), ("start_step", start_step)):
        if number is not None and not isinstance(number, numbers.Integral):
            raise InputError(f"{name} must be a whole number, got {number!r}")
        if number is not None and abs(number) > MOST:
            raise InputError(f"{name} must be a number of steps, at most 2**62")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if on_row is not None and not callable(on_row):
        raise InputError(f"on_row must be a function of a row and the layers' names, got {type(on_row).__name__}")
    if probe is not None and not isinstance(probe, Probe):
        raise InputError(f"probe must be an ns.Probe, got {type(probe).__name__}")
    if isinstance(sinks, str) or not isinstance(sinks, Iterable):
        raise InputError(f'sinks must be a list of names or objects, such as ["wandb"], got {sinks!r}')
    auto = run == AUTO  # the path ./auto is another
    options = Options(layers, symmetries, scaler, probe, on_row, start_step, quiet, resume, overwrite, tuple(sinks), auto)
    first = (0 if every else DENSE) if dense is None else dense
    return Watch(model, optimizer, Path(run), Budget(budget, every, dense=first), options)
