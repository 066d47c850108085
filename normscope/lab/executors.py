"""Running tasks on this machine: one after another here, or several at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Protocol

from normscope.core.errors import InputError, NormscopeError
from normscope.lab.tasks import Failure, Record, Task, run_task
from normscope.lab.workspace import write_atomically

ERROR = "error.txt"
POLL = 0.5  # seconds
UNEXPECTED, MENDABLE = 1, 2  # exit codes of a trial's process; what the user can fix would be the same in every trial

Progress = Callable[[float], None]  # trials' worth of work done since the start, running ones counted in part


class Executor(Protocol):
    """Runs tasks and yields each with its record, or with why it failed, as they end."""

    def run(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[Task, Record | Failure]]: ...


class InProcess:
    """One task after another, in this process."""

    def run(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[Task, Record | Failure]]:
        for finished, task in enumerate(tasks):

            def report(part: float, finished: int = finished) -> None:
                progress(finished + part)

            try:
                yield task, run_task(task, report)
            except NormscopeError:
                raise
            except Exception:
                yield task, Failure(task, traceback.format_exc())
            progress(finished + 1)


class Processes:
    """Several tasks at a time. A process that dies takes only its own trial with it."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, tasks: Sequence[Task], progress: Progress) -> Iterator[tuple[Task, Record | Failure]]:
        context = multiprocessing.get_context("spawn")
        waiting = deque(tasks)
        running: dict[multiprocessing.process.BaseProcess, Task] = {}
        finished = 0
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    task = waiting.popleft()
                    process = context.Process(target=_run_in_process, args=(task,), daemon=True)
                    process.start()
                    running[process] = task
                wait([process.sentinel for process in running], timeout=POLL)
                for ended in [process for process in running if not process.is_alive()]:
                    ended.join()
                    finished += 1
                    yield _outcome(running.pop(ended), ended.exitcode)
                progress(finished + sum(task.done for task in running.values()))
        finally:
            for unfinished in running:
                unfinished.terminate()


def _run_in_process(task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the runner alone answers, and ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_task(task)
    except Exception as error:
        mendable = isinstance(error, NormscopeError)
        write_atomically(task.directory / ERROR, (str(error) if mendable else traceback.format_exc()).encode())
        raise SystemExit(MENDABLE if mendable else UNEXPECTED) from None


def _end_with_parent() -> None:
    """A runner that is killed takes its trials with it, so that they can go on when it is started again."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(UNEXPECTED)


def _outcome(task: Task, exit_code: int | None) -> tuple[Task, Record | Failure]:
    record = task.result
    if exit_code == 0 and record is not None:
        return task, record
    path = task.directory / ERROR
    error = path.read_text() if path.exists() else f"its process ended with exit code {exit_code}"
    path.unlink(missing_ok=True)
    if exit_code == MENDABLE:
        raise InputError(error)
    return task, Failure(task, error)
