"""A recording begins: what its directory holds already, and whether it goes on, begins anew or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normscope._watch.directory import CHECKSUMS, EVENTS, MANIFEST, SEGMENTS, STATUS
from normscope._watch.distributed import TrainingProcesses
from normscope._watch.following import FollowedPart
from normscope._watch.options import Options
from normscope._watch.pairing import listed
from normscope._watch.preparation import Earlier, outline
from normscope._watch.probes import PROBED
from normscope.core.errors import InputError

AUTO, RUNS = "auto", "runs"


def numbered(model: nn.Module) -> Path:
    """The directory of run="auto": the first of runs/name, runs/name-2, … that is free, named after the model's class."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise InputError('run="auto" is for one process: with several, give all of them the same run=')
    name, number = type(model).__name__.lower(), 1
    while (path := Path(RUNS) / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def earlier(
    run: Path, processes: TrainingProcesses, parameters: Mapping[str, torch.Tensor], resume: bool, overwrite: bool
) -> Earlier:  # fmt: skip
    """What to go on from; refused where it was not asked for, or where the directory is another model's."""
    directory = processes.directory
    ranks = [path for path in run.glob("rank-*") if path.is_dir() and path != directory and processes.rank == 0]
    if overwrite:
        _clear(directory)
        for path in ranks if processes.size == 1 else ():
            _clear(path)
            with suppress(OSError):
                path.rmdir()
    before = Earlier.of(FollowedPart.at(directory, anew=True))
    there = before.rows or before.outline is not None or (processes.size == 1 and ranks)
    if there and not resume:
        raise InputError(
            f"{run} holds a run already ({before.rows:,} rows, {before.life}): pass resume=True to go on with it, "
            'overwrite=True to replace it, or another run=; run="auto" numbers runs'
        )
    lazy = any(is_lazy(parameter) for parameter in parameters.values())
    if before.outline is not None and not lazy and before.outline != outline(parameters):
        raise InputError(f"{run} holds a run of a different model: choose another run=, or pass overwrite=True")
    return before


def _clear(directory: Path) -> None:
    """Remove the files of a run, and nothing else that is there."""
    names = [directory / name for name in (MANIFEST, EVENTS, STATUS)]
    segments = [path for segment in directory.glob(SEGMENTS) for path in (segment, segment.with_suffix(CHECKSUMS))]
    for path in (*names, *segments):
        path.unlink(missing_ok=True)


def first_notes(processes: TrainingProcesses, foreign: Sequence[str], options: Options) -> list[str]:
    """What is known to be missing before the first step, and that a probe will run the model. foreign: parameters."""
    what = "parameters whose tensor type runs code of its own, so they are not recorded"
    found = [processes.problem, f"{what}: {listed(foreign)}" if foreign else "", "" if options.probe is None else PROBED]
    return [message for message in found if message]


def say_resumed(run: Path, before: Earlier, step: int, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """That a recording goes on. say: writes a note and prints it. note: only writes it."""
    say(f"{run} holds {before.rows:,} rows of an earlier recording ({before.life}): this one goes on after step {step:,}")
    if before.problem:
        note(before.problem)
