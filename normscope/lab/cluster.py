"""Running tasks on a Ray cluster: results are those of this machine, and a node that dies costs its running trials alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from normscope.core.errors import InputError, NormscopeError
from normscope.core.ray import connected
from normscope.lab.executors import POLL, Progress
from normscope.lab.tasks import RESULT, Failure, Record, Task, run_task
from normscope.lab.workspace import write_atomically

Files = dict[str, bytes]  # what a trial left behind, by its path in the trial's directory


class OnRay:
    """Every task on a free processor of the cluster. address: of a running one; None starts one on this machine.

    A trial works in a directory of the same name on its node and sends all of its files back, so nodes share no file system;
    where they do, it goes on from its checkpoint on another node. normscope must be installed on the nodes.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address

    def run(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[Task, Record | Failure]]:
        with connected(self.address) as ray:
            remote = ray.remote(max_retries=0)(run_and_collect)  # retries are the runner's, which reports them
            running = {remote.options(num_cpus=task.threads).remote(task): task for task in tasks}
            while running:
                ready, _ = ray.wait(list(running), timeout=POLL)
                for reference in ready:
                    task = running.pop(reference)
                    yield task, _outcome(ray, reference, task)
                progress(len(tasks) - len(running) + sum(task.done for task in running.values()))


def run_and_collect(task: Task) -> Files:
    """On a node: run the trial, and return its files."""
    run_task(task)
    return {str(path.relative_to(task.directory)): path.read_bytes() for path in _files(task.directory)}


def _outcome(ray: Any, reference: Any, task: Task) -> Record | Failure:
    try:
        files: Files = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, NormscopeError):
            raise InputError(str(error.cause)) from None
        return Failure(task, str(error))
    except ray.exceptions.RayError as error:
        return Failure(task, f"lost with its node: {''.join(traceback.format_exception_only(error)).strip()}")
    _write(files, task.directory)
    record = task.result
    return record if record is not None else Failure(task, "its node sent no result")


def _write(files: Files, directory: Path) -> None:
    """All of them in place of what an attempt before left; the result last, for it says that the rest is complete."""
    for path in _files(directory):
        if str(path.relative_to(directory)) not in files:
            path.unlink()
    for name in sorted(files, key=lambda name: name == RESULT):
        path = directory / name
        if not path.exists() or path.read_bytes() != files[name]:  # nodes may share this file system
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, files[name])


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
