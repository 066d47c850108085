"""One trial as a task that any process on any machine can run: what it is, where it works, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from normscope._watch.store import plain
from normscope.lab.experiment import Experiment, find
from normscope.lab.workspace import CHECKPOINT, PROGRESS, Report, Workspace, write_atomically, writing
from normscope.version import __version__

RESULT = "result.json"
LOCK = ".lock"  # held by the process that runs the trial; let go when it dies
VERSIONS = {"normscope": __version__, "torch": torch.__version__, "python": platform.python_version()}

Record = dict[str, Any]  # a trial's result.json


@dataclass(frozen=True)
class Task:
    """A trial of an experiment: its parameters and where it works. threads: of torch, for sums depend on how they are split."""

    experiment: str
    label: str
    seed: int
    trial: Any
    directory: Path
    data_directory: Path | None = None
    threads: int = 1

    @property
    def result(self) -> Record | None:
        """What it left behind, if it is finished; a damaged result is none, so that the trial is run again."""
        try:
            record = json.loads((self.directory / RESULT).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and {"numbers", "parameters", "seconds"} <= record.keys() else None

    @property
    def done(self) -> float:
        """The part that is done, from 0 to 1, as its process last said."""
        try:
            return float(json.loads((self.directory / PROGRESS).read_text())["done"])
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return 0.0


@dataclass(frozen=True)
class Failure:
    """A trial that ended without a result, and why."""

    task: Task
    error: str


def tasks(experiment: Experiment[Any, Any], settings: Any, trials: Path, data_directory: Path | None, threads: int) -> list[Task]:
    """The trials of every seed. A directory is named after what is in it, so equal trials of two experiments are one.

    What another version of normscope measured is another trial: no range of versions is promised to measure alike.
    """
    measure = f"{experiment.measure.__module__}.{experiment.measure.__qualname__}"
    found = []
    for seed in settings.seeds:
        for label, trial in experiment.trials(settings, seed).items():
            content = {"measure": measure, "threads": threads, "seed": seed, "parameters": _chosen(trial)}
            digest = _digest({**content, "normscope": __version__})
            slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{label} seed {seed}").strip("-")
            found.append(Task(experiment.name, label, seed, trial, trials / f"{slug}-{digest}", data_directory, threads))
    return found


def _chosen(trial: Any) -> dict[str, Any]:
    """The parameters that are not as by default."""
    usual = {item.name: item.default_factory() if item.default is MISSING else item.default for item in _optional(trial)}
    return {name: value for name, value in plain(asdict(trial)).items() if name not in usual or value != plain(usual[name])}


def _optional(trial: Any) -> list[Any]:
    return [item for item in fields(trial) if not (item.default is MISSING and item.default_factory is MISSING)]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def run_task(task: Task, report: Report | None = None) -> Record:
    """Run a trial, or go on with it, and write its result.json; while another process is at it, wait for its result."""
    workspace = Workspace(task.directory, task.seed, task.data_directory, report)
    with writing(task.directory):
        lock = FileLock(task.directory / LOCK).acquire()
    with lock:
        return task.result or _run(task, workspace)


def _run(task: Task, workspace: Workspace) -> Record:
    start = time.perf_counter()
    with _threads(task.threads):
        numbers = find(task.experiment).measure(task.trial, workspace)
    record: Record = {
        "label": task.label,
        "seed": task.seed,
        "parameters": plain(asdict(task.trial)),
        "numbers": plain(numbers),
        "versions": VERSIONS,
        "seconds": round(time.perf_counter() - start, 3),
    }
    write_atomically(task.directory / RESULT, (json.dumps(record, indent=1) + "\n").encode())
    for leftover in (CHECKPOINT, PROGRESS):
        (task.directory / leftover).unlink(missing_ok=True)
    return record


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
